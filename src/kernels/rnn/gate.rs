//! Sigmoid and tanh of the gates.
//!
//! The compiler cannot vectorise calls of libm. So those of F32 are made of [`Exp::exponential`], and inlined into
//! loops over the units. tanh is `1 - 2 / (1 + exp(2 |x|))`, or near zero, where that difference cancels, a polynomial.
//! Both parts are computed, and each lane selects one. F64 calls the standard library.

use crate::kernels::cpu::lane::Lane;
use crate::kernels::gemm::Arithmetic;
use crate::kernels::softmax::cpu::Exp;

/// The functions of gates, of few units in the last place, in loops that can be vectorised.
pub(super) trait Gate: Arithmetic + Lane + Exp {
    fn sigmoid(self) -> Self;
    fn tangent(self) -> Self;
}

impl Gate for f64 {
    #[inline(always)]
    fn sigmoid(self) -> f64 {
        1.0 / (1.0 + (-self).exp())
    }
    #[inline(always)]
    fn tangent(self) -> f64 {
        self.tanh()
    }
}

impl Gate for f32 {
    #[inline(always)]
    fn sigmoid(self) -> f32 {
        1.0 / (1.0 + (-self).exponential())
    }

    #[inline(always)]
    fn tangent(self) -> f32 {
        let size = self.abs();
        let far = 1.0 - 2.0 / (1.0 + (2.0 * size).exponential());
        // Near zero that difference cancels: the minimax polynomial of Cephes' tanhf.
        let square = self * self;
        let p = -5.704_988_7e-3;
        let p = p * square + 2.063_909e-2;
        let p = p * square - 5.373_971_6e-2;
        let p = p * square + 1.333_144_2e-1;
        let p = p * square - 3.333_328e-1;
        let near = p * square * self + self;
        if size < 0.625 { near } else { far.copysign(self) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_exact_functions() {
        let steps = 1 << 18;
        for i in 0..=steps {
            let x = -20.0 + 40.0 * i as f32 / steps as f32;
            let exact = f64::from(x);
            for (name, ours, exact) in [
                ("sigmoid", x.sigmoid(), 1.0 / (1.0 + (-exact).exp())),
                ("tanh", x.tangent(), exact.tanh()),
            ] {
                let error = (f64::from(ours) - exact).abs();
                assert!(error <= 2.0 * f64::from(f32::EPSILON) * exact.abs(), "{name} {x}: {ours}");
            }
        }
    }

    #[test]
    fn ends_of_the_range() {
        for (x, sigmoid, tangent) in [
            (0.0, 0.5, 0.0),
            (1e4f32, 1.0, 1.0),
            (-1e4, 0.0, -1.0),
            (f32::INFINITY, 1.0, 1.0),
            (f32::NEG_INFINITY, 0.0, -1.0),
            (1e-30, 0.5, 1e-30),
        ] {
            assert_eq!((x.sigmoid(), x.tangent()), (sigmoid, tangent), "{x}");
        }
        assert!(f32::NAN.sigmoid().is_nan() && f32::NAN.tangent().is_nan());
    }
}
