//! Tensors in memory: copies in the order of their shape, where channels are, handles that keep nothing alive.

mod contiguous;
pub(crate) mod format;
mod handle;

pub(crate) use contiguous::{cat, contiguous};
pub(crate) use handle::WeakTensor;
