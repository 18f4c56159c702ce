//! What the steps of both networks share.

use candle_core::{Result, Tensor};

use super::Dims;
use super::gate::Gate;
use super::recurrent::Recurrent;
use crate::kernels::contiguous;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::GRAIN;
use crate::kernels::gemm::Matrix;

/// Units of a state whose gates are worth another thread.
const UNITS: usize = GRAIN / 8;

/// A tensor's elements, contiguous, in the type of the arithmetic.
pub(super) fn widened<A: Gate>(tensor: &Tensor) -> Result<Vec<A>> {
    let tensor = contiguous(tensor)?;
    let mut data = vec![A::zero(); tensor.elem_count()];
    A::open(&tensor)?.widen(0, &mut data);
    Ok(data)
}

/// Calls `f` for the rows of a batch, on several threads where that is worth it, and they do not have `others` to do.
pub(super) fn for_each_row<I: Send>(
    dims: Dims,
    others: bool,
    rows: impl Iterator<Item = I>,
    f: impl Fn(I) + Sync + Send,
) {
    if others || dims.batch * dims.hidden < 2 * UNITS {
        rows.for_each(f);
    } else {
        let (mut rows, few) = (rows.peekable(), UNITS.div_ceil(dims.hidden));
        let tasks = std::iter::from_fn(|| {
            rows.peek().is_some().then(|| rows.by_ref().take(few).collect::<Vec<I>>())
        });
        parallel::for_each_item(tasks, |rows| rows.into_iter().for_each(&f));
    }
}

/// `N` neighbouring runs of `len` elements: those of the gates of a row.
#[inline(always)]
pub(super) fn runs<const N: usize, T>(row: &[T], len: usize) -> [&[T]; N] {
    std::array::from_fn(|i| &row[i * len..][..len])
}

/// As [`runs`], to write.
#[inline(always)]
pub(super) fn runs_mut<const N: usize, T>(row: &mut [T], len: usize) -> [&mut [T]; N] {
    let mut rest = row;
    std::array::from_fn(|_| {
        let (run, after) = std::mem::take(&mut rest).split_at_mut(len);
        rest = after;
        run
    })
}

/// `dst += state × weight` of one step: `dst` holds all `gates` of all steps, `(b, t, gates)`, and
/// `weight` is `(n, gates)`.
pub(super) fn add_recurrent<A: Gate>(
    state: &[A],
    weight: &dyn Recurrent<A>,
    (dst, gates): (&mut [A], usize),
    step: usize,
    dims: Dims,
) {
    let state = Matrix::new(state, dims.batch, dims.hidden);
    weight.multiply(state, &mut dst[step * gates..], dims.steps * gates, true);
}

/// `dst (b, n) = gate_gradients × weight` of one step, or `+=`: `gate_gradients` holds those of all `gates` of all
/// steps, `(b, t, gates)`, and `weight` is `(gates, n)`.
pub(super) fn recurrent_gradient<A: Gate>(
    (gate_gradients, gates): (&[A], usize),
    weight: &dyn Recurrent<A>,
    dst: &mut [A],
    step: usize,
    accumulate: bool,
    dims: Dims,
) {
    let gate_gradients = Matrix {
        data: &gate_gradients[step * gates..],
        rows: dims.batch,
        cols: gates,
        row_stride: dims.steps * gates,
        col_stride: 1,
    };
    weight.multiply(gate_gradients, dst, dims.hidden, accumulate);
}
