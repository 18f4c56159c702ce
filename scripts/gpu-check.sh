#!/usr/bin/env bash
# Builds, on a machine without a GPU, what checks the crate on one with a CUDA 13 driver:
#
#   scripts/gpu-check.sh build [FOLDER]   into target/gpu-check, unless said otherwise
#
# The folder has the tests, the benchmark `gpu` and the cifar10 example, for every set of features, and most
# kernels compiled, in an archive; what they read; and run.sh, which needs the driver, the CUDA libraries, a Python with PyTorch and
# room for the programs, a quarter of a GB; no Rust toolchain. CUDA_COMPUTE_CAP is what candle's kernels are
# compiled for, 90 by default.
#
# GPU_CHECK_EMULATED=1 builds for the emulated GPU instead, without optimisation and compiled kernels: scripts/gpu-run-check.sh
# rehearses with that. GPU_CHECK_ALSO: features, separated by commas, added to each set but the benchmark's, to reuse what is
# already built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[[ ${1:-} == build && $# -le 2 ]] || { sed -n 's/^# \?//p' "$0" | sed 1d >&2 && exit 2; }
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
folder=${2:-$CARGO_TARGET_DIR/gpu-check}
cuda=$CARGO_TARGET_DIR/cuda-13.0
most=55000000 # bytes of the folder

# Sets of features. GPU_CHECK_FEATURES=cudnn, say, leaves the others out.
read -ra variants <<<"${GPU_CHECK_FEATURES:-cudnn cuda nccl}"

install_nvcc() {
    python3 -m venv "$cuda/venv"
    "$cuda/venv/bin/pip" install --quiet nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 \
        nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85 nvidia-cuda-nvrtc==13.0.88
    touch "$cuda/installed-with-nvrtc"
}

# The source folder of cudarc, as locked.
cudarc() {
    cargo metadata --locked --format-version 1 --features cuda | python3 -c '
import json, os, sys
packages = json.load(sys.stdin)["packages"]
print(next(os.path.dirname(p["manifest_path"]) for p in packages if p["name"] == "cudarc"))'
}

# The executables that a cargo command makes, stripped, to FOLDER: each by the name of its target.
executables() { # folder, cargo arguments...
    local into=$1
    mkdir -p "$into"
    shift
    cargo "$@" --locked --message-format=json-render-diagnostics | python3 -c '
import json, sys
for message in map(json.loads, sys.stdin):
    if message.get("executable"):
        name, kind = message["target"]["name"], message["target"]["kind"]
        print("lib" if "lib" in kind else name, message["executable"])' |
        while read -r name path; do strip -o "$into/$name" "$path"; done
}

profile=(--release) level=-9
if [[ ${GPU_CHECK_EMULATED:-0} == 1 ]]; then # with the variables of emulated-gpu.sh
    profile=() level=-1 most=1000000000 # larger programs, which travel nowhere
    export CUDA_HOME=$CARGO_TARGET_DIR/emulated-gpu
    tests/emulator/build.sh "$CUDA_HOME" "$(cudarc)"
    export NVCC=$CUDA_HOME/bin/nvcc CUDA_COMPUTE_CAP=98
else
    [[ -e $cuda/installed-with-nvrtc ]] || install_nvcc
    scripts/cuda-stubs.py "$(cudarc)" "$cuda/stubs"
    CUDA_HOME=$(echo "$cuda"/venv/lib/python3*/site-packages/nvidia/cu13)
    export CUDA_HOME REAL_NVCC=$CUDA_HOME/bin/nvcc NVCC=$PWD/scripts/nvcc-stand-in
    export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}
    export LIBRARY_PATH=$cuda/stubs${LIBRARY_PATH:+:$LIBRARY_PATH}
fi
export CUDARC_CUDA_VERSION=13000

# What programs read at run time lies where it does in the repository, so that one variable,
# CARGO_MANIFEST_DIR, tells them where that is.
rm -rf "$folder"
mkdir -p "$folder"
cp -r --parents README.md CHANGELOG.md Cargo.toml Cargo.lock docs src examples/quickstart.rs tests/golden/*.safetensors \
    tests/fuzz/corpus benches/common/*.py benches/gpu/*.py scripts/*-kernel*.py "$folder"
cp scripts/gpu-run.sh "$folder/run.sh"
cp scripts/cifar10-table.py "$folder"
for variant in "${variants[@]}"; do
    bin=$folder/bin/$variant features=$variant${GPU_CHECK_ALSO:+,$GPU_CHECK_ALSO}
    if [[ $variant == nccl ]]; then # for the tests of its engine alone
        executables "$bin" test --no-run --features "$features" --lib
        continue
    fi
    executables "$bin" test --no-run --features "$features" --lib --test it
    executables "$bin" build "${profile[@]}" --features "$features" --example cifar10
    executables "$bin" build "${profile[@]}" --features "$variant" --manifest-path benches/Cargo.toml --bin gpu
done

mkdir "$folder/cache"
# NVRTC of the version that is there, as the key of a compiled kernel says it. All once more with line numbers, for
# compute-sanitizer: compiled there, they would take more time than it has.
fill_cache() { # option...
    "$cuda/venv/bin/python" scripts/fill-kernel-cache.py "$folder/cache" --capability "$CUDA_COMPUTE_CAP" "$@"
}
[[ ${GPU_CHECK_EMULATED:-0} == 1 ]] || {
    fill_cache
    fill_cache --lines
}

echo "libraries that the programs ask for, with the newest version of glibc:"
readelf -d "$folder"/bin/*/* | sed -n 's/.*(NEEDED).*\[\(.*\)\]/  \1/p' | sort -u
readelf -V "$folder"/bin/*/* | grep -o 'GLIBC_[0-9.]*' | sort -uV | sed 's/^/  /' | tail -n 1
# The same program with other features comes next in the archive, where the compressor still remembers the one before:
# 30 MB, of 325. In the order of the folders it would be 50.
(cd "$folder" && find bin cache -type f -printf '%f %p\n' | sort | cut -d' ' -f2- |
    XZ_OPT="-T0 $level" tar -cJf bin.tar.xz --remove-files -T - && rm -r bin cache)
bytes=$(du -sb "$folder" | cut -f1)
echo "$folder: $((bytes / 1000000)) MB"
echo "There, for calls of less than ten minutes: export SECONDS_A_CALL=240; then run.sh tests, run.sh gpt2, run.sh resnets"
((bytes <= most)) || { echo "more than $((most / 1000000)) MB" >&2 && exit 1; }
