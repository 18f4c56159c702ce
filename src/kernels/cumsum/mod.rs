//! Cumulative sums along a dimension, from its start or from its end.
//!
//! Any float dtype in; added up in F64; each sum is rounded to F32, except in F64, and then to its dtype. On devices that the
//! crate has no kernels for, sums are F32 (F64 for F64).

mod cpu;
mod cuda;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// The sums of the elements up to each one along `dim`, or, `from_end`, of those from each one on: in `out`.
pub(crate) fn cumsum(x: &Tensor, dim: usize, from_end: bool, out: DType) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return super::cast(x, out);
    }
    let x = plain(x)?;
    match Gpu::of(x.device()) {
        Some(gpu) => cuda::cumsum(gpu, &x, dim, from_end, out),
        None if x.device().is_cpu() => cpu::cumsum(&x, dim, from_end, out),
        None => portable::cumsum(&x, dim, from_end, out),
    }
}
