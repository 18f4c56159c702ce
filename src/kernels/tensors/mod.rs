//! Tensors in memory: copies in the order of their shape, where channels are, handles that keep nothing alive.

mod contiguous;
pub(crate) mod format;
mod handle;

use candle_core::Tensor;

pub(crate) use contiguous::{cat, contiguous};
pub(crate) use handle::WeakTensor;

/// Elements that a slice can have, of any dtype.
pub(crate) const MOST_ELEMENTS: usize = isize::MAX as usize / 8;

/// Where a tensor's storage is: the same for its views, and as long as it lives.
pub(crate) fn place(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}
