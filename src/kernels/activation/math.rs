//! Elementary functions for pointwise operators, in forms that loops vectorise with.

use crate::kernels::cpu::simd::vectorise;
use crate::kernels::softmax::cpu::Exp;

/// Functions within a few units in the last place, without branches for `f32`.
pub(crate) trait Math: Exp {
    /// Overwrites each of `x` with `f` of it. For `f32` compiled for every instruction set; `f64`, whose functions
    /// are the library's, for one.
    fn for_each(x: &mut [Self], f: impl Fn(Self) -> Self + Copy);
    fn hyperbolic_tangent(self) -> Self;
    /// `exp(-self² / 2)`.
    fn bell(self) -> Self;
    /// The probability that a normal number is below `self`: small ones to a relative precision.
    fn normal_probability(self) -> Self;
    /// `2/√π` times the integral of `exp(-t²)` from 0 to `self`.
    fn error_function(self) -> Self;
    /// `ln(1 + self)`, for `self` from -1/2 to 1.
    fn log_of_one_more(self) -> Self;
}

impl Math for f64 {
    #[inline(always)]
    fn for_each(x: &mut [f64], f: impl Fn(f64) -> f64 + Copy) {
        x.iter_mut().for_each(|x| *x = f(*x));
    }
    #[inline(always)]
    fn hyperbolic_tangent(self) -> f64 {
        self.tanh()
    }
    #[inline(always)]
    fn bell(self) -> f64 {
        (-0.5 * self * self).exp()
    }
    #[inline(always)]
    fn normal_probability(self) -> f64 {
        0.5 * candle_core::cpu::erf::erfc_f64(-self * std::f64::consts::FRAC_1_SQRT_2)
    }
    #[inline(always)]
    fn error_function(self) -> f64 {
        candle_core::cpu::erf::erf_f64(self)
    }
    #[inline(always)]
    fn log_of_one_more(self) -> f64 {
        self.ln_1p()
    }
}

impl Math for f32 {
    #[inline(always)]
    fn for_each(x: &mut [f32], f: impl Fn(f32) -> f32 + Copy) {
        vectorise(
            #[inline(always)]
            || {
                // Copies, that writes to `x` cannot change.
                let (f, x) = (f, &mut *x);
                for x in x {
                    *x = f(*x);
                }
            },
        );
    }
    #[inline(always)]
    fn hyperbolic_tangent(self) -> f32 {
        // Cephes' tanhf: an odd polynomial near zero, where the quotient would cancel.
        let z = self * self;
        let p: f32 = -5.704_988_7e-3;
        let p = p.mul_add(z, 2.063_909e-2);
        let p = p.mul_add(z, -5.373_971_6e-2);
        let p = p.mul_add(z, 1.333_144_2e-1);
        let p = p.mul_add(z, -3.333_328e-1);
        let near = (p * z).mul_add(self, self);
        let far = 1.0 - 2.0 / ((self.abs() + self.abs()).exponential() + 1.0);
        let result = if self.abs() < 0.625 { near } else { far };
        if self.is_nan() { self } else { result.copysign(self) }
    }

    #[inline(always)]
    fn bell(self) -> f32 {
        let root = root_of_bell(limited(self));
        root * root
    }

    #[inline(always)]
    fn normal_probability(self) -> f32 {
        let z = limited(self);
        let root = root_of_bell(z);
        let tail = scaled_tail(z) * (root * root);
        if self < 0.0 { tail } else { 1.0 - tail }
    }

    #[inline(always)]
    fn error_function(self) -> f32 {
        // Taylor's series near zero, where the difference would cancel.
        let z = self * self;
        let p: f32 = 1.205_533_3e-4;
        let p = p.mul_add(z, -8.548_327e-4);
        let p = p.mul_add(z, 5.223_977_6e-3);
        let p = p.mul_add(z, -2.686_617_1e-2);
        let p = p.mul_add(z, 1.128_379_2e-1);
        let p = p.mul_add(z, -3.761_263_9e-1);
        let p = p.mul_add(z, std::f32::consts::FRAC_2_SQRT_PI);
        let tail = scaled_tail(self.abs() * std::f32::consts::SQRT_2);
        let complement = 2.0 * tail * (-self * self).exponential();
        let far = (1.0 - complement).copysign(self);
        let result = if self.abs() < 0.5 { p * self } else { far };
        if self.is_nan() { self } else { result }
    }

    #[inline(always)]
    fn log_of_one_more(self) -> f32 {
        // 2 artanh(s) with s = x / (2 + x), from -1/3 to 1/3: the series to s¹³.
        let s = self / (2.0 + self);
        let z = s * s;
        let p: f32 = 2.0 / 13.0;
        let p = p.mul_add(z, 2.0 / 11.0);
        let p = p.mul_add(z, 2.0 / 9.0);
        let p = p.mul_add(z, 2.0 / 7.0);
        let p = p.mul_add(z, 2.0 / 5.0);
        let p = p.mul_add(z, 2.0 / 3.0);
        let p = p.mul_add(z, 2.0);
        p * s
    }
}

/// `|x|`, and where that is larger 18.5, beyond which the bell is 0. NaN stays NaN.
#[inline(always)]
fn limited(x: f32) -> f32 {
    let z = x.abs();
    if z > 18.5 { 18.5 } else { z }
}

