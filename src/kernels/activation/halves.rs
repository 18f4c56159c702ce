//! The dimensions of half of a tensor, split along its last dimension.

use candle_core::Tensor;

/// The dimensions of either half.
pub(super) fn half_dims(x: &Tensor) -> Vec<usize> {
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last /= 2;
    }
    dims
}
