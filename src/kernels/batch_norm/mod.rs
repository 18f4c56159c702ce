//! Batch normalisation over every dimension but the second.
//!
//! `x` is `(n, c)` or `(n, c, ...)`. Weight, bias and statistics are `(c)`: statistics and the
//! gradients of weight and bias are F32 (F64 where `x` is F64), as is the arithmetic; weight and
//! bias may have any float dtype; `y` and `dx` have `x`'s.

mod cpu;
mod cuda;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, Var};

use crate::kernels::cast;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::{plain, relu_backward};

/// What a batch's normalisation was made from.
#[derive(Clone, Debug)]
pub(crate) struct Statistics {
    pub(crate) mean: Tensor,
    /// The biased variance: the mean square distance from the mean.
    pub(crate) var: Tensor,
    /// `1 / sqrt(var + eps)`
    pub(crate) inv_std: Tensor,
}

/// What a normalised channel is multiplied by, and what is added then.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Affine<'a> {
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
}

/// Statistics to normalise by that are not the batch's own: constants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running<'a> {
    pub(crate) mean: &'a Tensor,
    pub(crate) var: &'a Tensor,
    /// Added to the variance.
    pub(crate) eps: f64,
}

/// What follows the normalisation, before the one rounding.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Finish<'a> {
    Plain,
    Relu,
    /// `relu(y + residual)`; of `x`'s shape and dtype.
    AddRelu(&'a Tensor),
}

/// Normalises with the statistics of `x` itself, and returns them.
pub(crate) fn forward_train(
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
    match Gpu::of(x.device()) {
        _ if x.device().is_cpu() => cpu::forward_train(&x, affine, finish, eps),
        Some(gpu) if x.elem_count() > 0 => cuda::forward_train(&gpu, &x, affine, finish, eps),
        _ => portable::forward_train(&x, affine, finish, eps),
    }
}

/// Normalises with given statistics.
pub(crate) fn forward_eval(x: &Tensor, running: Running<'_>, affine: Affine<'_>) -> Result<Tensor> {
    let x = plain(x)?;
    match Gpu::of(x.device()) {
        _ if x.device().is_cpu() => cpu::forward_eval(&x, running, affine),
        Some(gpu) if x.elem_count() > 0 => cuda::forward_eval(&gpu, &x, running, affine),
        _ => portable::forward_eval(&x, running, affine),
    }
}

/// The gradients `(dx, dweight, dbias)` of [`forward_train`], through the statistics too.
pub(crate) fn backward_train(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (x, grad) = (plain(x)?, plain(&grad.detach().to_dtype(x.dtype())?)?);
    match Gpu::of(x.device()) {
        _ if x.device().is_cpu() => cpu::backward_train(&x, &grad, weight, statistics),
        Some(gpu) if x.elem_count() > 0 => {
            cuda::backward_train(&gpu, &x, &grad, weight, statistics)
        }
        _ => portable::backward_train(&x, &grad, weight, statistics),
    }
}

/// The gradients `(dx, dweight, dbias)` of [`forward_train`] with [`Finish::Relu`], which gave `y`.
pub(crate) fn backward_relu(
    x: &Tensor,
    y: &Tensor,
    grad: &Tensor,
    affine: Affine<'_>,
    statistics: &Statistics,
) -> Result<(Tensor, Tensor, Tensor)> {
    let [x, own] = [plain(x)?, plain(&grad.detach().to_dtype(x.dtype())?)?];
    match Gpu::of(x.device()) {
        _ if x.device().is_cpu() => cpu::backward_relu(&x, &own, affine, statistics),
        Some(gpu) if x.elem_count() > 0 => cuda::backward_relu(&gpu, &x, &own, affine, statistics),
        _ => portable::backward_train(&x, &relu_backward(y, &own)?, affine.weight, statistics),
    }
}

/// The mean and the biased variance of every channel of `x`, which has elements.
pub(crate) fn statistics(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let x = plain(x)?;
    if x.device().is_cpu() {
        return cpu::statistics(&x);
    }
    let (_, Statistics { mean, var, .. }) =
        forward_train(&x, Affine::default(), Finish::Plain, 0.0)?;
    Ok((mean, var))
}

/// `(dweight, dbias)` of `x` alone, which was normalised by these statistics.
pub(crate) fn parameter_gradients(
    x: &Tensor,
    grad: &Tensor,
    statistics: &Statistics,
) -> Result<(Tensor, Tensor)> {
    let (x, grad) = (plain(x)?, plain(&grad.detach().to_dtype(x.dtype())?)?);
    if x.device().is_cpu() {
        return cpu::parameter_gradients_of(&x, &grad, statistics);
    }
    portable::parameter_gradients(&x, &grad, statistics)
}

/// `dx` where `x` is a part of what the statistics are of: all of that has `count` values a channel, and these
/// gradients of weight and bias.
pub(crate) fn backward_part(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
    [dweight, dbias]: [&Tensor; 2],
    count: f64,
) -> Result<Tensor> {
    let (x, grad) = (plain(x)?, plain(&grad.detach().to_dtype(x.dtype())?)?);
    if x.device().is_cpu() {
        return cpu::backward_part(&x, &grad, weight, statistics, [dweight, dbias], count);
    }
    portable::input_gradient(&x, &grad, weight, statistics, [dweight, dbias], count)
}

/// `running = running · kept + batch · weight`, in place, for a mean and a variance with a weight each.
pub(crate) fn average(
    running: [&Var; 2],
    batch: [&Tensor; 2],
    kept: f64,
    weights: [f64; 2],
) -> Result<()> {
    let [mean, var] = running.map(Var::as_tensor);
    let is_like_mean = |v: &&Tensor| {
        v.dims() == mean.dims()
            && v.dtype() == mean.dtype()
            && v.device().same_device(mean.device())
            && v.is_contiguous()
    };
    let is_one_launch = matches!(mean.dtype(), DType::F32 | DType::F64)
        && [mean, var, batch[0], batch[1]].iter().all(is_like_mean);
    if let Some(gpu) = Gpu::of(mean.device()).filter(|_| is_one_launch) {
        return cuda::average(&gpu, [mean, var], batch, kept, weights);
    }
    for ((running, batch), weight) in running.into_iter().zip(batch).zip(weights) {
        let batch = cast(batch, running.dtype())?;
        let before = running.as_detached_tensor().affine(kept, 0.0)?;
        running.set(&(before + batch.affine(weight, 0.0)?)?)?;
    }
    Ok(())
}

/// The gradients `(dx, dweight, dbias)` of [`forward_eval`]; the statistics are constants.
pub(crate) fn backward_eval(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    running: Running<'_>,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (x, grad) = (plain(x)?, plain(&grad.detach().to_dtype(x.dtype())?)?);
    match Gpu::of(x.device()) {
        _ if x.device().is_cpu() => cpu::backward_eval(&x, &grad, weight, running),
        Some(gpu) if x.elem_count() > 0 => cuda::backward_eval(&gpu, &x, &grad, weight, running),
        _ => portable::backward_eval(&x, &grad, weight, running),
    }
}
