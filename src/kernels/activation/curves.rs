//! Each curve and its slope, of a number.

use super::Curve;
use super::math::Math;
use crate::kernels::cpu::simd::vectorise;

/// A curve with its slope, as the loops take them.
trait Point<A>: Copy {
    fn value(self, x: A) -> A;
    fn slope(self, x: A) -> A;
}

/// Overwrites each of `x` with its value.
pub(super) fn values<A: Math>(curve: Curve, x: &mut [A]) {
    struct Values<'a, A>(&'a mut [A]);
    impl<A: Math> Visit<A> for Values<'_, A> {
        #[inline(always)]
        fn visit(self, point: impl Point<A>) {
            vectorise(
                #[inline(always)]
                || {
                    // Copies, that writes to `x` cannot change.
                    let (point, x) = (point, &mut *self.0);
                    for x in x {
                        *x = point.value(*x);
                    }
                },
            );
        }
    }
    of(curve, Values(x));
}

/// Overwrites each of `x` with the slope there.
pub(super) fn slopes<A: Math>(curve: Curve, x: &mut [A]) {
    struct Slopes<'a, A>(&'a mut [A]);
    impl<A: Math> Visit<A> for Slopes<'_, A> {
        #[inline(always)]
        fn visit(self, point: impl Point<A>) {
            vectorise(
                #[inline(always)]
                || {
                    // Copies, that writes to `x` cannot change.
                    let (point, x) = (point, &mut *self.0);
                    for x in x {
                        *x = point.slope(*x);
                    }
                },
            );
        }
    }
    of(curve, Slopes(x));
}

trait Visit<A> {
    fn visit(self, point: impl Point<A>);
}

