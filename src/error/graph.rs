//! Errors of backward.

use candle_core::Shape;

/// Backward cannot run, or would give wrong gradients.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// Backward reached no variable.
    #[error(
        "no variable got a gradient: the loss depends on none, because its inputs were detached, \
         computed under `no_grad`, or went through an operator that cuts gradients (candle's fused \
         softmax, norms and rotary embedding do), or because all that it depends on is frozen"
    )]
    NoGradient,
    /// Backward through a graph whose variable was rewritten from its master since.
    #[error(
        "backward through what was computed from `{name}` before its last refresh: its old values \
         are gone, and the gradients would be wrong. Run the forward pass again after every step, and `detach` what \
         one iteration hands to the next, such as the state of a recurrent layer; \
         a tensor that a model computes from its variables once, when it is built, is not refreshed"
    )]
    Stale {
        /// The variable.
        name: String,
    },
    /// An optimizer stepped a master, and nothing rewrote the 16-bit tensor that the model reads.
    #[error(
        "an optimizer has stepped the master of `{name}`, and the tensor that the model reads was not rewritten \
         from it: the model would never change. Step `masters.bind(&mut optimizer)`, or call `masters.refresh()` \
         after every step"
    )]
    NotRefreshed {
        /// The variable.
        name: String,
    },
    /// Backward through an operator whose variable was written in place since its forward pass. An optimizer's
    /// step writes it, or an average that takes its place, or a checkpoint that is loaded.
    #[error(
        "backward through `{op}`, whose input {input}, a variable or a view of one, of shape {shape:?}, was written in \
         place since (by an optimizer's step, for one): its old values are gone, and the gradients would be wrong. Run \
         the forward pass again after every step, and `detach` what one iteration hands to the next, such as the state \
         of a recurrent layer; or run backward through every loss of the graph before the first step"
    )]
    Modified {
        /// The operator.
        op: &'static str,
        /// The number of the input, from 0.
        input: usize,
        /// Of the variable.
        shape: Shape,
    },
    /// Backward through an operator whose saved tensors an earlier backward of a scaled loss has freed.
    #[error(
        "`{op}` has run backward already, for a scaled loss, and what it had saved is freed: run the forward pass \
         again, and `detach` what one iteration hands to the next, such as the state of a recurrent layer; or let the \
         first backward keep the graph, by `scaler.scale(&loss)?.retain_graph().backward()`"
    )]
    Freed {
        /// The operator.
        op: &'static str,
    },
    /// A checkpoint whose function read what was written in place since.
    #[error(
        "backward through `checkpoint`, whose function read a tensor that was written in place since: recomputed, it \
         would be another function. Run the forward pass again after every step"
    )]
    Recomputed,
    /// A checkpoint whose function did something else when it was computed again.
    #[error(
        "backward through `checkpoint`, whose function had {second} when it was computed again, and {first} the first \
         time: it must do the same both times"
    )]
    Differs {
        /// What it had the first time.
        first: String,
        /// What it had the second time.
        second: String,
    },
    /// Recursion that would end the stack: candle's backward through a chain of operators, or checkpoints whose functions
    /// captured one another's results.
    #[error(
        "the graph below `{op}` is too deep to recurse through: run backward by `scaler.scale(&loss)?.backward()?`, \
         which recurses only through candle's own operators; and hand what a checkpoint's function needs in as its \
         argument"
    )]
    TooDeep {
        /// The operator.
        op: &'static str,
    },
    /// A backward pass that a candle operator runs inside its own, while a scaler collects gradients.
    #[error(
        "backward reached `{op}`, which is not in the graph of the scaled loss: one of candle's operators \
         (`CustomOp`) runs a backward pass inside its own, whose gradients the scaler would collect; implement \
         `autograd::Operator` instead, whose backward may do so"
    )]
    Nested {
        /// The operator.
        op: &'static str,
    },
    /// A gradient that is to be differentiated again, of an operator whose gradient a kernel computes.
    #[error(
        "candle keeps the graph of gradients (CANDLE_GRAD_DO_NOT_DETACH is set), but a kernel computes that of \
         `{op}`, which would count as a constant: a loss with gradients in it, such as a gradient penalty, needs \
         candle's own operators where it is differentiated twice; run the last backward pass, whose gradients are \
         not differentiated again, by `scaler.scale(&loss)?.backward()`"
    )]
    SecondOrder {
        /// The operator.
        op: &'static str,
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
}
