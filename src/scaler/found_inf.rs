//! The verdict on the gradients of a step.

use candle_core::Tensor;

/// Whether a gradient was not finite.
#[derive(Clone, Debug)]
pub(crate) enum FoundInf {
    Host(bool),
    /// One `U32` on a GPU, not zero where it was.
    Device(Tensor),
}
