//! What the steps of both networks share.

use candle_core::{Result, Tensor};

use super::gate::Gate;
use super::sequence::Dims;
use crate::kernels::contiguous;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::GRAIN;

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
