//! By candle's operators, in F32 (F64 for F64): for devices without kernels, and as what the tests compare with.

use candle_core::{D, Result, Tensor};

use super::Pointwise;
use crate::kernels::elementwise::portable::{at_most, clamped, relu, upcast};

pub(super) fn value(function: Pointwise, x: &Tensor) -> Result<Tensor> {
    let wide = upcast(x)?;
    let y = match function {
        Pointwise::GeluTanh {} => ((tangent(&gelu_inner(&wide)?)? + 1.0)? * (&wide * 0.5)?)?,
        Pointwise::GeluErf {} => (&wide * probability(&wide)?)?,
        Pointwise::Silu {} => (&wide * sigmoid(&wide)?)?,
        Pointwise::Sigmoid {} => sigmoid(&wide)?,
        Pointwise::Tanh {} => tangent(&wide)?,
        Pointwise::Relu6 {} => clamped(&wide, 0.0, 6.0)?,
        Pointwise::Relu2 {} => relu(&wide)?.sqr()?,
        Pointwise::HardSigmoid {} => hard_sigmoid(&wide)?,
        Pointwise::HardSwish {} => (&wide * hard_sigmoid(&wide)?)?,
        Pointwise::Mish {} => (&wide * mish_gate(&wide)?)?,
        Pointwise::Elu { alpha } => elu(&wide, alpha)?,
        Pointwise::Selu { alpha, gamma } => (elu(&wide, alpha)? * gamma)?,
        Pointwise::LeakyRelu { negative_slope } => {
            wide.gt(0.0)?.where_cond(&wide, &(&wide * negative_slope)?)?
        }
        Pointwise::Softplus {} => (relu(&wide)? + (wide.abs()?.neg()?.exp()? + 1.0)?.log()?)?,
        Pointwise::Exp {} => wide.exp()?,
        Pointwise::Log {} => wide.log()?,
        Pointwise::Square {} => wide.sqr()?,
        Pointwise::Sqrt {} => wide.sqrt()?,
        Pointwise::Rsqrt {} => wide.sqrt()?.recip()?,
        Pointwise::Recip {} => wide.recip()?,
        Pointwise::Abs {} => wide.abs()?,
        Pointwise::Neg {} => wide.neg()?,
        Pointwise::Affine { mul, add } => wide.affine(mul, add)?,
        Pointwise::Clamp { min, max } => {
            // candle's own keeps a number where a bound is NaN.
            let (min, max) = ((wide.zeros_like()? + min)?, (wide.zeros_like()? + max)?);
            let nan = wide.ne(&wide)?;
            let y = (wide.ge(&min)? + &nan)?.where_cond(&wide, &min)?;
            let nan = y.ne(&y)?;
            (y.le(&max)? + nan)?.where_cond(&y, &max)?
        }
        Pointwise::Powf { exponent } => wide.powf(exponent)?,
        Pointwise::Sin {} => wide.sin()?,
        Pointwise::Cos {} => wide.cos()?,
        Pointwise::Erf {} => wide.erf()?,
        // 1 + x = w is rounded: the quotient takes back what that changes.
        Pointwise::Log1p {} => {
            let w = (&wide + 1.0)?;
            let exact = (w.log()? * (&wide / (&w - 1.0)?)?)?;
            let (tiny, infinite) = (w.eq(1.0)?, w.eq(f64::INFINITY)?);
            (tiny + infinite)?.where_cond(&wide, &exact)?
        }
    };
    y.to_dtype(x.dtype())
}

