//! The same out of candle's tensor operators, for any device.

use candle_core::{DType, Result, Tensor};

/// Candle's scalar operators round the scalar to the tensor's dtype, here `F32` or `F64`.
pub(super) fn unscale(gradients: Vec<Tensor>, inverse: f32) -> Result<(Vec<Tensor>, Vec<bool>)> {
    let scaled: Vec<Tensor> =
        gradients.iter().map(|g| g.affine(inverse.into(), 0.0)).collect::<Result<_>>()?;
    // x * 0 is 0 for a finite x and NaN for the rest.
    let canaries: Vec<Tensor> = scaled
        .iter()
        .map(|g| g.affine(0.0, 0.0)?.sum_all()?.to_dtype(DType::F32))
        .collect::<Result<_>>()?;
    let canaries = Tensor::stack(&canaries, 0)?.to_vec1::<f32>()?;
    Ok((scaled, canaries.iter().map(|c| c.is_nan()).collect()))
}

pub(super) fn norm(gradients: &[&Tensor]) -> Result<Tensor> {
    let squares: Vec<Tensor> = gradients
        .iter()
        .map(|g| g.to_dtype(DType::F32)?.sqr()?.sum_all())
        .collect::<Result<_>>()?;
    Tensor::stack(&squares, 0)?.sum_all()?.sqrt()
}

pub(super) fn clip_norm(
    gradients: Vec<Tensor>,
    norm: &Tensor,
    max_norm: f64,
) -> Result<Vec<Tensor>> {
    let factor = ((norm + 1e-6)?.recip()? * max_norm)?;
    // where, not minimum: a NaN norm must reach the gradients.
    let factor = factor.ge(1.0)?.where_cond(&factor.ones_like()?, &factor)?;
    gradients.iter().map(|g| g.broadcast_mul(&factor.to_dtype(g.dtype())?)).collect()
}
