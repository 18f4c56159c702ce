//! Group norm out of candle's operators, for devices without kernels. Tests check it against the same values as
//! `cpu.rs`.
//!
//! Each group of a sample is a row. Arithmetic is F32 (F64 for F64), and results are rounded once. The mean is two
//! numbers, the second what the first is short of: rounding would shift all distances from a large mean.
//!
//! Backward normalises `x` again. Of each row it computes `dx = (g - mean(g) - normal · mean(g · normal)) / std`, where
//! `g = grad · weight`. The gradients of weight and bias are sums over the samples and pixels of a channel.

use candle_core::{DType, Result, Tensor};

use crate::kernels::elementwise::portable::{along, upcast};

pub(super) fn forward(
    x: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let rows = upcast(x)?.reshape((x.dim(0)? * groups, ()))?;
    let mean = rows.mean_keepdim(1)?;
    let rest = rows.broadcast_sub(&mean)?.mean_keepdim(1)?;
    let distance = rows.broadcast_sub(&mean)?.broadcast_sub(&rest)?;
    let inv_std = (distance.sqr()?.mean_keepdim(1)? + eps)?.sqrt()?.recip()?;
    let mut y = distance.broadcast_mul(&inv_std)?.reshape(x.shape())?;
    if let Some(weight) = weight {
        y = y.broadcast_mul(&along(weight, x)?)?;
    }
    if let Some(bias) = bias {
        y = y.broadcast_add(&along(bias, x)?)?;
    }
    Ok((y.to_dtype(x.dtype())?, Tensor::cat(&[mean, rest, inv_std], 1)?))
}

pub(super) fn backward(
    x: &Tensor,
    grad: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    statistics: &Tensor,
    wants: [Option<DType>; 3],
) -> Result<[Option<Tensor>; 3]> {
    let as_rows = |x: &Tensor| x.reshape((x.dim(0)? * groups, ()));
    let statistic = |at| statistics.narrow(1, at, 1);
    let normal = as_rows(&upcast(x)?)?
        .broadcast_sub(&statistic(0)?)?
        .broadcast_sub(&statistic(1)?)?
        .broadcast_mul(&statistic(2)?)?;
    let grad = upcast(grad)?;
    let dx = |dtype| {
        let weighted = match weight {
            Some(weight) => grad.broadcast_mul(&along(weight, x)?)?,
            None => grad.clone(),
        };
        let weighted = as_rows(&weighted)?;
        let through_std = normal.broadcast_mul(&(&weighted * &normal)?.mean_keepdim(1)?)?;
        let dx = weighted.broadcast_sub(&weighted.mean_keepdim(1)?)?.sub(&through_std)?;
        dx.broadcast_mul(&statistic(2)?)?.reshape(x.shape())?.to_dtype(dtype)
    };
    let sum = |x: &Tensor, dtype: DType| {
        x.transpose(0, 1)?.reshape((x.dim(1)?, ()))?.sum(1)?.to_dtype(dtype)
    };
    let dweight = |dtype| sum(&(&grad * normal.reshape(x.shape())?)?, dtype);
    Ok([
        wants[0].map(dx).transpose()?,
        wants[1].map(dweight).transpose()?,
        wants[2].map(|dtype| sum(&grad, dtype)).transpose()?,
    ])
}
