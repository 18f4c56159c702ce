#!/usr/bin/env bash
# Compiles every CUDA kernel for every architecture, without a GPU. Arguments go to the script beside
# this one. Installs NVRTC into the target folder, once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${CARGO_TARGET_DIR:-$PWD/target}/nvrtc
if [[ ! -e $venv/installed ]]; then
    python3 -m venv "$venv"
    "$venv"/bin/pip install --quiet nvidia-cuda-nvrtc==13.0.88
    touch "$venv"/installed
fi
"$venv"/bin/python scripts/compile-kernels.py "$@"
