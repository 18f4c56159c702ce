#!/usr/bin/env bash
# Runs the tests of ranks that mpirun starts, and installs Open MPI and libclang if they are missing. Arguments go to
# cargo; the argument `install` alone installs. CANDLE_AMP_KILLS: how often a rank is killed at a random moment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v mpirun >/dev/null || ! command -v mpicc >/dev/null ||
    ! compgen -G "/usr/lib/llvm-*/lib/libclang*.so*" >/dev/null; then
    root=()
    ((EUID == 0)) || root=(sudo)
    "${root[@]}" apt-get update -q
    "${root[@]}" apt-get install -qy --no-install-recommends libopenmpi-dev openmpi-bin libclang-dev
fi
[[ ${1:-} == install ]] && exit

cargo clippy --features mpi --lib --test mpi "$@" -- -D warnings
cargo test --features mpi --test mpi "$@"
cargo test --features mpi --example cifar10 --example gpt "$@" -- mpirun::
