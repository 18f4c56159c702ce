//! The CPU side: one pass over memory each, on all cores.

use candle_core::{Result, Tensor};

use super::counts::{BINS, Counts, HIGHEST, LOWEST};
use crate::kernels::cpu::dtype::{Elements, Real};
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::vectorise;

/// Elements a task; they are counted in 32 bits.
const TASK: usize = 1 << 16;

pub(super) fn exponents<T: Real>(tensor: &Tensor, factor: f32) -> Result<Counts> {
    let elements = Elements::<T>::of(tensor)?;
    let factor = T::of(factor.into());
    let merge = |mut a: Counts, b: Counts| {
        a.add(&b);
        a
    };
    let parts = parallel::map_items(elements.chunks(TASK), |part| count(part, factor));
    Ok(parts.into_iter().fold(Counts::default(), merge))
}

fn count<T: Real>(part: &[T], factor: T) -> Counts {
    const MANTISSA: u32 = f64::MANTISSA_DIGITS - 1;
    /// From 2 - 2⁻¹¹ on, without the leading bit.
    const TOP: u64 = (1 << MANTISSA) - (1 << (MANTISSA - 11));
    let mut bins = [[0u32; 3]; BINS];
    let mut counts = Counts::default();
    for &x in part {
        // As `f64` every `f32` is normal, so that there is one way to read an exponent.
        let x = (x * factor).to_double().abs();
        let bits = x.to_bits();
        if x == 0.0 {
            counts.zero += 1;
        } else if x.is_finite() {
            let exponent = (bits >> MANTISSA) as i32 - 1023;
            let fraction = bits & ((1 << MANTISSA) - 1);
            let at = (exponent.clamp(LOWEST, HIGHEST) - LOWEST) as usize;
            bins[at][usize::from(fraction != 0) + usize::from(fraction >= TOP)] += 1;
        } else if x.is_nan() {
            counts.nan += 1;
        } else {
            counts.infinite += 1;
        }
    }
    for (count, bin) in counts.bins.iter_mut().zip(bins) {
        *count = bin.map(u64::from);
    }
    counts
}

pub(super) fn non_finite<T: Real>(tensor: &Tensor) -> Result<[usize; 2]> {
    let elements = Elements::<T>::of(tensor)?;
    let count = |part: &[T]| {
        let mut counts = [0; 2];
        vectorise(
            #[inline(always)]
            || {
                for x in part {
                    counts[0] += usize::from(x.abs() == T::infinity());
                    counts[1] += usize::from(x.is_nan());
                }
            },
        );
        counts
    };
    let add = |a: [usize; 2], b: [usize; 2]| [a[0] + b[0], a[1] + b[1]];
    Ok(parallel::map_items(elements.chunks(TASK), count).into_iter().fold([0; 2], add))
}
