use candle_core::{D, Result, Tensor};

use super::Curve;
use crate::kernels::elementwise::portable::upcast;

pub(super) fn value(curve: Curve, x: &Tensor) -> Result<Tensor> {
    let wide = upcast(x)?;
    let y = match curve {
        Curve::Gelu => ((tangent(&gelu_inner(&wide)?)? + 1.0)? * (&wide * 0.5)?)?,
        Curve::GeluErf => (&wide * probability(&wide)?)?,
        Curve::Silu => (&wide * sigmoid(&wide)?)?,
        Curve::Sigmoid => sigmoid(&wide)?,
        Curve::Tanh => tangent(&wide)?,
        Curve::Relu6 => wide.clamp(0.0, 6.0)?,
        Curve::Relu2 => wide.relu()?.sqr()?,
        Curve::HardSigmoid => hard_sigmoid(&wide)?,
        Curve::HardSwish => (&wide * hard_sigmoid(&wide)?)?,
        Curve::Mish => (&wide * mish_gate(&wide)?)?,
        Curve::Elu { alpha, scale } => {
            let below = ((wide.exp()? - 1.0)? * alpha)?;
            (wide.gt(0.0)?.where_cond(&wide, &below)? * scale)?
        }
        Curve::LeakyRelu { slope } => wide.gt(0.0)?.where_cond(&wide, &(&wide * slope)?)?,
        Curve::Softplus => (wide.relu()? + (wide.abs()?.neg()?.exp()? + 1.0)?.log()?)?,
        Curve::Exp => wide.exp()?,
        Curve::Log => wide.log()?,
    };
    y.to_dtype(x.dtype())
}

pub(super) fn slope(curve: Curve, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (wide, grad) = (upcast(x)?, upcast(grad)?);
    let between = |low: f64, high: f64, value: f64| {
        let inside = (wide.gt(low)? * wide.lt(high)?)?;
        inside.to_dtype(wide.dtype())? * value
    };
    let slope = match curve {
        Curve::Gelu => {
            let tangent = tangent(&gelu_inner(&wide)?)?;
            let inner = (wide.sqr()?.affine(3.0 * GELU_CUBE, 1.0)? * GELU_INNER)?;
            let curved = ((&wide * inner)? * tangent.sqr()?.affine(-1.0, 1.0)?)?;
            (((tangent + 1.0)? + curved)? * 0.5)?
        }
        Curve::GeluErf => {
            let density = ((wide.sqr()? * -0.5)?.exp()? * (GELU_INNER * 0.5))?;
            (probability(&wide)? + (&wide * density)?)?
        }
        Curve::Silu => silu_slope(&wide)?,
        Curve::Sigmoid => (sigmoid(&wide)? * sigmoid(&wide.neg()?)?)?,
        Curve::Tanh => tangent(&wide)?.sqr()?.affine(-1.0, 1.0)?,
        Curve::Relu6 => {
            let outside = (wide.le(0.0)? + wide.ge(6.0)?)?;
            outside.where_cond(&wide.zeros_like()?, &wide.ones_like()?)?
        }
        Curve::Relu2 => (wide.relu()? * 2.0)?,
        Curve::HardSigmoid => between(-3.0, 3.0, 1.0 / 6.0)?,
        Curve::HardSwish => {
            let near = wide.clamp(-3.0, 3.0)?;
            (hard_sigmoid(&wide)? + (near * between(-3.0, 3.0, 1.0 / 6.0)?)?)?
        }
        Curve::Mish => {
            // The slope of the tangent, without the cancellation of 1 - tanh².
            let wide = wide.clamp(-1e4, 20.0)?;
            let n = mish_odds(&wide)?;
            let bend = ((&n + 1.0)? * ((&n + 2.0)?.sqr()?.recip()? * 4.0)?)?;
            (mish_gate(&wide)? + ((&wide * bend)? * sigmoid(&wide)?)?)?
        }
        Curve::Elu { alpha, scale } => {
            let below = (wide.exp()? * alpha)?;
            (wide.gt(0.0)?.where_cond(&wide.ones_like()?, &below)? * scale)?
        }
        Curve::LeakyRelu { slope } => {
            let ones = wide.ones_like()?;
            wide.gt(0.0)?.where_cond(&ones, &(&ones * slope)?)?
        }
        Curve::Softplus => sigmoid(&wide)?,
        Curve::Exp => wide.exp()?,
        Curve::Log => wide.recip()?,
    };
    (slope * grad)?.to_dtype(x.dtype())
}

pub(super) fn swiglu(x: &Tensor) -> Result<Tensor> {
    let (gate, up) = halves(&upcast(x)?)?;
    ((&gate * sigmoid(&gate)?)? * up)?.to_dtype(x.dtype())
}

pub(super) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let ((gate, up), grad) = (halves(&upcast(x)?)?, upcast(grad)?);
    let of_gate = ((&grad * up)? * silu_slope(&gate)?)?;
    let of_up = (grad * (&gate * sigmoid(&gate)?)?)?;
    Tensor::cat(&[of_gate, of_up], D::Minus1)?.to_dtype(x.dtype())
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

fn silu_slope(x: &Tensor) -> Result<Tensor> {
    let share = sigmoid(x)?;
    let curved = (x * share.affine(-1.0, 1.0)?)?;
    share * (curved + 1.0)?
}

fn hard_sigmoid(x: &Tensor) -> Result<Tensor> {
    x.affine(1.0 / 6.0, 0.5)?.clamp(0.0, 1.0)
}

/// `n` such that `tanh(ln(1 + exp(x)))` is `n / (n + 2)`.
fn mish_odds(x: &Tensor) -> Result<Tensor> {
    let e = x.minimum(20.0)?.exp()?;
    &e * (&e + 2.0)?
}

fn mish_gate(x: &Tensor) -> Result<Tensor> {
    let n = mish_odds(x)?;
    &n / (&n + 2.0)?
}
