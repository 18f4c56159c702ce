//! Sums out of candle's operators, for devices without kernels. Tests check the sums of channels against the same
//! values as `cpu.rs`.
//!
//! Elements are widened to F32 (F64 for F64) first, because a sum in 16 bits saturates. candle then adds them up in
//! that dtype, without the F64 sums of `cpu.rs`. The result is rounded once. For the sums of channels, `dim` changes
//! places with the first dimension, and the tensor becomes a matrix with a row for each channel.

use candle_core::{DType, Result, Tensor};

use crate::kernels::elementwise::portable::upcast;

pub(super) fn sum_all(x: &Tensor, out: DType) -> Result<Tensor> {
    upcast(x)?.sum_all()?.to_dtype(out)
}

pub(super) fn sum_to_channel(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    let rows = upcast(x)?.transpose(0, dim)?.reshape((x.dim(dim)?, ()))?;
    rows.sum(1)?.to_dtype(out)
}
