//! Normalisation of groups of channels, each sample on its own.
//!
//! `x` is `(n, c, …)`; weight and bias are `(c)`, of any float dtype. Arithmetic, statistics and
//! the sums of the parameters' gradients are F32 (F64 where `x` is F64); `y` has `x`'s dtype.

mod cpu;
mod cuda;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use crate::kernels::in_dtype;

/// Normalises each group of `c / groups` channels. Returns the statistics too: `(n * groups, 3)`, a
/// mean in two parts, the second what the first is short of, and `1 / std`.
pub(crate) fn forward(
    x: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::forward(gpu, &x, groups, [weight, bias], eps);
    }
    if x.device().is_cpu() {
        cpu::forward(&x, groups, weight, bias, eps)
    } else {
        portable::forward(&x, groups, weight, bias, eps)
    }
}

/// The gradients of `x`, weight and bias, each in the dtype it is wanted in.
pub(crate) fn backward(
    x: &Tensor,
    grad: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    statistics: &Tensor,
    wants: [Option<DType>; 3],
) -> Result<[Option<Tensor>; 3]> {
    let (x, grad) = (plain(x)?, plain(&in_dtype(grad, x.dtype())?)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::backward(gpu, [&x, &grad, statistics], groups, weight, wants);
    }
    if x.device().is_cpu() {
        cpu::backward(&x, &grad, groups, weight, statistics, wants)
    } else {
        portable::backward(&x, &grad, groups, weight, statistics, wants)
    }
}
