//! Batch normalisation over every dimension but that of the channels.
//!
//! `x` is `(n, c)`, `(n, c, ...)` or, as its `Format` says, `(n, ..., c)`; without one, `(n, c, ...)`. Weight, bias and
//! statistics are `(c)`: statistics and the gradients of weight and bias are F32 (F64 where `x` is F64), as is the arithmetic.
//! Weight and bias may have any float dtype; `y` and `dx` have `x`'s.

mod affine;
mod cpu;
mod cuda;
mod portable;
mod statistics;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor, Var};

pub(crate) use affine::{Affine, Finish, Rectifier};
pub(crate) use statistics::{Running, Statistics};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::{plain, relu_backward};
use crate::kernels::reduce::channels::Channels;
use crate::kernels::tensors::format::Format;
use crate::kernels::{cast, in_dtype};
use affine::Gradients;

/// `x` with its channels in the second dimension.
fn channels_second(format: Format, x: &Tensor) -> Result<Tensor> {
    match format {
        Format::ChannelsFirst => Ok(x.clone()),
        Format::ChannelsLast => x.flatten_to(x.rank() - 2),
    }
}

/// The shape of `x` around its channels.
fn channels(format: Format, x: &Tensor) -> Channels {
    Channels::of(x.dims(), format.channels(x.rank()))
}

/// Normalises with the statistics of `x` itself, and returns them.
pub(crate) fn forward_train(
    format: Format,
    x: &Tensor,
    affine: Affine<'_>,
    finish: Finish<'_>,
    eps: f64,
) -> Result<(Tensor, Statistics)> {
    let x = plain(x)?;
    let residual;
    let finish = match finish {
        Finish::AddRelu(given) => {
            residual = plain(given)?;
            Finish::AddRelu(&residual)
        }
        finish => finish,
    };
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| x.elem_count() > 0) {
        return cuda::forward_train(gpu, &x, channels(format, &x), affine, finish, eps);
    }
    let given = x.dims();
    let x = channels_second(format, &x)?;
    let residual;
    let finish = match finish {
        Finish::AddRelu(given) => {
            residual = channels_second(format, given)?;
            Finish::AddRelu(&residual)
        }
        finish => finish,
    };
    let (y, statistics) = if x.device().is_cpu() {
        cpu::forward_train(&x, affine, finish, eps)?
    } else {
        portable::forward_train(&x, affine, finish, eps)?
    };
    Ok((y.reshape(given)?, statistics))
}

/// Normalises with given statistics.
pub(crate) fn forward_eval(
    format: Format,
    x: &Tensor,
    running: Running<'_>,
    affine: Affine<'_>,
) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| x.elem_count() > 0) {
        return cuda::forward_eval(gpu, &x, channels(format, &x), running, affine);
    }
    let given = x.dims();
    let x = channels_second(format, &x)?;
    let y = if x.device().is_cpu() {
        cpu::forward_eval(&x, running, affine)?
    } else {
        portable::forward_eval(&x, running, affine)?
    };
    y.reshape(given)
}

/// The gradients `(dx, dweight, dbias)` of [`forward_train`], through the statistics too.
pub(crate) fn backward_train(
    format: Format,
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
) -> Result<Gradients> {
    let (x, grad) = (plain(x)?, plain(&in_dtype(grad, x.dtype())?)?);
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| x.elem_count() > 0) {
        let affine = Affine { weight, bias: None };
        return cuda::backward(gpu, [&x, &grad], channels(format, &x), statistics, affine, None);
    }
    let given = x.dims();
    let [x, grad] = [channels_second(format, &x)?, channels_second(format, &grad)?];
    let (dx, dweight, dbias) = if x.device().is_cpu() {
        cpu::backward_train(&x, &grad, weight, statistics)?
    } else {
        portable::backward_train(&x, &grad, weight, statistics)?
    };
    Ok((dx.reshape(given)?, dweight, dbias))
}

