//! By candle's operators, in F32 (F64 for F64): for devices without kernels, and as what the tests compare with.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use candle_core::{D, Result, Tensor};

use super::pointwise::Pointwise;
use super::table::pointwise;
use crate::kernels::elementwise::portable::{at_most, clamped, relu, upcast};

macro_rules! portable {
    ([] $(
        $(#[$doc:meta])* $name:ident => $variant:ident (
            $($parameter:ident: $type:ty = $sample:literal),*
        ), $policy:tt, $facts:tt, {
            cpu: |$number:ident| $of_number:expr, $slope_of_number:expr;
            candle: |$x:ident| $value:expr, $derivative:expr;
            $($rest:tt)*
        };
    )*) => {
        /// The value at `x`, or the derivative there, as the table has them.
        fn at(x: &Tensor, function: Pointwise, is_derivative: bool) -> Result<Tensor> {
            Ok(match function {
                $(Pointwise::$variant { $($parameter),* } => {
                    let $x = x;
                    if is_derivative { $derivative } else { $value }
                })*
            })
        }
    };
}
pointwise!(portable []);

pub(super) fn value(function: Pointwise, x: &Tensor) -> Result<Tensor> {
    at(&upcast(x)?, function, false)?.to_dtype(x.dtype())
}

pub(super) fn derivative(function: Pointwise, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    (at(&upcast(x)?, function, true)? * upcast(grad)?)?.to_dtype(x.dtype())
}

pub(super) fn swiglu(x: &Tensor) -> Result<Tensor> {
    let (gate, up) = halves(&upcast(x)?)?;
    ((&gate * sigmoid(&gate)?)? * up)?.to_dtype(x.dtype())
}

pub(super) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let ((gate, up), grad) = (halves(&upcast(x)?)?, upcast(grad)?);
    let of_gate = ((&grad * up)? * silu_derivative(&gate)?)?;
    let of_up = (grad * (&gate * sigmoid(&gate)?)?)?;
    Tensor::cat(&[of_gate, of_up], D::Minus1)?.to_dtype(x.dtype())
}

fn elu(x: &Tensor, alpha: f64) -> Result<Tensor> {
    x.gt(0.0)?.where_cond(x, &((x.exp()? - 1.0)? * alpha)?)
}

fn elu_derivative(x: &Tensor, alpha: f64) -> Result<Tensor> {
    x.gt(0.0)?.where_cond(&x.ones_like()?, &(x.exp()? * alpha)?)
}

fn halves(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let width = x.dim(D::Minus1)? / 2;
    let half = |start| x.narrow(D::Minus1, start, width)?.contiguous();
    Ok((half(0)?, half(width)?))
}

const GELU_CUBE: f64 = 0.044715;
/// `√(2/π)`.
const GELU_INNER: f64 = FRAC_2_SQRT_PI * FRAC_1_SQRT_2;

fn gelu_inner(x: &Tensor) -> Result<Tensor> {
    (x * x.sqr()?.affine(GELU_CUBE, 1.0)?)? * GELU_INNER
}

fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    (gelu_inner(x)?.tanh()? + 1.0)? * (x * 0.5)?
}

fn gelu_tanh_derivative(x: &Tensor) -> Result<Tensor> {
    let tangent = gelu_inner(x)?.tanh()?;
    let inner = (x.sqr()?.affine(3.0 * GELU_CUBE, 1.0)? * GELU_INNER)?;
    let curved = ((x * inner)? * tangent.sqr()?.affine(-1.0, 1.0)?)?;
    ((tangent + 1.0)? + curved)? * 0.5
}

/// The normal distribution.
fn probability(x: &Tensor) -> Result<Tensor> {
    (x * FRAC_1_SQRT_2)?.erf()?.affine(0.5, 0.5)
}

fn density(x: &Tensor) -> Result<Tensor> {
    (x.sqr()? * -0.5)?.exp()? * (GELU_INNER * 0.5)
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

fn silu_derivative(x: &Tensor) -> Result<Tensor> {
    let share = sigmoid(x)?;
    let curved = (x * share.affine(-1.0, 1.0)?)?;
    share * (curved + 1.0)?
}

fn hard_sigmoid(x: &Tensor) -> Result<Tensor> {
    clamped(&x.affine(1.0 / 6.0, 0.5)?, 0.0, 1.0)
}

/// `value` where `x` is between `low` and `high`, else 0.
fn inside(x: &Tensor, low: f64, high: f64, value: f64) -> Result<Tensor> {
    (x.gt(low)? * x.lt(high)?)?.to_dtype(x.dtype())? * value
}

fn hard_swish_derivative(x: &Tensor) -> Result<Tensor> {
    hard_sigmoid(x)? + (clamped(x, -3.0, 3.0)? * inside(x, -3.0, 3.0, 1.0 / 6.0)?)?
}

/// candle's own keeps a number where a bound is NaN.
fn clamp(x: &Tensor, min: f64, max: f64) -> Result<Tensor> {
    let (min, max) = ((x.zeros_like()? + min)?, (x.zeros_like()? + max)?);
    let y = (x.ge(&min)? + x.ne(x)?)?.where_cond(x, &min)?;
    (y.le(&max)? + y.ne(&y)?)?.where_cond(&y, &max)
}

/// `1 + x` is rounded to `w`: the quotient takes back what that changes.
pub(in crate::kernels) fn log1p(x: &Tensor) -> Result<Tensor> {
    let w = (x + 1.0)?;
    let exact = (w.log()? * (x / (&w - 1.0)?)?)?;
    (w.eq(1.0)? + w.eq(f64::INFINITY)?)?.where_cond(x, &exact)
}

/// `n` such that `tanh(ln(1 + exp(x)))` is `n / (n + 2)`.
fn mish_odds(x: &Tensor) -> Result<Tensor> {
    let e = at_most(x, 20.0)?.exp()?;
    &e * (&e + 2.0)?
}

fn mish_gate(x: &Tensor) -> Result<Tensor> {
    let n = mish_odds(x)?;
    &n / (&n + 2.0)?
}

/// By the derivative of the tangent, without the cancellation of 1 - tanh².
fn mish_derivative(x: &Tensor) -> Result<Tensor> {
    let x = &clamped(x, -1e4, 20.0)?;
    let n = mish_odds(x)?;
    let bend = ((&n + 1.0)? * ((&n + 2.0)?.sqr()?.recip()? * 4.0)?)?;
    mish_gate(x)? + ((x * bend)? * sigmoid(x)?)?
}
