#!/usr/bin/env bash
# Runs unit tests under Miri, which finds undefined behaviour: accesses out of bounds, aliasing, data races, reads of what
# nobody wrote. `--all` runs more tests, some of them for minutes. Needs nightly's `miri` and `rust-src`, and installs them.
#
# The AVX2 kernels run, as Miri knows their instructions, but for one (`rounded_to_f16`). AMX runs on its stand-in. Left out:
#   - AVX-512, AMX's assembly, CUDA, the `gemm` crate's vectors: instructions and foreign functions that Miri lacks.
#   - Most of what needs no `unsafe`, and every test of large sizes: Miri is some thousand times slower.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Each of these runs some test.
filters=(
)
all=(
)
case ${1-} in
"") ;;
--all) filters+=("${all[@]}") ;;
*) echo "usage: scripts/miri.sh [--all]" >&2 && exit 2 ;;
esac

ready() { cargo +nightly miri --version && [[ -d $(rustc +nightly --print sysroot)/lib/rustlib/src/rust/library ]]; }
if ! ready >/dev/null 2>&1; then
    if ! install=$(timeout 300 rustup toolchain install nightly --profile minimal --component miri,rust-src 2>&1) || ! ready; then
        printf '%s\n\nMiri: NOT RUN, for nightly with Miri cannot be installed from here\n' "$install" >&2
        exit 0
    fi
fi

# Vectors for this crate alone: crates that would use others than ours see none.
vectors=(
    -Zprofile-rustflags
    --config 'profile.dev.package.candle-amp.rustflags=["-Ctarget-feature=+avx2,+fma,+f16c"]'
)
# crossbeam-epoch, in rayon, breaks the rules of stacked borrows, and keeps a tag in the bits of its pointers. rayon's threads
# outlive `main`.
export MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-compare-exchange-weak-failure-rate=0.1 -Zmiri-tree-borrows -Zmiri-permissive-provenance -Zmiri-ignore-leaks"
# Two threads, so that races show. candle records a backtrace for each of its errors, which takes seconds here.
export RAYON_NUM_THREADS=2 RUST_BACKTRACE=0 RUST_LIB_BACKTRACE=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
cargo +nightly miri test --locked "${vectors[@]}" --lib -- "${filters[@]}" | tee "$log"

# A filter that names no test would pass.
for filter in "${filters[@]}"; do
    grep -q "^test .*$filter.* \.\.\. ok" "$log" || { echo "miri: no test is named $filter" >&2 && exit 1; }
done
