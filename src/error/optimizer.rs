//! Errors of optimizers and moving averages.

use candle_core::{DType, Shape};

/// An optimizer, or a moving average of weights, refuses a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimizerError {
    /// One variable in two parameter groups.
    #[error("{variable} is in two parameter groups: each variable belongs to one")]
    TwoGroups {
        /// The variable, by name where it has one.
        variable: String,
    },
    /// A remainder for a variable that is not BF16.
    #[error(
        "{variable} is {got:?}: only a BF16 number and 16 bits more make an F32 one; use \
         `Masters::F32` or `Masters::Stochastic`, or BF16 variables"
    )]
    Remainder {
        /// The variable, by name where it has one.
        variable: String,
        /// Its dtype.
        got: DType,
    },
    /// A choice that comes too late.
    #[error("`{call}` after the first step would lose state: call it when the optimizer is made")]
    AfterFirstStep {
        /// The method called.
        call: &'static str,
    },
    /// State of variables without names.
    #[error(
        "`{call}` needs the names of the variables: make it from `Parameters`, not from a list of \
         variables"
    )]
    Unnamed {
        /// The method called.
        call: &'static str,
    },
    /// A 16-bit variable was written after its master.
    #[error(
        "a 16-bit variable of shape {shape:?} was written after its master, which this step would put back in its \
         place: call `reload_masters` to go on from the variables, or `refresh` to go on from the masters"
    )]
    StaleMaster {
        /// Of the variable.
        shape: Shape,
    },
    /// Weights were written while a moving average was in their place.
    #[error(
        "`{name}` was written, by a step or a checkpoint, while the averages were in place of the weights: it has that \
         value now, and the weight from before is lost. Call `swap_out` before anything writes"
    )]
    WrittenMeanwhile {
        /// The first such variable.
        name: String,
    },
    /// A moving average of masters, which the model does not read.
    #[error(
        "`{name}` is a master of `MasterVars`, and the model reads a copy of it, which would not follow: make the \
         average by `Ema::of_masters`"
    )]
    AverageOfMasters {
        /// The first such variable.
        name: String,
    },
    /// A moving average is in place of the weights, where the weights are needed.
    #[error("`{call}` while the averages are in place of the weights: call `swap_out` first")]
    AveragesInPlace {
        /// The method called.
        call: &'static str,
    },
}
