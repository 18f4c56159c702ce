//! Masks that are repeated to the shape of the scores: one of each, and the sum of gradients over all.

use candle_core::{Result, Tensor};

/// `x` detached, and one index of each dimension that is repeated.
pub(super) fn unrepeated(x: &Tensor) -> Result<Tensor> {
    let mut once = x.detach();
    for (dim, (&stride, &size)) in x.stride().iter().zip(x.dims()).enumerate() {
        if stride == 0 && size > 1 {
            once = once.narrow(dim, 0, 1)?;
        }
    }
    Ok(once)
}

/// The sum of `x` over what was repeated to get its shape from `dims`.
pub(super) fn sum_to(x: Tensor, dims: &[usize]) -> Result<Tensor> {
    let extra = x.rank() - dims.len();
    let mut sum = x;
    for dim in 0..sum.rank() {
        if (dim < extra || dims[dim - extra] == 1) && sum.dim(dim)? != 1 {
            sum = sum.sum_keepdim(dim)?;
        }
    }
    sum.reshape(dims)
}
