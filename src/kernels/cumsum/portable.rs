use candle_core::{DType, Result, Tensor};

use crate::kernels;
use crate::kernels::elementwise::portable::upcast;

/// Adds to each element the one 1, 2, 4, … places before it: as many passes as the length has bits.
///
/// A product with a triangle of ones would give NaN wherever an infinity meets a zero.
pub(super) fn cumsum(x: &Tensor, dim: usize, from_end: bool, out: DType) -> Result<Tensor> {
    let mut y = upcast(x)?.transpose(0, dim)?.contiguous()?;
    let (count, mut step) = (x.dim(dim)?, 1);
    while step < count {
        let (first, last) = (y.narrow(0, 0, count - step)?, y.narrow(0, step, count - step)?);
        let sums = (first + last)?;
        y = match from_end {
            false => Tensor::cat(&[&y.narrow(0, 0, step)?, &sums], 0)?,
            true => Tensor::cat(&[&sums, &y.narrow(0, count - step, step)?], 0)?,
        };
        step *= 2;
    }
    kernels::cast(&y.transpose(0, dim)?, out)
}