/// Chosen outside of the loops.
#[inline(always)]
fn of<A: Math>(curve: Curve, visit: impl Visit<A>) {
    match curve {
        Curve::Gelu => visit.visit(Gelu),
        Curve::GeluErf => visit.visit(GeluErf),
        Curve::Silu => visit.visit(Silu),
        Curve::Sigmoid => visit.visit(Sigmoid),
        Curve::Tanh => visit.visit(Tanh),
        Curve::Relu6 => visit.visit(Relu6),
        Curve::Relu2 => visit.visit(Relu2),
        Curve::HardSigmoid => visit.visit(HardSigmoid),
        Curve::HardSwish => visit.visit(HardSwish),
        Curve::Mish => visit.visit(Mish),
        Curve::Elu { alpha, scale } => {
            visit.visit(Elu { alpha: A::of(alpha), scale: A::of(scale) })
        }
        Curve::LeakyRelu { slope } => visit.visit(LeakyRelu(A::of(slope))),
        Curve::Softplus => visit.visit(Softplus),
        Curve::Exp => visit.visit(Exponential),
        Curve::Log => visit.visit(Logarithm),
    }
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

impl Gelu {
    #[inline(always)]
    fn inner<A: Math>(x: A) -> A {
        A::of(GELU_INNER) * (x + A::of(GELU_CUBE) * x * x * x)
    }
}

impl Mish {
    /// `n` such that `tanh(ln(1 + exp(x)))` is `n / (n + 2)`.
    #[inline(always)]
    fn odds<A: Math>(x: A) -> A {
        // Limited where the quotient is 1 already, and the square not yet infinite.
        let e = limit(x, A::of(-1e4), A::of(20.0)).exponential();
        e * (e + A::of(2.0))
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl<A: Math> Point<A> for Gelu {
    #[inline(always)]
    fn value(self, x: A) -> A {
        A::of(0.5) * x * (A::one() + Self::inner(x).hyperbolic_tangent())
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        let tangent = Self::inner(x).hyperbolic_tangent();
        let inner_slope = A::of(GELU_INNER) * (A::one() + A::of(3.0 * GELU_CUBE) * x * x);
        let half = A::of(0.5);
        half * (A::one() + tangent) + half * x * (A::one() - tangent * tangent) * inner_slope
    }
}

#[derive(Clone, Copy)]
struct GeluErf;

impl<A: Math> Point<A> for GeluErf {
    #[inline(always)]
    fn value(self, x: A) -> A {
        x * x.normal_probability()
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        let density = A::of(DENSITY_AT_0) * (A::of(-0.5) * x * x).exponential();
        x.normal_probability() + x * density
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl<A: Math> Point<A> for Silu {
    #[inline(always)]
    fn value(self, x: A) -> A {
        x * sigmoid(x)
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        let s = sigmoid(x);
        s * (A::one() + x * (A::one() - s))
    }
}

#[derive(Clone, Copy)]
struct Sigmoid;

impl<A: Math> Point<A> for Sigmoid {
    #[inline(always)]
    fn value(self, x: A) -> A {
        sigmoid(x)
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        // Not s (1 - s), which is zero where s rounds to 1.
        sigmoid(x) * sigmoid(-x)
    }
}

#[derive(Clone, Copy)]
struct Tanh;

impl<A: Math> Point<A> for Tanh {
    #[inline(always)]
    fn value(self, x: A) -> A {
        x.hyperbolic_tangent()
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        let y = x.hyperbolic_tangent();
        (A::one() - y) * (A::one() + y)
    }
}

#[derive(Clone, Copy)]
struct Relu6;

impl<A: Math> Point<A> for Relu6 {
    #[inline(always)]
    fn value(self, x: A) -> A {
        limit(x, A::zero(), A::of(6.0))
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        // Not "where x is inside", which a NaN is not.
        if x <= A::zero() || x >= A::of(6.0) { A::zero() } else { A::one() }
    }
}

#[derive(Clone, Copy)]
struct Relu2;

impl<A: Math> Point<A> for Relu2 {
    #[inline(always)]
    fn value(self, x: A) -> A {
        if x <= A::zero() { A::zero() } else { x * x }
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        if x <= A::zero() { A::zero() } else { x + x }
    }
}

#[derive(Clone, Copy)]
struct HardSigmoid;

impl<A: Math> Point<A> for HardSigmoid {
    #[inline(always)]
    fn value(self, x: A) -> A {
        hard_sigmoid(x)
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        inside(x, A::of(-3.0), A::of(3.0), A::of(1.0 / 6.0))
    }
}

#[derive(Clone, Copy)]
struct HardSwish;

impl<A: Math> Point<A> for HardSwish {
    #[inline(always)]
    fn value(self, x: A) -> A {
        x * hard_sigmoid(x)
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        // Limited, as infinity times 0 is NaN.
        let (low, high) = (A::of(-3.0), A::of(3.0));
        hard_sigmoid(x) + limit(x, low, high) * inside(x, low, high, A::of(1.0 / 6.0))
    }
}

#[derive(Clone, Copy)]
struct Mish;

impl<A: Math> Point<A> for Mish {
    #[inline(always)]
    fn value(self, x: A) -> A {
        let n = Self::odds(x);
        x * (n / (n + A::of(2.0)))
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        // The slope of the tangent, without the cancellation of 1 - tanh². Beyond these limits it is 0, and would
        // not be once it is multiplied by `x`.
        let x = limit(x, A::of(-1e4), A::of(20.0));
        let n = Self::odds(x);
        let share = A::one() / (n + A::of(2.0));
        n * share + x * (A::of(4.0) * (n + A::one()) * share * share) * sigmoid(x)
    }
}

#[derive(Clone, Copy)]
struct Elu<A> {
    alpha: A,
    scale: A,
}

impl<A: Math> Point<A> for Elu<A> {
    #[inline(always)]
    fn value(self, x: A) -> A {
        self.scale * if x > A::zero() { x } else { self.alpha * exp_less_one(x) }
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        self.scale * if x > A::zero() { A::one() } else { self.alpha * x.exponential() }
    }
}

#[derive(Clone, Copy)]
struct LeakyRelu<A>(A);

impl<A: Math> Point<A> for LeakyRelu<A> {
    #[inline(always)]
    fn value(self, x: A) -> A {
        if x > A::zero() { x } else { self.0 * x }
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        if x > A::zero() { A::one() } else { self.0 }
    }
}

#[derive(Clone, Copy)]
struct Softplus;

impl<A: Math> Point<A> for Softplus {
    #[inline(always)]
    fn value(self, x: A) -> A {
        let above = if x < A::zero() { A::zero() } else { x };
        above + (-x.abs()).exponential().log_of_one_more()
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        sigmoid(x)
    }
}

#[derive(Clone, Copy)]
struct Exponential;

impl<A: Math> Point<A> for Exponential {
    #[inline(always)]
    fn value(self, x: A) -> A {
        x.exponential()
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        x.exponential()
    }
}

#[derive(Clone, Copy)]
struct Logarithm;

impl<A: Math> Point<A> for Logarithm {
    #[inline(always)]
    fn value(self, x: A) -> A {
        x.ln()
    }
    #[inline(always)]
    fn slope(self, x: A) -> A {
        A::one() / x
    }
}
