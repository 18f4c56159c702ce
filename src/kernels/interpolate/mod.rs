//! Resampling of the last two dimensions of `(n, c, h, w)`: nearest pixel, or bilinear.
//!
//! Forward results have `x`'s dtype. Gradients have the dtype asked for; where several output
//! pixels are made of one input pixel, they accumulate in F32 (F64 for F64), in one order.

mod cpu;
mod cuda;
mod portable;
mod sampling_grid;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

pub(crate) use sampling_grid::SamplingGrid;

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use sampling_grid::Dims4;

/// `x` at the places of `grid`.
pub(crate) fn forward(x: &Tensor, grid: &SamplingGrid) -> Result<Tensor> {
    let x = plain(x)?;
    match Gpu::of(x.device()) {
        _ if x.device().is_cpu() => cpu::forward(&x, grid),
        Some(gpu) if x.elem_count() > 0 => cuda::forward(gpu, &x, grid),
        _ => portable::forward(&x, grid),
    }
}

/// The gradient of [`forward`], of dimensions `input_dims`.
pub(crate) fn backward(
    grad: &Tensor,
    input_dims: Dims4,
    grid: &SamplingGrid,
    out: DType,
) -> Result<Tensor> {
    let grad = plain(grad)?;
    match Gpu::of(grad.device()) {
        _ if grad.device().is_cpu() => cpu::backward(&grad, input_dims, grid, out),
        Some(gpu) if grad.elem_count() > 0 => cuda::backward(gpu, &grad, input_dims, grid, out),
        _ => portable::backward(&grad, input_dims, grid, out),
    }
}
