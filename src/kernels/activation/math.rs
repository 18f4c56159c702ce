//! What pointwise operators are made of, in forms that loops over them vectorise with.

use crate::kernels::cpu::simd::vectorise;
use crate::kernels::softmax::cpu::{Exp, small_exponential};

/// Functions within a few units in the last place, without branches for `f32`.
pub(crate) trait Math: Exp {
    /// Overwrites each of `x` with `f` of it. For `f32` compiled for every instruction set; `f64`, whose functions
    /// are the library's, for one.
    fn for_each(x: &mut [Self], f: impl Fn(Self) -> Self + Copy);
    fn hyperbolic_tangent(self) -> Self;
    /// `exp(-self² / 2)` of a number that is not NaN.
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
        // Beyond 20 it is zero. A NaN is passed over here, and reaches the result through what this is multiplied with.
        let x = if self.abs() < 20.0 { self.abs() } else { 20.0 };
        // With what the square has lost: an error of its last place is one of 50 places of the exponential.
        let square = x * x;
        let lost = x.mul_add(x, -square);
        let bell = small_exponential(-0.5 * square);
        (bell * -0.5).mul_add(lost, bell)
    }

    #[inline(always)]
    fn normal_probability(self) -> f32 {
        let tail =
            0.5 * scaled_complement(self.abs() * std::f32::consts::FRAC_1_SQRT_2) * self.bell();
        let result = if self < 0.0 { tail } else { 1.0 - tail };
        if self.is_nan() { self } else { result }
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
        let complement = scaled_complement(self.abs()) * (-self * self).exponential();
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

/// `exp(z²) erfc(z)` of `z >= 0`, as `t p(t)` with `t = 1 / (1 + z / 2)`, to 5e-8 of its value up to 9.5, where the
/// exponential of `-z²` underflows. The coefficients are a minimax fit.
#[inline(always)]
fn scaled_complement(z: f32) -> f32 {
    let t = 1.0 / z.mul_add(0.5, 1.0);
    let p: f32 = -0.058_890_633;
    let p = p.mul_add(t, 0.283_701_26);
    let p = p.mul_add(t, -0.485_382_22);
    let p = p.mul_add(t, 0.275_976_42);
    let p = p.mul_add(t, -0.025_176_47);
    let p = p.mul_add(t, 0.202_069_31);
    let p = p.mul_add(t, 0.243_261_14);
    let p = p.mul_add(t, 0.282_353_47);
    let p = p.mul_add(t, 0.282_087_68);
    t * p
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
        // The root of the square in the exponent, up to 72, and the square are rounded.
        let worst = error(-12.0..0.0, 1e-37, Math::normal_probability, exact);
        assert!(worst <= 3.0 * 72.0, "{worst}");
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
