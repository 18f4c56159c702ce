//! What a step is given for each variable, and the flag by which a GPU skips the step.

use candle_core::Tensor;

use super::rule::Rule;
use crate::kernels::multi_tensor::multiplier::Multiplier;

/// Where the exact value of a variable is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Master<'a> {
    /// In an `F32` or `F64` variable.
    Itself,
    /// In an `F32` tensor; the variable is that, rounded to nearest even.
    Full(&'a Tensor),
    /// In the variable, `BF16`, and an `I16` tensor: what [`split`](super::rounding::split) makes.
    Remainder(&'a Tensor),
    /// Nowhere: the 16-bit variable is rounded at random.
    Stochastic,
}

/// A variable, what belongs to it, and what to do with it.
///
/// All tensors have its shape and device, are contiguous, and have a storage each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot<'a> {
    pub(crate) variable: &'a Tensor,
    pub(crate) master: Master<'a>,
    /// In the order the rule names them, `F32` (`F64` for `F64` variables) or `BF16`, which is
    /// rounded at random. Rounded to nearest, a second moment would stop at a size where a
    /// thousandth of it is below the last bit.
    pub(crate) states: &'a [Tensor],
    /// `F64` for an `F64` variable, else `F32`, `F16` or `BF16`.
    pub(crate) gradient: &'a Tensor,
    /// What the gradient is multiplied by, where it is read.
    pub(crate) by: &'a Multiplier,
    pub(crate) rule: Rule,
    /// Of the random bits, different for every tensor and step.
    pub(crate) seed: u64,
}

/// What a GPU skips of an optimizer's steps, and has skipped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Skip<'a> {
    /// One `U32`: this step is skipped where it is not zero. Without, it is taken.
    pub(crate) flag: Option<&'a Tensor>,
    /// `U32`, one for each variable of the optimizer: its steps that were skipped. They are counted
    /// here, and taken off [`Rule`]'s number of the step.
    pub(crate) counts: &'a Tensor,
    /// Where in `counts` each slot's is.
    pub(crate) places: &'a [usize],
}
