//! What can go wrong.

use std::fmt::Write;
use std::path::PathBuf;

use candle_core::{DType, DeviceLocation, Shape};

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error from this crate: what was asked, what was given, and what would do.
///
/// After one of this crate's own, nothing is half done. Gradients that overflow are *not* an error: a half-precision
/// run skips a step now and then by design, and [`StepOutcome`](crate::StepOutcome) says so.
///
/// Operators and layers return candle's error type, so that they fit where candle's do; it then
/// carries one of these. `?` converts either way.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Autocast to a dtype it has no meaning for.
    #[error(
        "autocast computes in F16, BF16 or F32, not in {got:?}; \
         for no autocast use `Autocast::disabled()`"
    )]
    ComputeDType {
        /// The dtype asked for.
        got: DType,
    },
    /// An operator that autocast refuses.
    #[error(
        "autocast to {dtype:?} refuses `{op}`: {reason}; or run it outside of the scope, or under a \
         policy with another rule for it"
    )]
    Banned {
        /// The operator.
        op: &'static str,
        /// Why it is refused, and what to use instead.
        reason: &'static str,
        /// The compute dtype of the scope.
        dtype: DType,
    },
    /// A loss in half precision, which cannot be multiplied by a useful scale.
    #[error(
        "`scale` was given a {got:?} loss: reduce the loss in F32 (the losses in `ops` do), because \
         F16 ends at 65504, below the scale itself, and a half-precision sum has already lost the \
         small terms; casting the finished loss to F32 is too late"
    )]
    HalfLoss {
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
    /// Back-propagation reached no variable.
    #[error(
        "no variable got a gradient: the loss depends on none, because its inputs were detached, \
         computed under `no_grad`, or went through an operator that cuts gradients (candle's fused \
         softmax, norms and rotary embedding do)"
    )]
    NoGradient,
    /// Back-propagation through a graph from before a step.
    #[error(
        "backward through what was computed from `{name}` before its last refresh: its old values \
         are gone, and the gradients would be wrong. Run the forward pass again after every step; \
         a tensor that a model computes from its variables once, when it is built, is not refreshed"
    )]
    StaleGraph {
        /// The variable.
        name: String,
    },
    /// A master was stepped, and the half tensor made of it is still the old one.
    #[error(
        "the master of `{name}` has been stepped, and the tensor that the model has was not rewritten from it: the \
         model would never change. Step `masters.bind(&mut optimizer)`, or call `masters.refresh()` after every step"
    )]
    NotRefreshed {
        /// The variable.
        name: String,
    },
    /// Back-propagation through an operator whose variable has been stepped since.
    #[error(
        "backward through `{op}`, whose input {input}, a variable or a view of one, of shape {shape:?}, an optimizer \
         has stepped since: its old values are gone, and the gradients would be wrong. Run the forward pass again \
         after every step, or go back through every loss of the graph before the first step"
    )]
    SteppedVariable {
        /// The operator.
        op: &'static str,
        /// The number of the input, from 0.
        input: usize,
        /// Of the variable.
        shape: Shape,
    },
    /// A loss goes back through an operator that a scaler's backward has freed.
    #[error(
        "`{op}` has gone back already, in the backward of a scaled loss, which frees what operators \
         keep: run the forward pass again, or let the first backward keep the graph, by \
         `scaler.scale(&loss)?.retain_graph().backward()`"
    )]
    GraphFreed {
        /// The operator.
        op: &'static str,
    },
    /// candle's backward reached a chain of operators that its recursion could not walk.
    #[error(
        "the graph below `{op}` is too deep for candle's recursive backward: run backward by \
         `scaler.scale(&loss)?.backward()?`, which does not recurse through this crate's operators (with candle's \
         operators in between it does), or split the chain"
    )]
    GraphTooDeep {
        /// The operator.
        op: &'static str,
    },
    /// A backward pass that a candle operator runs within its own, while a scaler collects gradients.
    #[error(
        "backward reached `{op}`, which is not in the graph of the scaled loss: an operator of \
         candle's (`CustomOp`) runs a backward pass within its own, whose gradients the scaler would \
         collect; implement `autograd::Operator` instead, whose backward may do so"
    )]
    NestedBackward {
        /// The operator.
        op: &'static str,
    },
    /// A gradient that is to be differentiated again, of an operator whose gradient is a kernel.
    #[error(
        "candle keeps the graph of gradients (CANDLE_GRAD_DO_NOT_DETACH is set), but that of `{op}` \
         is a kernel's, and would count as a constant: a loss with gradients in it, such as a \
         gradient penalty, needs candle's own operators where it is differentiated twice; the last \
         pass, whose gradients are not differentiated again, goes through \
         `scaler.scale(&loss)?.backward()`"
    )]
    SecondOrder {
        /// The operator.
        op: &'static str,
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
    /// `update` with nothing checked for overflow.
    #[error("`update` has nothing to go by: call `step` or `unscale` first")]
    NothingChecked,
    /// A change of state while gradients made under the old one are in flight.
    #[error(
        "`{call}` between `backward` and `update` would mix two scales, and lose the gradients collected: call \
         `update` first, or `forget` to give them up"
    )]
    GradientsInFlight {
        /// The method called.
        call: &'static str,
    },
    /// A setting outside its range.
    #[error("{name} is {got}, expected {expected}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// The value given.
        got: f64,
        /// The values that would do.
        expected: &'static str,
    },
    /// Two settings that contradict each other.
    #[error("{low_name} {low} is above {high_name} {high}")]
    Order {
        /// The setting that should be lower.
        low_name: &'static str,
        /// Its value.
        low: f64,
        /// The setting that should be higher.
        high_name: &'static str,
        /// Its value.
        high: f64,
    },
    /// Shapes that do not fit an operator or each other.
    #[error("{op}: {name} has shape {got:?}, expected {expected}")]
    Shape {
        /// The operator.
        op: &'static str,
        /// The argument at fault.
        name: &'static str,
        /// Its shape.
        got: Shape,
        /// What would do.
        expected: String,
    },
    /// A dtype an operator does not take.
    #[error("{op}: {name} is {got:?}, expected {expected}")]
    DType {
        /// The operator.
        op: &'static str,
        /// The argument at fault.
        name: &'static str,
        /// Its dtype.
        got: DType,
        /// What would do.
        expected: String,
    },
    /// Arguments on different devices.
    #[error("{op}: {name} is on {got:?} and the first argument on {expected:?}: move one of them")]
    Device {
        /// The operator.
        op: &'static str,
        /// The argument at fault.
        name: &'static str,
        /// Its device.
        got: DeviceLocation,
        /// The device of the first argument.
        expected: DeviceLocation,
    },
    /// An operator's backward gave the wrong number of gradients.
    #[error("backward of `{op}` returned {got} gradients for {expected} inputs")]
    GradientCount {
        /// The operator.
        op: &'static str,
        /// Gradients returned.
        got: usize,
        /// Inputs of the operator.
        expected: usize,
    },
    /// An operator's backward gave a gradient of another shape than its input's.
    #[error(
        "backward of `{op}` returned a gradient of shape {got:?} for input {input}, which has {expected:?}"
    )]
    GradientShape {
        /// The operator.
        op: &'static str,
        /// The number of the input, from 0.
        input: usize,
        /// Of the gradient.
        got: Shape,
        /// Of the input.
        expected: Shape,
    },
    /// One name for two variables.
    #[error("parameter name `{name}` appears twice: names must be unique")]
    DuplicateName {
        /// The name.
        name: String,
    },
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
    /// Averages in place of the weights, where the weights are needed.
    #[error("`{call}` while the averages are in place of the weights: call `swap_out` first")]
    AveragesInPlace {
        /// The method called.
        call: &'static str,
    },
    /// A saved state that does not fit.
    #[error("cannot load the state: {name} is {got}, expected {expected}")]
    State {
        /// What of the state.
        name: String,
        /// What was found.
        got: String,
        /// What would do.
        expected: String,
    },
    /// A file or folder that the system does not let be written or read.
    #[error("{action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file that is no whole checkpoint of this crate.
    #[error("{} is not a whole checkpoint: {fault}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What shows it.
        fault: String,
    },
    /// A checkpoint of another version of the format.
    #[error(
        "{} is a checkpoint of version {got}, written by candle-amp {by}; this candle-amp reads \
         version {supported}",
        path.display()
    )]
    CheckpointVersion {
        /// The file.
        path: PathBuf,
        /// Its version.
        got: u64,
        /// The version of the crate that wrote it.
        by: String,
        /// The version that can be read.
        supported: u32,
    },
    /// A checkpoint without a part that is asked for.
    #[error("the checkpoint has no part `{name}`, but {found:?}")]
    NoPart {
        /// The part.
        name: String,
        /// Those there are.
        found: Vec<String>,
    },
    /// A name that a part of a checkpoint cannot have.
    #[error("a part of a checkpoint cannot be called `{name}`: give it another name, without dots")]
    PartName {
        /// The name.
        name: String,
    },
    /// A saved state that does not fit what it is loaded into.
    #[error("the saved state{} does not fit:{}", of_part(part), lists(missing, extra, wrong))]
    Mismatch {
        /// The part of a checkpoint; empty where it is not known.
        part: String,
        /// What it lacks.
        missing: Vec<String>,
        /// What it has too much.
        extra: Vec<String>,
        /// What has another shape, dtype or kind, and which.
        wrong: Vec<String>,
    },
    /// A checkpoint of an earlier step than those in its folder.
    #[error(
        "{} has a checkpoint of step {latest}, and this one is of step {step}: use another folder, \
         or call `discard_after` first",
        folder.display()
    )]
    StepBehind {
        /// The folder.
        folder: PathBuf,
        /// The step to save.
        step: u64,
        /// The last step there.
        latest: u64,
    },
    /// A weight that a half format cannot hold.
    #[error("`{name}` has {count} elements that F16 would make infinite, beyond 65504: use BF16")]
    TooLarge {
        /// The variable.
        name: String,
        /// How many of its elements.
        count: u64,
    },
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// The same error, knowing the part of a checkpoint it is about.
    pub(crate) fn in_part(self, name: &str) -> Self {
        match self {
            Self::Mismatch { missing, extra, wrong, .. } => {
                Self::Mismatch { part: name.to_owned(), missing, extra, wrong }
            }
            other => other,
        }
    }
}

fn of_part(part: &str) -> String {
    if part.is_empty() { String::new() } else { format!(" of `{part}`") }
}

/// A line for each list that has something in it.
fn lists(missing: &[String], extra: &[String], wrong: &[String]) -> String {
    /// As many as a terminal shows.
    const SHOWN: usize = 20;
    let mut text = String::new();
    for (title, list) in [("missing", missing), ("too many", extra), ("different", wrong)] {
        if !list.is_empty() {
            let shown = list[..list.len().min(SHOWN)].join(", ");
            let _ = write!(text, "\n  {title}: {shown}");
        }
        if list.len() > SHOWN {
            let _ = write!(text, " and {} more", list.len() - SHOWN);
        }
    }
    text
}

/// So that `?` works inside candle's traits.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            other => candle_core::Error::wrap(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_message_through_candle_and_back() {
        fn ours() -> Result<()> {
            Err(Error::NothingChecked)
        }
        fn theirs() -> candle_core::Result<()> {
            Ok(ours()?)
        }
        fn back() -> Result<()> {
            Ok(theirs()?)
        }
        let message = back().unwrap_err().to_string();
        assert!(message.contains("call `step` or `unscale` first"), "{message}");
    }
}