/// `exp(-z² / 4)` of `z` from 0 to 18.5. Its square underflows to 0 by itself, where the bell's own exponent would need a
/// comparison.
#[inline(always)]
fn root_of_bell(z: f32) -> f32 {
    /// Adding it leaves the nearest integer in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
    // `log2(e) / 4`, in two parts.
    const RATE: f32 = 0.360_673_76;
    const RATE_LOW: f32 = 4.814_907_6e-9;

    // With what the square has lost: an error of its last place is one of 40 places of the result.
    let square = z * z;
    let lost = z.mul_add(z, -square);
    let shifted = square.mul_add(-RATE, ROUND);
    let n = shifted - ROUND;
    let r = square.mul_add(-RATE, -n);
    let r = square.mul_add(-RATE_LOW, r);
    let r = lost.mul_add(-RATE, r);
    // 2^r of |r| <= 1/2, a minimax fit to 2e-9. Pairs of powers, so that less waits for what is before it.
    let r2 = r * r;
    let p = 1.535_336_2e-4f32.mul_add(r2, 1.339_887_5e-3f32.mul_add(r, 9.618_437e-3));
    let p = p.mul_add(r2, 5.550_332_5e-2f32.mul_add(r, 2.402_264_8e-1));
    let p = p.mul_add(r2, 6.931_472e-1f32.mul_add(r, 1.0));
    f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
}

/// `exp(z² / 2) (1 - Φ(z))` of `z >= 0`, where `Φ` is the normal distribution: `t p(t)` with `t = 1 / (1 + 0.3035 z)`, to
/// 9e-8 of its value before rounding, up to 13.3, from where the result of [`Math::normal_probability`] is no normal
/// number. The coefficients are a minimax fit, whose sum is exactly 1/2.
#[inline(always)]
fn scaled_tail(z: f32) -> f32 {
    let t = 1.0 / z.mul_add(0.303_5, 1.0);
    // Even and odd powers apart, so that less waits for what is before it.
    let t2 = t * t;
    let odd: f32 = 3.683_836e-2;
    let odd = odd.mul_add(t2, 1.947_985e-1);
    let odd = odd.mul_add(t2, 1.245_549e-1);
    let odd = odd.mul_add(t2, 1.220_113_6e-1);
    let even: f32 = -1.560_594_9e-1;
    let even = even.mul_add(t2, -4.517_475e-2);
    let even = even.mul_add(t2, 1.019_982_8e-1);
    let even = even.mul_add(t2, 1.210_328_5e-1);
    t * odd.mul_add(t, even)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest error over `range`, in units of the last place of the exact value or, where that
    /// is larger, of `floor`.
    fn error(
        range: std::ops::Range<f64>,
        floor: f64,
        ours: impl Fn(f32) -> f32,
        exact: impl Fn(f64) -> f64,
    ) -> f64 {
        let steps = 200_000;
        let at =
            |i| (range.start + (range.end - range.start) * f64::from(i) / f64::from(steps)) as f32;
        (0..=steps)
            .map(|i| {
                let exact = exact(at(i).into());
                (f64::from(ours(at(i))) - exact).abs() / exact.abs().max(floor)
            })
            .fold(0.0, f64::max)
            / f64::from(f32::EPSILON)
    }

    #[test]
    fn tangents_are_exact_to_two_places() {
        let worst = error(-12.0..12.0, 1e-30, Math::hyperbolic_tangent, f64::tanh);
        assert!(worst <= 2.0, "{worst}");
        assert_eq!(f32::INFINITY.hyperbolic_tangent(), 1.0);
        assert_eq!(f32::NEG_INFINITY.hyperbolic_tangent(), -1.0);
        assert!(f32::NAN.hyperbolic_tangent().is_nan());
        assert_eq!((-0.0f32).hyperbolic_tangent().to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn probabilities_are_exact_to_three_places_and_small_ones_to_their_exponents() {
        let exact = |x: f64| x.normal_probability();
        let worst = error(-12.0..12.0, 1.0, Math::normal_probability, exact);
        assert!(worst <= 3.0, "{worst}");
        // A small one of two exponentials, of which each has an error of its own.
        let worst = error(-12.0..0.0, 1e-37, Math::normal_probability, exact);
        assert!(worst <= 6.0, "{worst}");
        assert_eq!(0f32.normal_probability(), 0.5);
        assert_eq!(f32::INFINITY.normal_probability(), 1.0);
        assert_eq!(f32::NEG_INFINITY.normal_probability(), 0.0);
        assert!(f32::NAN.normal_probability().is_nan());
    }

    #[test]
    fn logarithms_are_exact_to_three_places() {
        let worst = error(-0.5..1.0, 1e-30, Math::log_of_one_more, f64::ln_1p);
        assert!(worst <= 3.0, "{worst}");
    }

    #[test]
    fn error_functions_are_exact_to_four_places() {
        let exact = |x: f64| x.error_function();
        let worst = error(-6.0..6.0, 1e-30, Math::error_function, exact);
        assert!(worst <= 4.0, "{worst}");
        assert_eq!(f32::INFINITY.error_function(), 1.0);
        assert_eq!(f32::NEG_INFINITY.error_function(), -1.0);
        assert!(f32::NAN.error_function().is_nan());
        assert_eq!((-0.0f32).error_function().to_bits(), (-0.0f32).to_bits());
    }
}
