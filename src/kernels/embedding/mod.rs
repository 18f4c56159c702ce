//! Rows of a table by number, and the gradient back into the table.
//!
//! Numbers are U32, `(n)`, contiguous, and each names a row.

mod cpu;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::elementwise::plain;

/// The rows of `table` `(rows, d)`: `(n, d)`, in its dtype.
pub(crate) fn gather(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    let table = plain(table)?;
    if table.device().is_cpu() { cpu::gather(ids, &table) } else { portable::gather(ids, &table) }
}

/// The sums of the rows of `grad` `(n, d)` with one number: `(rows, d)`, in `out`.
///
/// Added up in F32 (F64 for F64), 64 rows at a time and those in F64, in the order of the rows.
pub(crate) fn scatter_add(ids: &Tensor, grad: &Tensor, rows: usize, out: DType) -> Result<Tensor> {
    let grad = plain(grad)?;
    if grad.device().is_cpu() {
        cpu::scatter_add(ids, &grad, rows, out)
    } else {
        portable::scatter_add(ids, &grad, rows, out)
    }
}
