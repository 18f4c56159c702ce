//! Batch norm out of candle's operators, for devices without kernels and as what the tests compare with.
//!
//! Arithmetic is F32 (F64 for F64), and results are rounded once. Channels are the second dimension: `mod.rs` flattens
//! channels-last tensors to that. The variance is the mean of squared distances from the mean. The mean of squares less
//! the square of the mean would cancel where the mean is large.
//!
//! Backward has two steps, the sums of each channel (the gradients of weight and bias) and from them `dx`. Batch norm
//! over several ranks adds up the sums of all ranks in between. It uses these functions on CUDA too.

use candle_core::{Result, Tensor};

use super::affine::{Affine, Finish, Gradients, Rectifier};
use super::statistics::{Running, Statistics};
use crate::kernels::accumulator;
use crate::kernels::elementwise::portable::{along, relu, relu_backward, upcast};

pub(super) fn forward_train(
    x: &Tensor,
    affine: Affine<'_>,
    finish: Finish<'_>,
    eps: f64,
) -> Result<(Tensor, Statistics)> {
    let wide = upcast(x)?;
    let mean = average(&wide)?;
    let var = average(&wide.broadcast_sub(&along(&mean, x)?)?.sqr()?)?;
    let inv_std = inv_std(&var, x, eps)?;
    let y = normalised(x, &mean, &inv_std, affine)?;
    let y = match finish {
        Finish::Plain => y,
        Finish::Rectified(Rectifier::Relu) => relu(&y)?,
        Finish::Rectified(Rectifier::Relu6) => relu6(&y)?,
        Finish::AddRelu(residual) => relu(&(y + upcast(residual)?)?)?,
    };
    Ok((y.to_dtype(x.dtype())?, Statistics::new(&mean, &var, &inv_std)?))
}

pub(super) fn forward_eval(x: &Tensor, running: Running<'_>, affine: Affine<'_>) -> Result<Tensor> {
    let Running { mean, var, eps } = running;
    normalised(x, mean, &inv_std(var, x, eps)?, affine)?.to_dtype(x.dtype())
}

pub(super) fn backward_train(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
) -> Result<Gradients> {
    let (dweight, dbias) = parameter_gradients(x, grad, statistics)?;
    let count = (x.elem_count() / x.dim(1)?) as f64;
    let dx = input_gradient(x, grad, weight, statistics, [&dweight, &dbias], count)?;
    Ok((dx, dweight, dbias))
}

pub(super) fn parameter_gradients(
    x: &Tensor,
    grad: &Tensor,
    statistics: &Statistics,
) -> Result<(Tensor, Tensor)> {
    let (mean, inv_std) = (statistics.mean()?, statistics.inv_std()?);
    let (normalised, grad) = (normalise(x, &mean, &inv_std)?, upcast(grad)?);
    Ok((sum(&(&grad * &normalised)?)?, sum(&grad)?))
}

pub(super) fn input_gradient(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
    [dweight, dbias]: [&Tensor; 2],
    count: f64,
) -> Result<Tensor> {
    let (mean, inv_std) = (statistics.mean()?, statistics.inv_std()?);
    let (normalised, grad) = (normalise(x, &mean, &inv_std)?, upcast(grad)?);
    let through_mean = along(&(dbias / count)?, x)?;
    let through_std = normalised.broadcast_mul(&along(&(dweight / count)?, x)?)?;
    let centred = grad.broadcast_sub(&through_mean)?.sub(&through_std)?;
    let dx = centred.broadcast_mul(&along(&scale(&inv_std, weight, x)?, x)?)?;
    dx.to_dtype(x.dtype())
}

pub(super) fn backward_eval(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    running: Running<'_>,
) -> Result<Gradients> {
    let Running { mean, var, eps } = running;
    let inv_std = inv_std(var, x, eps)?;
    let (normalised, grad) = (normalise(x, mean, &inv_std)?, upcast(grad)?);
    let dx = grad.broadcast_mul(&along(&scale(&inv_std, weight, x)?, x)?)?;
    Ok((dx.to_dtype(x.dtype())?, sum(&(&grad * &normalised)?)?, sum(&grad)?))
}

/// NaN stays NaN.
fn relu6(y: &Tensor) -> Result<Tensor> {
    let (y, six) = (relu(y)?, sixes(y)?);
    y.ge(&six)?.where_cond(&six, &y)
}

/// The gradient before relu6, which gave `y`: 0 where that is 0 or 6, whatever the gradient after it is.
pub(super) fn relu6_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let grad = relu_backward(y, grad)?;
    y.ge(&sixes(y)?)?.where_cond(&grad.zeros_like()?, &grad)
}

fn sixes(x: &Tensor) -> Result<Tensor> {
    x.ones_like()?.affine(6.0, 0.0)
}

/// In the dtype of the arithmetic.
fn normalised(
    x: &Tensor,
    mean: &Tensor,
    inv_std: &Tensor,
    Affine { weight, bias }: Affine<'_>,
) -> Result<Tensor> {
    let centred = upcast(x)?.broadcast_sub(&along(mean, x)?)?;
    let mut y = centred.broadcast_mul(&along(&scale(inv_std, weight, x)?, x)?)?;
    if let Some(bias) = bias {
        y = y.broadcast_add(&along(bias, x)?)?;
    }
    Ok(y)
}

fn normalise(x: &Tensor, mean: &Tensor, inv_std: &Tensor) -> Result<Tensor> {
    upcast(x)?.broadcast_sub(&along(mean, x)?)?.broadcast_mul(&along(inv_std, x)?)
}

fn scale(inv_std: &Tensor, weight: Option<&Tensor>, x: &Tensor) -> Result<Tensor> {
    let inv_std = inv_std.detach().to_dtype(accumulator(x.dtype()))?;
    match weight {
        Some(weight) => weight.detach().to_dtype(inv_std.dtype())?.mul(&inv_std),
        None => Ok(inv_std),
    }
}

fn inv_std(var: &Tensor, x: &Tensor, eps: f64) -> Result<Tensor> {
    (var.detach().to_dtype(accumulator(x.dtype()))? + eps)?.sqrt()?.recip()
}

/// Sums over every dimension but the second.
fn sum(x: &Tensor) -> Result<Tensor> {
    x.transpose(0, 1)?.reshape((x.dim(1)?, ()))?.sum(1)
}

fn average(x: &Tensor) -> Result<Tensor> {
    x.transpose(0, 1)?.reshape((x.dim(1)?, ()))?.mean(1)
}
