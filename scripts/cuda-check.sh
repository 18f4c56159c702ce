#!/usr/bin/env bash
# Type-checks, lints and documents the CUDA code on a machine without CUDA. Arguments go to cargo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export NVCC=$PWD/scripts/nvcc-stand-in
# An architecture that does not exist. Cargo watches this variable but not NVCC, so that it is what
# keeps the empty kernels made here out of a later build with the real compiler.
export CUDA_COMPUTE_CAP=99
export CUDARC_CUDA_VERSION=13000 # else cudarc asks the nvcc on the PATH

cargo clippy --features cuda --all-targets "$@" -- -D warnings
cargo clippy --features cudnn,nccl "$@" -- -D warnings
cargo clippy --manifest-path benches/Cargo.toml --features cudnn --bin gpu "$@" -- -D warnings

# docs.rs has no nvcc, and documents the crate without these features (see Cargo.toml).
RUSTDOCFLAGS="${RUSTDOCFLAGS:-} -D warnings" cargo doc --no-deps --features cudnn,serde "$@"
