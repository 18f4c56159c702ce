//! Rows of a table by number, and the gradient back into the table.
//!
//! Numbers are U32, `(n)`, contiguous, and each names a row. On a GPU, where nobody looks, one that
//! names none reads NaN and gets no gradient.

mod cpu;
mod cuda;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::contiguous;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// `ids`, U8, U32 or I64, as U32: contiguous, of one shape. On a GPU what does not fit becomes the
/// largest U32; elsewhere it has been looked for.
pub(crate) fn numbers(ids: &Tensor) -> Result<Tensor> {
    let ids = contiguous(ids)?;
    match Gpu::of(ids.device()) {
        Some(gpu) if ids.dtype() != DType::U32 => cuda::numbers(gpu, &ids),
        _ => ids.to_dtype(DType::U32),
    }
}

/// The rows of `table` `(rows, d)`: `(n, d)`, in its dtype.
pub(crate) fn gather(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    let table = plain(table)?;
    if let Some(gpu) = Gpu::of(table.device()) {
        return cuda::gather(gpu, ids, &table);
    }
    if table.device().is_cpu() { cpu::gather(ids, &table) } else { portable::gather(ids, &table) }
}

/// The sums of the rows of `grad` `(n, d)` with one number: `(rows, d)`, in `out`.
///
/// Added up in F32 (F64 for F64), at most 64 rows at a time and those in F64, in an order that is the same every time.
pub(crate) fn scatter_add(ids: &Tensor, grad: &Tensor, rows: usize, out: DType) -> Result<Tensor> {
    let grad = plain(grad)?;
    if let Some(gpu) = Gpu::of(grad.device()) {
        return cuda::scatter_add(gpu, ids, &grad, rows, out);
    }
    if grad.device().is_cpu() {
        cpu::scatter_add(ids, &grad, rows, out)
    } else {
        portable::scatter_add(ids, &grad, rows, out)
    }
}
