//! Each pointwise operator and its derivative on a CPU, as the table has them: functions of one number.
//!
//! A block of [`BLOCK`](crate::kernels::cpu::simd::BLOCK) elements is widened to F32 (F64 for F64), overwritten
//! by its values or derivatives here, and rounded by the caller (`cpu.rs`). So a function is compiled for two
//! types rather than for four dtypes, and for every instruction set in F32 alone: `A::for_each` loops over the
//! block. The operator is chosen outside of the loop. For loops to vectorise, a function has no branches but
//! selections, and calls only what is inlined: [`Math`] has such forms of what std calls a library for. In F64
//! std's own are called.
//!
//! Derivatives avoid products of something that vanishes with something that grows (infinity times zero is
//! NaN), and differences that cancel. At kinks, infinities and NaN they are PyTorch's; the table has both.

use std::f64::consts::FRAC_2_SQRT_PI;

use super::math::Math;
use super::pointwise::Pointwise;
use super::table::pointwise;

/// Overwrites each of `x` with its value.
pub(super) fn values<A: Math>(function: Pointwise, x: &mut [A]) {
    struct Values<'a, A>(&'a mut [A]);
    impl<A: Math> Visitor<A> for Values<'_, A> {
        #[inline(always)]
        fn visit(self, value: impl Fn(A) -> A + Copy, _: impl Fn(A) -> A + Copy) {
            A::for_each(self.0, value);
        }
    }
    choose(function, Values(x));
}

/// Overwrites each of `x` with the derivative there.
pub(super) fn derivatives<A: Math>(function: Pointwise, x: &mut [A]) {
    struct Derivatives<'a, A>(&'a mut [A]);
    impl<A: Math> Visitor<A> for Derivatives<'_, A> {
        #[inline(always)]
        fn visit(self, _: impl Fn(A) -> A + Copy, derivative: impl Fn(A) -> A + Copy) {
            A::for_each(self.0, derivative);
        }
    }
    choose(function, Derivatives(x));
}

/// Is given a function and its derivative.
trait Visitor<A> {
    fn visit(self, value: impl Fn(A) -> A + Copy, derivative: impl Fn(A) -> A + Copy);
}

macro_rules! functions {
    ([] $(
        $(#[$doc:meta])* $name:ident => $variant:ident (
            $($parameter:ident: $type:ty = $sample:literal),*
        ), $policy:tt, $facts:tt, { cpu: |$x:ident| $value:expr, $derivative:expr; $($rest:tt)* };
    )*) => {
        #[inline(always)]
        fn choose<A: Math>(function: Pointwise, visitor: impl Visitor<A>) {
            match function {
                $(Pointwise::$variant { $($parameter),* } => {
                    $(let $parameter = A::of($parameter);)*
                    visitor.visit(
                        #[inline(always)]
                        move |$x: A| -> A { $value },
                        #[inline(always)]
                        move |$x: A| -> A {
                            let _ = $x; // a constant's
                            $derivative
                        },
                    )
                })*
            }
        }
    };
}
pointwise!(functions []);

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub(super) fn sigmoid<A: Math>(x: A) -> A {
    A::one() / (A::one() + (-x).exponential())
}

#[inline(always)]
fn silu_derivative<A: Math>(x: A) -> A {
    let s = sigmoid(x);
    s * (A::one() + x * (A::one() - s))
}

#[inline(always)]
fn elu<A: Math>(x: A, alpha: A) -> A {
    if x > A::zero() { x } else { alpha * exp_less_one(x) }
}

/// `exp(x) - 1`, for `x` up to 1, without its cancellation near 0.
#[inline(always)]
fn exp_less_one<A: Math>(x: A) -> A {
    let half = (x * A::of(0.5)).hyperbolic_tangent();
    (half + half) / (A::one() - half)
}

/// `x` between `low` and `high`; NaN stays NaN.
#[inline(always)]
fn limit<A: Math>(x: A, low: A, high: A) -> A {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// By comparisons that NaN, of `x` or of a bound, passes through.
#[inline(always)]
fn clamp<A: Math>(x: A, min: A, max: A) -> A {
    let x = if x >= min || x.is_nan() { x } else { min };
    if x <= max || x.is_nan() { x } else { max }
}

/// `ln(1 + x)`: the series where it holds; elsewhere 1 + x loses no digits that matter.
#[inline(always)]
fn log1p<A: Math>(x: A) -> A {
    if x >= A::of(-0.5) && x <= A::one() { x.log_of_one_more() } else { (A::one() + x).ln() }
}

/// `value` where `x` is between `low` and `high`, else 0.
#[inline(always)]
fn inside<A: Math>(x: A, low: A, high: A, value: A) -> A {
    if x > low && x < high { value } else { A::zero() }
}

#[inline(always)]
fn hard_sigmoid<A: Math>(x: A) -> A {
    limit(x * A::of(1.0 / 6.0) + A::of(0.5), A::zero(), A::one())
}

/// Limited, as infinity times 0 is NaN.
#[inline(always)]
fn hard_swish_derivative<A: Math>(x: A) -> A {
    let (low, high) = (A::of(-3.0), A::of(3.0));
    hard_sigmoid(x) + limit(x, low, high) * inside(x, low, high, A::of(1.0 / 6.0))
}

/// The tanh approximation's `tanh(√(2/π) (x + 0.044715 x³))`.
const GELU_INNER: f64 = FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
const GELU_CUBE: f64 = 0.044715;
/// `1 / √(2π)`.
const DENSITY_AT_0: f64 = 0.5 * FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;

#[inline(always)]
fn gelu_inner<A: Math>(x: A) -> A {
    A::of(GELU_INNER) * (x + A::of(GELU_CUBE) * x * x * x)
}

#[inline(always)]
fn gelu_tanh<A: Math>(x: A) -> A {
    A::of(0.5) * x * (A::one() + gelu_inner(x).hyperbolic_tangent())
}

#[inline(always)]
fn gelu_tanh_derivative<A: Math>(x: A) -> A {
    let (tangent, half) = (gelu_inner(x).hyperbolic_tangent(), A::of(0.5));
    let inner = A::of(GELU_INNER) * (A::one() + A::of(3.0 * GELU_CUBE) * x * x);
    half * (A::one() + tangent) + half * x * (A::one() - tangent * tangent) * inner
}

/// `n` such that `tanh(ln(1 + exp(x)))` is `n / (n + 2)`.
#[inline(always)]
fn mish_odds<A: Math>(x: A) -> A {
    // Limited where the quotient is 1 already, and the square not yet infinite.
    let e = limit(x, A::of(-1e4), A::of(20.0)).exponential();
    e * (e + A::of(2.0))
}

#[inline(always)]
fn mish<A: Math>(x: A) -> A {
    let n = mish_odds(x);
    x * (n / (n + A::of(2.0)))
}

/// By the derivative of the tangent, without the cancellation of 1 - tanh². Beyond these limits it is 0, and would not be once
/// it is multiplied by `x`.
#[inline(always)]
fn mish_derivative<A: Math>(x: A) -> A {
    let x = limit(x, A::of(-1e4), A::of(20.0));
    let n = mish_odds(x);
    let share = A::one() / (n + A::of(2.0));
    n * share + x * (A::of(4.0) * (n + A::one()) * share * share) * sigmoid(x)
}