pub(super) fn derivative(function: Pointwise, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (wide, grad) = (upcast(x)?, upcast(grad)?);
    let between = |low: f64, high: f64, value: f64| {
        let inside = (wide.gt(low)? * wide.lt(high)?)?;
        inside.to_dtype(wide.dtype())? * value
    };
    let derivative = match function {
        Pointwise::GeluTanh {} => {
            let tangent = tangent(&gelu_inner(&wide)?)?;
            let inner = (wide.sqr()?.affine(3.0 * GELU_CUBE, 1.0)? * GELU_INNER)?;
            let curved = ((&wide * inner)? * tangent.sqr()?.affine(-1.0, 1.0)?)?;
            (((tangent + 1.0)? + curved)? * 0.5)?
        }
        Pointwise::GeluErf {} => {
            let density = ((wide.sqr()? * -0.5)?.exp()? * (GELU_INNER * 0.5))?;
            (probability(&wide)? + (&wide * density)?)?
        }
        Pointwise::Silu {} => silu_derivative(&wide)?,
        Pointwise::Sigmoid {} => (sigmoid(&wide)? * sigmoid(&wide.neg()?)?)?,
        Pointwise::Tanh {} => tangent(&wide)?.sqr()?.affine(-1.0, 1.0)?,
        Pointwise::Relu6 {} => {
            let outside = (wide.le(0.0)? + wide.ge(6.0)?)?;
            outside.where_cond(&wide.zeros_like()?, &wide.ones_like()?)?
        }
        Pointwise::Relu2 {} => (relu(&wide)? * 2.0)?,
        Pointwise::HardSigmoid {} => between(-3.0, 3.0, 1.0 / 6.0)?,
        Pointwise::HardSwish {} => {
            let near = clamped(&wide, -3.0, 3.0)?;
            (hard_sigmoid(&wide)? + (near * between(-3.0, 3.0, 1.0 / 6.0)?)?)?
        }
        Pointwise::Mish {} => {
            // The derivative of the tangent, without the cancellation of 1 - tanh².
            let wide = clamped(&wide, -1e4, 20.0)?;
            let n = mish_odds(&wide)?;
            let bend = ((&n + 1.0)? * ((&n + 2.0)?.sqr()?.recip()? * 4.0)?)?;
            (mish_gate(&wide)? + ((&wide * bend)? * sigmoid(&wide)?)?)?
        }
        Pointwise::Elu { alpha } => elu_derivative(&wide, alpha)?,
        Pointwise::Selu { alpha, gamma } => (elu_derivative(&wide, alpha)? * gamma)?,
        Pointwise::LeakyRelu { negative_slope } => {
            let ones = wide.ones_like()?;
            wide.gt(0.0)?.where_cond(&ones, &(&ones * negative_slope)?)?
        }
        Pointwise::Softplus {} => sigmoid(&wide)?,
        Pointwise::Exp {} => wide.exp()?,
        Pointwise::Log {} => wide.recip()?,
        Pointwise::Square {} => (&wide * 2.0)?,
        Pointwise::Sqrt {} => (wide.sqrt()?.recip()? * 0.5)?,
        Pointwise::Rsqrt {} => {
            let y = wide.sqrt()?.recip()?;
            ((y.sqr()? * &y)? * -0.5)?
        }
        Pointwise::Recip {} => wide.recip()?.sqr()?.neg()?,
        Pointwise::Abs {} => {
            let (above, below) = (wide.gt(0.0)?, wide.lt(0.0)?);
            (above.to_dtype(wide.dtype())? - below.to_dtype(wide.dtype())?)?
        }
        Pointwise::Neg {} => (wide.zeros_like()? - 1.0)?,
        Pointwise::Affine { mul, .. } => (wide.zeros_like()? + mul)?,
        Pointwise::Clamp { min, max } => (wide.ge(min)? * wide.le(max)?)?.to_dtype(wide.dtype())?,
        Pointwise::Powf { exponent: 0.0 } => wide.zeros_like()?,
        Pointwise::Powf { exponent } => (wide.powf(exponent - 1.0)? * exponent)?,
        Pointwise::Sin {} => wide.cos()?,
        Pointwise::Cos {} => wide.sin()?.neg()?,
        Pointwise::Erf {} => (wide.sqr()?.neg()?.exp()? * std::f64::consts::FRAC_2_SQRT_PI)?,
        Pointwise::Log1p {} => (&wide + 1.0)?.recip()?,
    };
    (derivative * grad)?.to_dtype(x.dtype())
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
const GELU_INNER: f64 = std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;

fn gelu_inner(x: &Tensor) -> Result<Tensor> {
    (x * x.sqr()?.affine(GELU_CUBE, 1.0)?)? * GELU_INNER
}

fn probability(x: &Tensor) -> Result<Tensor> {
    (x * std::f64::consts::FRAC_1_SQRT_2)?.erf()?.affine(0.5, 0.5)
}

fn sigmoid(x: &Tensor) -> Result<Tensor> {
    (x.neg()?.exp()? + 1.0)?.recip()
}

fn tangent(x: &Tensor) -> Result<Tensor> {
    x.tanh()
}

fn silu_derivative(x: &Tensor) -> Result<Tensor> {
    let share = sigmoid(x)?;
    let curved = (x * share.affine(-1.0, 1.0)?)?;
    share * (curved + 1.0)?
}

fn hard_sigmoid(x: &Tensor) -> Result<Tensor> {
    clamped(&x.affine(1.0 / 6.0, 0.5)?, 0.0, 1.0)
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
