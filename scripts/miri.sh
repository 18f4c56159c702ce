#!/usr/bin/env bash
# Runs unit tests under Miri, which finds undefined behaviour: accesses out of bounds, aliasing, data races, reads of what
# nobody wrote. `--all` runs more tests, some of them for minutes. Needs a nightly's `miri` and `rust-src`, and installs them.
#
# AVX2's vectors run, as Miri knows their instructions, but for one (`rounded_to_f16`); its micro-kernel and convolutions do
# not. AMX runs on its stand-in. Left out:
#   - AVX-512, AMX's assembly, CUDA, the `gemm` crate's vectors: instructions and foreign functions that Miri lacks.
#   - Most of what needs no `unsafe`, and every test of large sizes: Miri is some thousand times slower.
#
# One nightly, for its successors refuse what other crates do: since September 2026, parking_lot's call of `futex`, whose
# argument is a reference where the kernel has a pointer.
set -euo pipefail
nightly=nightly-2026-08-20
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Each of these runs some test.
filters=(
    autocast::scope::tests
    autograd::
    checkpoints::
    gemm::layout
    tensors::handle
    cpu::guard
    cpu::in_place
    cpu::parallel::tests::a_busy_pool
    cpu::parallel::tests::every_task_runs_once
    cpu::parallel::tests::helpers_come
    cpu::parallel::tests::a_panic
    cpu::vector::tests::arithmetic
    conv::packed::tests::rows_are_interleaved
    nhwc::rows::tests::lines_are_rows
)
all=(
    cpu::parallel
    cpu::vector::tests::lanes_are_picked
    cpu::vector::tests::masks_bound
    cpu::vector::tests::products_of_every_shape
    gemm::blocked
    gemm::micro::tests::terms_add_up
    gemm::product::tests::parts_cover
    embedding::tests::nan_reaches
    reduce::tests::nan_and_infinity
    softmax::tests::infinities_and_nan
    rnn::tests::nan_stays
    pool::tests::nan_wins
    interpolate::tests::strided_tensors
)
case ${1-} in
"") ;;
--all) filters+=("${all[@]}") ;;
*) echo "usage: scripts/miri.sh [--all]" >&2 && exit 2 ;;
esac

ready() { cargo +$nightly miri --version && [[ -d $(rustc +$nightly --print sysroot)/lib/rustlib/src/rust/library ]]; }
if ! ready >/dev/null 2>&1; then
    if ! install=$(timeout 300 rustup toolchain install $nightly --profile minimal --component miri,rust-src 2>&1) || ! ready; then
        echo "$install" >&2
        echo "Miri: NOT RUN, for $nightly with Miri cannot be installed from here" | tee -a "${NOT_RUN:-/dev/null}" >&2
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
cargo +$nightly miri test --locked "${vectors[@]}" --lib -- "${filters[@]}" | tee "$log"

# A filter that names no test would pass.
for filter in "${filters[@]}"; do
    grep -q "^test .*$filter.* \.\.\. ok" "$log" || { echo "miri: no test is named $filter" >&2 && exit 1; }
done
