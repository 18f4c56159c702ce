#!/usr/bin/env bash
# Runs `cargo test --features cuda`, with the arguments given, on a GPU that is emulated: see
# tests/emulator/README.md. EMULATED_GPU_COMMAND=clippy, say, is for another of cargo's commands.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

metadata=$(cargo metadata --locked --format-version 1 --features cuda)
target=$(grep -oE '"target_directory":"[^"]*"' <<<"$metadata" | cut -d'"' -f4 || true)
cudarc=$(grep -oE '"manifest_path":"[^"]*/cudarc-[0-9.]*/Cargo.toml"' <<<"$metadata" | cut -d'"' -f4 || true)
[[ $cudarc ]] || { echo "emulated-gpu: cargo does not know where cudarc is" >&2 && exit 1; }
export CUDA_HOME=$target/emulated-gpu
tests/emulator/build.sh "$CUDA_HOME" "$(dirname "$cudarc")"

export NVCC=$CUDA_HOME/bin/nvcc
# An architecture that does not exist, so that these kernels are never taken for a real compiler's.
export CUDA_COMPUTE_CAP=98
export CANDLE_AMP_CACHE= # the emulated compiler has its own, and a user's is none of its business
export CUDARC_CUDA_VERSION=13000 # else cudarc asks the nvcc on the PATH
export LD_LIBRARY_PATH=$CUDA_HOME/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

if [[ ${EMULATED_GPU_ASAN:-0} == 1 ]]; then
    # For the tests only: neither cargo nor the compiler are to run under it.
    export CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$PWD/tests/emulator/asan.sh
fi
exec cargo "${EMULATED_GPU_COMMAND:-test}" --features cuda "$@"
