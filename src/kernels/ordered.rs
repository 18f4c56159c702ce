//! What candle's own kernels do for this crate, in order with what other threads launch on a GPU.

use candle_core::{Device, Result, Tensor};

use super::cuda::Gpu;
use super::tensors;

/// Runs `f`, in which candle launches kernels on `device`: after what other threads have launched, which then wait for it.
pub(crate) fn ordered<T>(device: &Device, f: impl FnOnce() -> Result<T>) -> Result<T> {
    match Gpu::of(device) {
        Some(gpu) => gpu.ordered(f),
        None => f(),
    }
}

/// `x`, detached and contiguous: itself, where it is.
pub(crate) fn contiguous(x: &Tensor) -> Result<Tensor> {
    if x.is_contiguous() {
        return tensors::contiguous(x);
    }
    ordered(x.device(), || tensors::contiguous(x))
}

/// `parts`, one after the other along `dim`; of one dtype and, but for `dim`, one shape.
pub(crate) fn cat(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    match parts.first() {
        Some(first) => ordered(first.device(), || tensors::cat(parts, dim)),
        None => tensors::cat(parts, dim),
    }
}
