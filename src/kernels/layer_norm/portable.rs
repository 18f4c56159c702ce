//! Layer norm and RMS norm out of candle's operators, for devices without kernels. Tests check it against the same
//! values as `cpu.rs`.
//!
//! Arithmetic is F32 (F64 for F64), and results are rounded once. The mean is two numbers, the second what the first is
//! short of: rounding would shift all distances from a large mean. RMS norm saves zeros for both.
//!
//! Backward normalises `x` again. Of each row it computes `dx = (g - mean(g) - normal · mean(g · normal)) / std`, where
//! `g = grad · weight`; RMS norm has no `mean(g)`. The gradients of weight and bias are sums over rows.

use candle_core::{D, DType, Result, Tensor};

use crate::kernels::accumulator;
use crate::kernels::elementwise::portable::upcast;

pub(super) fn forward(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    centred: bool,
) -> Result<(Tensor, Tensor)> {
    let wide = upcast(x)?;
    let mean = wide.mean_keepdim(D::Minus1)?;
    let mean = if centred { mean } else { mean.zeros_like()? };
    let rest = wide.broadcast_sub(&mean)?.mean_keepdim(D::Minus1)?;
    let rest = if centred { rest } else { rest.zeros_like()? };
    let distance = wide.broadcast_sub(&mean)?.broadcast_sub(&rest)?;
    let inv_std = (distance.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?.recip()?;
    let mut y = distance.broadcast_mul(&inv_std)?;
    if let Some(weight) = weight {
        y = y.broadcast_mul(&widened(weight, x)?)?;
    }
    if let Some(bias) = bias {
        y = y.broadcast_add(&widened(bias, x)?)?;
    }
    let statistics = Tensor::cat(&[mean, rest, inv_std], D::Minus1)?.reshape(((), 3))?;
    Ok((y.to_dtype(x.dtype())?, statistics))
}

pub(super) fn backward(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Tensor,
    centred: bool,
    wants: [Option<DType>; 3],
    pending: Option<&Tensor>,
) -> Result<[Option<Tensor>; 3]> {
    let columns = x.dim(D::Minus1)?;
    let (wide, grad) = (upcast(x)?.reshape(((), columns))?, upcast(grad)?.reshape(((), columns))?);
    let statistic = |at| statistics.narrow(1, at, 1);
    let normal = wide
        .broadcast_sub(&statistic(0)?)?
        .broadcast_sub(&statistic(1)?)?
        .broadcast_mul(&statistic(2)?)?;
    let dx = |dtype| {
        let weighted = match weight {
            Some(weight) => grad.broadcast_mul(&widened(weight, x)?)?,
            None => grad.clone(),
        };
        let along = (&weighted * &normal)?.mean_keepdim(1)?;
        let average = weighted.mean_keepdim(1)?;
        let average = if centred { average } else { average.zeros_like()? };
        let dx = weighted.broadcast_sub(&average)?.sub(&normal.broadcast_mul(&along)?)?;
        let dx = dx.broadcast_mul(&statistic(2)?)?.reshape(x.shape())?;
        let dx = if let Some(pending) = pending { dx.add(&upcast(pending)?)? } else { dx };
        dx.to_dtype(dtype)
    };
    let dweight = |dtype| (&grad * &normal)?.sum(0)?.to_dtype(dtype);
    let dbias = |dtype| grad.sum(0)?.to_dtype(dtype);
    Ok([
        wants[0].map(dx).transpose()?,
        wants[1].map(dweight).transpose()?,
        wants[2].map(dbias).transpose()?,
    ])
}

fn widened(parameter: &Tensor, x: &Tensor) -> Result<Tensor> {
    parameter.detach().to_dtype(accumulator(x.dtype()))
}
