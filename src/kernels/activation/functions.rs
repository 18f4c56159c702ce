//! Each pointwise operator and its derivative on a CPU, as a function of one number.
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

use super::Pointwise;
use super::math::Math;

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

/// `Name { parameters }: |x| value, derivative;` for each operator, where `A` is the type of `x`.
macro_rules! functions {
    ($($name:ident { $($parameter:ident),* }: |$x:ident| $value:expr, $derivative:expr;)*) => {
        #[inline(always)]
        fn choose<A: Math>(function: Pointwise, visitor: impl Visitor<A>) {
            match function {
                $(Pointwise::$name { $($parameter),* } => {
                    $(let $parameter = A::of($parameter);)*
                    visitor.visit(
                        #[inline(always)]
                        move |$x: A| -> A { $value },
                        #[inline(always)]
                        move |$x: A| -> A { $derivative },
                    )
                })*
            }
        }
    };
}

functions! {
    GeluTanh {}: |x| A::of(0.5) * x * (A::one() + gelu_inner(x).hyperbolic_tangent()), {
        let (tangent, half) = (gelu_inner(x).hyperbolic_tangent(), A::of(0.5));
        let inner = A::of(GELU_INNER) * (A::one() + A::of(3.0 * GELU_CUBE) * x * x);
        half * (A::one() + tangent) + half * x * (A::one() - tangent * tangent) * inner
    };
    GeluErf {}: |x| x * x.normal_probability(), {
        let density = A::of(DENSITY_AT_0) * x.bell();
        x.normal_probability() + x * density
    };
    Silu {}: |x| x * sigmoid(x), {
        let s = sigmoid(x);
        s * (A::one() + x * (A::one() - s))
    };
    // Not s (1 - s), which is zero where s rounds to 1.
    Sigmoid {}: |x| sigmoid(x), sigmoid(x) * sigmoid(-x);
    Tanh {}: |x| x.hyperbolic_tangent(), {
        let y = x.hyperbolic_tangent();
        (A::one() - y) * (A::one() + y)
    };
    // Not "1 where x is inside", which a NaN is not.
    Relu6 {}: |x| limit(x, A::zero(), A::of(6.0)),
        if x <= A::zero() || x >= A::of(6.0) { A::zero() } else { A::one() };
    Relu2 {}: |x| if x <= A::zero() { A::zero() } else { x * x },
        if x <= A::zero() { A::zero() } else { x + x };
    HardSigmoid {}: |x| hard_sigmoid(x), inside(x, A::of(-3.0), A::of(3.0), A::of(1.0 / 6.0));
    // Limited, as infinity times 0 is NaN.
    HardSwish {}: |x| x * hard_sigmoid(x), {
        let (low, high) = (A::of(-3.0), A::of(3.0));
        hard_sigmoid(x) + limit(x, low, high) * inside(x, low, high, A::of(1.0 / 6.0))
    };
    // The derivative of the tangent, without the cancellation of 1 - tanh². Beyond these limits it is 0, and would
    // not be once it is multiplied by x.
    Mish {}: |x| { let n = mish_odds(x); x * (n / (n + A::of(2.0))) }, {
        let x = limit(x, A::of(-1e4), A::of(20.0));
        let n = mish_odds(x);
        let share = A::one() / (n + A::of(2.0));
        n * share + x * (A::of(4.0) * (n + A::one()) * share * share) * sigmoid(x)
    };
    Softplus {}: |x| {
        let above = if x < A::zero() { A::zero() } else { x };
        above + (-x.abs()).exponential().log_of_one_more()
    }, sigmoid(x);
    Elu { alpha }: |x| if x > A::zero() { x } else { alpha * exp_less_one(x) },
        if x > A::zero() { A::one() } else { alpha * x.exponential() };
    Selu { alpha, gamma }: |x| gamma * if x > A::zero() { x } else { alpha * exp_less_one(x) },
        gamma * if x > A::zero() { A::one() } else { alpha * x.exponential() };
    LeakyRelu { negative_slope }: |x| if x > A::zero() { x } else { negative_slope * x },
        if x > A::zero() { A::one() } else { negative_slope };
    Exp {}: |x| x.exponential(), x.exponential();
    Log {}: |x| x.ln(), A::one() / x;
    Square {}: |x| x * x, x + x;
    Sqrt {}: |x| x.sqrt(), A::of(0.5) / x.sqrt();
    Rsqrt {}: |x| A::one() / x.sqrt(), { let y = A::one() / x.sqrt(); A::of(-0.5) * y * y * y };
    Recip {}: |x| A::one() / x, { let y = A::one() / x; -(y * y) };
    Abs {}: |x| x.abs(), if x > A::zero() { A::one() } else if x < A::zero() { -A::one() } else { A::zero() };
    Neg {}: |x| -x, { let _ = x; -A::one() };
    Affine { mul, add }: |x| mul * x + add, { let _ = x; mul };
    // Comparisons that NaN, of x or of a bound, passes through.
    Clamp { min, max }: |x| {
        let x = if x >= min || x.is_nan() { x } else { min };
        if x <= max || x.is_nan() { x } else { max }
    }, if x >= min && x <= max { A::one() } else { A::zero() };
    Powf { exponent }: |x| x.powf(exponent),
        if exponent == A::zero() { A::zero() } else { exponent * x.powf(exponent - A::one()) };
    Sin {}: |x| x.sin(), x.cos();
    Cos {}: |x| x.cos(), -x.sin();
    Erf {}: |x| x.error_function(), A::of(std::f64::consts::FRAC_2_SQRT_PI) * (-x * x).exponential();
    // The series where it holds: elsewhere 1 + x loses no digits that matter.
    Log1p {}: |x| if x >= A::of(-0.5) && x <= A::one() { x.log_of_one_more() } else { (A::one() + x).ln() },
        A::one() / (A::one() + x);
}

/// `1 / (1 + exp(-x))`.
#[inline(always)]
pub(super) fn sigmoid<A: Math>(x: A) -> A {
    A::one() / (A::one() + (-x).exponential())
}

/// `exp(x) - 1`, for `x` not above 0, without its cancellation near 0.
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

/// `value` where `x` is between `low` and `high`, else 0.
#[inline(always)]
fn inside<A: Math>(x: A, low: A, high: A, value: A) -> A {
    if x > low && x < high { value } else { A::zero() }
}

#[inline(always)]
fn hard_sigmoid<A: Math>(x: A) -> A {
    limit(x * A::of(1.0 / 6.0) + A::of(0.5), A::zero(), A::one())
}

/// The tanh approximation's `tanh(√(2/π) (x + 0.044715 x³))`.
const GELU_INNER: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;
const GELU_CUBE: f64 = 0.044715;
/// `1 / √(2π)`.
const DENSITY_AT_0: f64 = 0.5 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;

#[inline(always)]
fn gelu_inner<A: Math>(x: A) -> A {
    A::of(GELU_INNER) * (x + A::of(GELU_CUBE) * x * x * x)
}

/// `n` such that `tanh(ln(1 + exp(x)))` is `n / (n + 2)`.
#[inline(always)]
fn mish_odds<A: Math>(x: A) -> A {
    // Limited where the quotient is 1 already, and the square not yet infinite.
    let e = limit(x, A::of(-1e4), A::of(20.0)).exponential();
    e * (e + A::of(2.0))
}
