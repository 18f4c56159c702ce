//! Errors of the scaler.

use candle_core::{DType, Shape};

/// A call of [`GradScaler`](crate::GradScaler) is out of order, or its loss does not fit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScalerError {
    /// A 16-bit loss, which cannot be multiplied by a useful scale.
    #[error(
        "`scale` was given a {got:?} loss: reduce the loss in F32 (the losses in `ops` do), because \
         F16 ends at 65504, below the scale itself, and a 16-bit sum has already lost its small \
         terms; casting the finished loss to F32 is too late"
    )]
    LossDType {
        /// The dtype of the loss.
        got: DType,
    },
    /// A loss that is not one number.
    #[error(
        "`scale` was given a loss of shape {got:?}: reduce it to one number, by a mean or a sum"
    )]
    LossShape {
        /// The shape of the loss.
        got: Shape,
    },
    /// A call that needs gradients came before there were any.
    #[error("`{call}` has no gradients to work on: call `scaler.scale(&loss)?.backward()?` first")]
    NoBackward {
        /// The method called.
        call: &'static str,
    },
    /// The optimizer's variables got no gradient, though others did.
    #[error(
        "none of this optimizer's {variables} variables has a gradient: the losses given to \
         `backward` since the last `update` do not depend on them"
    )]
    NoGradientForOptimizer {
        /// How many variables the optimizer has.
        variables: usize,
    },
    /// A second step before `update`.
    #[error("this optimizer was already stepped since the last `update`: call `scaler.update()?`")]
    AlreadyStepped,
    /// A second optimizer of unknown variables before `update`.
    #[error(
        "an optimizer that keeps its variables to itself was already stepped since the last \
         `update`, and was given every gradient: for several optimizers in one iteration wrap each, \
         in `MasterWeights` or with `parameters.bind(&mut optimizer)`"
    )]
    SecondForeignStep,
    /// A gradient of weights that are not there any more.
    #[error(
        "a variable of shape {shape:?} was written (by a checkpoint that was loaded, for one) after its gradient was \
         computed, which is of the old value: call `zero_grad`, and run forward and backward again"
    )]
    StaleGradient {
        /// Of the variable.
        shape: Shape,
    },
    /// `update` with nothing checked for overflow.
    #[error("`update` found no checked gradients: call `step` or `unscale` first")]
    NothingChecked,
    /// A change of state while gradients of the old scale wait for `update`.
    #[error(
        "`{call}` between `backward` and `update` would mix two scales, and lose the gradients collected: call \
         `update` first, or `zero_grad` to drop them"
    )]
    PendingGradients {
        /// The method called.
        call: &'static str,
    },
}
