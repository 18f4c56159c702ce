//! The same out of candle's tensor operators, for any device.

use candle_core::{DType, Result, Tensor};

use super::multiplier::{Multiplier, Number, ScaledGradient};

/// Candle's scalar operators round the scalar to the tensor's dtype, here `F32` or `F64`.
pub(super) fn multiplied(gradient: &Tensor, by: &Multiplier) -> Result<Tensor> {
    let unscaled = match &by.inverse {
        Number::Host(1.0) => gradient.clone(),
        Number::Host(inverse) => gradient.affine((*inverse).into(), 0.0)?,
        Number::Device(inverse) => {
            gradient.broadcast_mul(&inverse.get(0)?.to_dtype(gradient.dtype())?)?
        }
    };
    let Some(clip) = &by.clip else { return Ok(unscaled) };
    // In F64 where there is one: in F32 it may be infinite.
    let norm = match gradient.dtype() {
        DType::F64 => clip.norm.to_dtype(DType::F64)?,
        _ => clip.norm.clone(),
    };
    let share = ((norm + 1e-6)?.recip()? * clip.max_norm)?.to_dtype(gradient.dtype())?;
    // where, not minimum: a NaN norm must reach the gradients.
    let share = share.ge(1.0)?.where_cond(&share.ones_like()?, &share)?;
    unscaled.broadcast_mul(&share)
}

pub(super) fn check(gradients: &[ScaledGradient<'_>]) -> Result<Vec<bool>> {
    // x * 0 is 0 for a finite x and NaN for the rest.
    let canaries = gradients.iter().map(|(gradient, by)| {
        multiplied(gradient, by)?.affine(0.0, 0.0)?.sum_all()?.to_dtype(DType::F32)
    });
    let canaries = Tensor::stack(&canaries.collect::<Result<Vec<_>>>()?, 0)?.to_vec1::<f32>()?;
    Ok(canaries.iter().map(|c| c.is_nan()).collect())
}

pub(super) fn norm(gradients: &[ScaledGradient<'_>]) -> Result<Tensor> {
    let squares = gradients
        .iter()
        .map(|(gradient, by)| multiplied(gradient, by)?.to_dtype(DType::F32)?.sqr()?.sum_all());
    Tensor::stack(&squares.collect::<Result<Vec<_>>>()?, 0)?.sum_all()?.sqrt()
}
