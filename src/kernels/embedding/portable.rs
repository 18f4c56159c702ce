//! Embedding lookup and its gradient out of candle's operators, for devices without kernels. Tests check the gradient
//! against the same values as `cpu.rs`.
//!
//! The lookup is an `index_select` in the dtype of the table. The gradient starts from zeros for every row of the
//! table, and `index_add` adds each row of `grad` to the row of its id. That is in F32 (F64 for F64) and cast at the
//! end: in 16 bits, each addition would be rounded.

use candle_core::{DType, Result, Tensor};

use crate::kernels::elementwise::portable::upcast;

pub(super) fn gather(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    table.index_select(ids, 0)
}

pub(super) fn scatter_add(ids: &Tensor, grad: &Tensor, rows: usize, out: DType) -> Result<Tensor> {
    let grad = upcast(grad)?.contiguous()?;
    let zeros = Tensor::zeros((rows, grad.dim(1)?), grad.dtype(), grad.device())?;
    zeros.index_add(ids, &grad, 0)?.to_dtype(out)
}
