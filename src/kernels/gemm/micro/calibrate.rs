//! Measures what a processor's name does not say: whether `vdpbf16ps` runs at full rate.
//!
//! Processors with AMX take two cycles for it, also where the system does not let AMX be used, or hides it. There a
//! sum of BF16, widened to F32, is twice as fast.

use std::hint::black_box;
use std::ops::Range;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::isa::InstructionSet;
use super::product::PackedGemm;

/// The time of an AVX512-BF16 instruction over that of an F32 multiply-add, measured at the first call, in some 100 µs;
/// `None` where the processor does not have both.
pub(super) fn bf16_over_f32() -> Option<f64> {
    static RATIO: LazyLock<Option<f64>> = LazyLock::new(|| {
        let pairs = InstructionSet::Avx512Bf16;
        let time = |isa| move || time(isa);
        pairs.is_available().then(|| ratio([time(pairs), time(pairs.without_terms())]))
    });
    *RATIO
}

/// The ratio of two times: of the shortest of each, as others only lengthen them. They are measured in turns, so that
/// what takes a processor away for long takes it from both. They are measured again while the ratio is none of a
/// processor's, which are 1 and 2.
fn ratio([mut first, mut second]: [impl FnMut() -> Duration; 2]) -> f64 {
    const UNSURE: Range<f64> = 1.2..1.8;
    let (mut a, mut b, mut ratio) = (Duration::MAX, Duration::MAX, 0.0);
    for _ in 0..6 {
        for _ in 0..12 {
            (a, b) = (a.min(first()), b.min(second()));
        }
        ratio = a.as_secs_f64() / b.as_secs_f64().max(f64::MIN_POSITIVE);
        if !UNSURE.contains(&ratio) {
            break;
        }
    }
    ratio
}

/// The time of some tiles whose words all lie in the first-level cache.
fn time(isa: InstructionSet) -> Duration {
    const DEPTH: usize = 128;
    const COLUMNS: usize = 48;
    let left = vec![0x3f80_3f80u32; isa.rows() * DEPTH];
    let right = vec![0x3f80_3f80u32; COLUMNS * DEPTH];
    let gemm = PackedGemm {
        left: &left,
        left_block: left.len(),
        left_row: 1,
        left_step: isa.rows(),
        left_starts: &[0],
        right: &right,
        right_block: 16 * DEPTH,
        right_step: 16,
        right_starts: &[0],
        rows: isa.rows(),
        columns: COLUMNS,
        depth: DEPTH,
        terms: 1,
        row_panels: true,
    };
    let start = Instant::now();
    for _ in 0..4 {
        black_box(&gemm).multiply(isa, |tile| {
            black_box(tile.sums);
        });
    }
    start.elapsed()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Somebody else has the processor while one of the two is measured, for several rounds.
    #[test]
    fn a_disturbance_does_not_decide() {
        for (truth, disturbed) in [(2.0, 1), (1.0, 0)] {
            let calls = [Cell::new(0), Cell::new(0)];
            let both = [truth, 1.0].map(|unit| Duration::from_secs_f64(1e-5 * unit));
            let of = |at: usize| {
                let (calls, both) = (&calls, both);
                move || {
                    calls[at].set(calls[at].get() + 1);
                    let slow = at == disturbed && calls[at].get() < 20;
                    if slow { both[at].mul_f64(1.5) } else { both[at] }
                }
            };
            assert!((ratio([of(0), of(1)]) - truth).abs() < 1e-3);
        }
    }

    /// Every instruction set can be timed; a tile takes longer than a clock's tick, and no milliseconds.
    #[test]
    fn a_tile_takes_microseconds() {
        let sets = InstructionSet::of_f32().chain([InstructionSet::Avx512Bf16]);
        for isa in sets.filter(|isa| isa.is_available()) {
            assert!(time(isa) > Duration::ZERO, "{isa:?}");
        }
        let both = InstructionSet::Avx512Bf16.is_available();
        assert_eq!(bf16_over_f32().is_some(), both);
    }
}