/// The gradients `(dx, dweight, dbias)` of [`forward_train`] with [`Finish::Rectified`], which gave `y`.
pub(crate) fn backward_rectified(
    format: Format,
    by: Rectifier,
    [x, y]: [&Tensor; 2],
    grad: &Tensor,
    affine: Affine<'_>,
    statistics: &Statistics,
) -> Result<Gradients> {
    let (x, grad) = (plain(x)?, plain(&in_dtype(grad, x.dtype())?)?);
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| x.elem_count() > 0) {
        let layout = channels(format, &x);
        return cuda::backward(gpu, [&x, &grad], layout, statistics, affine, Some(by));
    }
    if !x.device().is_cpu() {
        let grad = match by {
            Rectifier::Relu => relu_backward(y, &grad)?,
            Rectifier::Relu6 => portable::relu6_backward(y, &grad)?,
        };
        return backward_train(format, &x, &grad, affine.weight, statistics);
    }
    let given = x.dims();
    let [x, grad] = [channels_second(format, &x)?, channels_second(format, &grad)?];
    let (dx, dweight, dbias) = cpu::backward_rectified(by, &x, &grad, affine, statistics)?;
    Ok((dx.reshape(given)?, dweight, dbias))
}

/// The mean and the biased variance of every channel of `x`, which has elements.
pub(crate) fn statistics(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let x = plain(x)?;
    if x.device().is_cpu() {
        return cpu::statistics(&x);
    }
    let (_, statistics) =
        forward_train(Format::ChannelsFirst, &x, Affine::default(), Finish::Plain, 0.0)?;
    Ok((statistics.mean()?, statistics.var()?))
}

/// `(dweight, dbias)` of `x` alone, which was normalised by these statistics.
pub(crate) fn parameter_gradients(
    x: &Tensor,
    grad: &Tensor,
    statistics: &Statistics,
) -> Result<(Tensor, Tensor)> {
    let (x, grad) = (plain(x)?, plain(&in_dtype(grad, x.dtype())?)?);
    if x.device().is_cpu() {
        return cpu::parameter_gradients_of(&x, &grad, statistics);
    }
    portable::parameter_gradients(&x, &grad, statistics)
}

/// `dx` where `x` is a part of what the statistics are of: all of that has `count` values per channel, and these
/// gradients of weight and bias.
pub(crate) fn backward_part(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
    [dweight, dbias]: [&Tensor; 2],
    count: f64,
) -> Result<Tensor> {
    let (x, grad) = (plain(x)?, plain(&in_dtype(grad, x.dtype())?)?);
    if x.device().is_cpu() {
        return cpu::backward_part(&x, &grad, weight, statistics, [dweight, dbias], count);
    }
    portable::input_gradient(&x, &grad, weight, statistics, [dweight, dbias], count)
}

/// `running = running · kept + batch · weight`, in place, for a mean and a variance with a weight each.
pub(crate) fn average(
    running: [&Var; 2],
    batch: &Statistics,
    kept: f64,
    weights: [f64; 2],
) -> Result<()> {
    let all = &batch.0;
    let is_like_batch = |v: &&Tensor| {
        3 * v.elem_count() == all.elem_count()
            && v.dtype() == all.dtype()
            && v.device().same_device(all.device())
            && v.is_contiguous()
    };
    let [mean, var] = running.map(Var::as_tensor);
    let is_one_launch = [mean, var].iter().all(is_like_batch);
    if let Some(gpu) = Gpu::of(mean.device()).filter(|_| is_one_launch) {
        return cuda::average(gpu, [mean, var], batch, kept, weights);
    }
    let batch = [batch.mean()?, batch.var()?];
    for ((running, batch), weight) in running.into_iter().zip(&batch).zip(weights) {
        let batch = cast(batch, running.dtype())?;
        let before = running.as_detached_tensor().affine(kept, 0.0)?;
        running.set(&(before + batch.affine(weight, 0.0)?)?)?;
    }
    Ok(())
}

/// The gradients `(dx, dweight, dbias)` of [`forward_eval`]; the statistics are constants.
pub(crate) fn backward_eval(
    format: Format,
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    running: Running<'_>,
) -> Result<Gradients> {
    let (x, grad) = (plain(x)?, plain(&in_dtype(grad, x.dtype())?)?);
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| x.elem_count() > 0) {
        return cuda::backward_eval(gpu, [&x, &grad], channels(format, &x), weight, running);
    }
    let given = x.dims();
    let [x, grad] = [channels_second(format, &x)?, channels_second(format, &grad)?];
    let (dx, dweight, dbias) = if x.device().is_cpu() {
        cpu::backward_eval(&x, &grad, weight, running)?
    } else {
        portable::backward_eval(&x, &grad, weight, running)?
    };
    Ok((dx.reshape(given)?, dweight, dbias))
}
