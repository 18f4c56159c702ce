//! The exponential of the CPU's kernels, in a form that loops vectorise with.
//!
//! The standard library's is a function call, which keeps a loop scalar. The one for F32 has no calls, and selections
//! instead of branches. It splits `x` into `n ln(2) + r` with `|r| <= ln(2) / 2`. A polynomial gives `e^r`, and `n` is
//! added to its exponent field.
//!
//! What overflows is infinite, results below the smallest normal number are 0, and NaN stays NaN. F64 calls the
//! standard library: its loops are not compiled for wider vectors anyway (`vectorise_in` of `cpu/simd.rs`).

use crate::kernels::cpu::dtype::Real;
use crate::kernels::cpu::lane::Lane;

/// An exponential that loops over it can be vectorised with, within two units in the last place.
pub(crate) trait Exp: Real + Lane {
    fn exponential(self) -> Self;
}

/// 2^n * e^r with |r| <= ln(2) / 2, of `x` below the logarithm of the largest number. Results below the smallest normal
/// number are 0. What it makes of NaN is not specified.
#[inline(always)]
fn small_exponential(x: f32) -> f32 {
    /// Adding it leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    /// The logarithm of the smallest normal number.
    const LOWEST: f32 = -87.336_54;
    // ln(2) in two parts: products of the first with any n are exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;

    // Fused: every processor that vectors are made for does it in one instruction.
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN_2_LOW, n.mul_add(-LN_2_HIGH, x));
    // e^r = 1 + r + r^2 p(r), with the minimax p of Cephes' expf.
    let p = 1.987_569_1e-4f32;
    let p = p.mul_add(r, 1.398_199_9e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 1.666_666_5e-1);
    let p = p.mul_add(r, 0.5);
    let power = (p * r).mul_add(r, r) + 1.0;
    // n is added to the exponent field; where it does not fit, the bound decides.
    let scaled = f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x < LOWEST { 0.0 } else { scaled }
}

impl Exp for f64 {
    #[inline(always)]
    fn exponential(self) -> f64 {
        self.exp()
    }
}

impl Exp for f32 {
    #[inline(always)]
    fn exponential(self) -> f32 {
        /// The logarithm of the largest number.
        const HIGHEST: f32 = 88.722_83;

        let small = small_exponential(self);
        let result = if self > HIGHEST { f32::INFINITY } else { small };
        if self.is_nan() { self } else { result }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_exact_exponential() {
        let steps = 1 << 20;
        for i in 0..=steps {
            let x = -87.3 + (87.3 + 88.7) * (i as f32 / steps as f32);
            let (ours, exact) = (f64::from(x.exponential()), f64::from(x).exp());
            let error = (ours - exact).abs() / (exact * f64::from(f32::EPSILON));
            assert!(error <= 1.0, "e^{x}: {ours:e}, not {exact:e}");
        }
    }

    #[test]
    fn ends_of_the_range() {
        assert_eq!(0f32.exponential(), 1.0);
        assert_eq!(f32::NEG_INFINITY.exponential(), 0.0);
        assert_eq!((-1e4f32).exponential(), 0.0);
        assert_eq!((-88f32).exponential(), 0.0);
        assert_eq!(89f32.exponential(), f32::INFINITY);
        assert_eq!(f32::INFINITY.exponential(), f32::INFINITY);
        assert!(f32::NAN.exponential().is_nan());
    }
}
