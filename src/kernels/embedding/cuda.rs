//! Embedding lookup and its gradient on CUDA; the kernels are in `embedding.cu`.
//!
//! The lookup is one launch. The gradient clears its result and takes up to three launches for [`SORTED`] ids. They
//! sort the positions of the ids by id, sum the gradient's rows of each id, and join sums that reach over several
//! pieces. No launch uses atomics, so each sum has one order.
//!
//! The sort compares every id with every other, so more ids are sorted [`SORTED`] at a time. All add to one result. It
//! then has the dtype of the arithmetic and is cast at the end: 16 bits would be rounded after each sort.

use candle_core::{DType, Result, Tensor};

use crate::error::bail;
use crate::kernels::accumulator;
use crate::kernels::cuda::{Gpu, Grid, Source, pack, suffix};
use crate::kernels::elementwise::cuda::in_dtype;

static SOURCE: Source = Source { name: "embedding", code: include_str!("embedding.cu") };

/// Numbers that are sorted at a time: each is compared with all of them, and beyond some ten thousand
/// that takes longer than to read and write the rows.
const SORTED: usize = 1 << 14;

pub(super) fn gather(gpu: &Gpu, ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    let ((rows, d), n, dtype) = (table.dims2()?, ids.elem_count(), table.dtype());
    let y = gpu.empty((n, d), dtype)?;
    // Element `i < n * d` of `y`, and rows of the table that are before `rows`.
    gpu.launch(&SOURCE, ["gather", suffix(dtype)?])?
        .write_new(&y)?
        .read(ids)?
        .read(table)?
        .sizes(&[n, rows, d])
        .run(Grid::over(n * d, pack(dtype, dtype)))?;
    Ok(y)
}

/// Places in their order, of one number or several, that a warp adds up, as in the source.
const PIECE: usize = 64;

/// See [`super::scatter_add`]; up to three launches for each [`SORTED`] ids, and zeros before them. However often a number comes, nobody adds up more
/// than [`PIECE`] rows, or an eighth of as many sums as there are pieces.
pub(super) fn scatter_add(
    gpu: &Gpu,
    ids: &Tensor,
    grad: &Tensor,
    rows: usize,
    out: DType,
) -> Result<Tensor> {
    let ((n, d), dtype) = (grad.dims2()?, grad.dtype());
    // Sums of several sorts meet in the dtype of the arithmetic.
    let sums = if n > SORTED { accumulator(dtype) } else { out };
    let y = in_dtype(dtype, sums, |out| {
        let y = gpu.zeros((rows, d), out)?;
        for first in (0..n).step_by(SORTED) {
            let len = SORTED.min(n - first);
            let (ids, grad) = (ids.narrow(0, first, len)?, grad.narrow(0, first, len)?);
            let order = gpu.empty(len, DType::U32)?;
            // A thread for each place; the counts of all are a permutation of those before `len`.
            let launch = gpu.launch(&SOURCE, "sort_places")?.write(&order)?.read(&ids)?;
            launch.size(len).run(Grid::over(len, 1))?;
            let pieces = len.div_ceil(PIECE);
            let parts = gpu.empty((pieces, 2, d), DType::F64)?;
            let each = if d.is_multiple_of(pack(dtype, dtype)) { pack(dtype, dtype) } else { 1 };
            // Places before `len`, rows before `rows`, and columns before `d`, of all three.
            gpu.launch(&SOURCE, ["scatter_add", suffix(dtype)?, suffix(out)?])?
                .write_new(&y)?
                .write(&parts)?
                .read(&order)?
                .read(&ids)?
                .read(&grad)?
                .sizes(&[len, rows, d])
                .run(Grid::over(32 * pieces * d.div_ceil(32 * each), 1))?;
            if pieces == 1 {
                continue; // nothing reaches into another
            }
            gpu.launch(&SOURCE, ["join_parts", suffix(dtype)?, suffix(out)?])?
                .write_new(&y)?
                .read(&parts)?
                .read(&order)?
                .read(&ids)?
                .sizes(&[len, rows, d])
                .run(Grid::flat(pieces * d.div_ceil(32), 256))?;
        }
        Ok(y)
    })?;
    if sums == out { Ok(y) } else { crate::kernels::cast(&y, out) }
}

/// See [`super::numbers`].
pub(super) fn numbers(gpu: &Gpu, ids: &Tensor) -> Result<Tensor> {
    let (y, n) = (gpu.empty(ids.shape(), DType::U32)?, ids.elem_count());
    let name = match ids.dtype() {
        DType::I64 => "numbers_i64",
        DType::U8 => "numbers_u8",
        other => bail!("expected numbers of U8, U32 or I64, got {other:?}"),
    };
    gpu.launch(&SOURCE, name)?.write_new(&y)?.read(ids)?.size(n).run(Grid::over(n, 1))?;
    Ok(y)
}
