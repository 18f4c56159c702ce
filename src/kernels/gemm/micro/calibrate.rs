//! Measures what a processor's name does not say: whether `vdpbf16ps` runs at full rate.
//!
//! Processors with AMX take two cycles for it, also where the system does not let AMX be used, or hides it. There a
//! sum of BF16, widened to F32, is twice as fast.

use std::hint::black_box;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::{InstructionSet, PackedGemm};

/// The time of an AVX512-BF16 instruction over that of an F32 multiply-add, measured at the first call, in some 100 µs;
/// `None` where the processor does not have both.
pub(super) fn bf16_over_f32() -> Option<f64> {
    static RATIO: LazyLock<Option<f64>> = LazyLock::new(|| {
        let both = [InstructionSet::Avx512Bf16, InstructionSet::Avx512F32];
        let there = both.iter().all(|isa| isa.is_available());
        let [bf16, f32] = if there { both.map(time) } else { return None };
        Some(bf16.as_secs_f64() / f32.as_secs_f64().max(f64::MIN_POSITIVE))
    });
    *RATIO
}

/// The time of a tile whose words all lie in the first-level cache: the shortest of several, as others only lengthen it.
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
    let run = |_| {
        let start = Instant::now();
        for _ in 0..4 {
            black_box(&gemm).multiply(isa, |tile| {
                black_box(tile.sums);
            });
        }
        start.elapsed()
    };
    (0..12).map(run).min().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every unit can be timed; a tile takes longer than a clock's tick, and no milliseconds.
    #[test]
    fn a_tile_takes_microseconds() {
        let units =
            [InstructionSet::Avx2F32, InstructionSet::Avx512F32, InstructionSet::Avx512Bf16];
        for isa in units.into_iter().filter(|isa| isa.is_available()) {
            assert!(time(isa) > Duration::ZERO, "{isa:?}");
        }
        let both = InstructionSet::Avx512Bf16.is_available();
        assert_eq!(bf16_over_f32().is_some(), both);
    }
}
