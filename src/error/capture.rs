//! Errors of a step that is captured as a CUDA graph.

use candle_core::{DType, Shape};

/// A step cannot be captured or replayed as a CUDA graph. Nothing has changed: weights, optimizer, scaler and random
/// generator are as they were before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CaptureError {
    /// Inputs of other shapes or dtypes than those of the first step.
    #[error(
        "this step takes inputs of {}, as in its first run, and is given {}: a graph repeats one shape; drop or pad \
         the last batch, run it by `eager`, or make a `GraphedStep` for each shape",
        list(expected),
        list(got)
    )]
    Inputs {
        /// Of the first run.
        expected: Vec<(Shape, DType)>,
        /// Of this one.
        got: Vec<(Shape, DType)>,
    },
    /// Something in the step cannot be captured.
    #[error(
        "the step cannot be captured as a CUDA graph: {0}. Nothing in it may read from the device, wait for it, or \
         upload numbers that change (`to_scalar`, `to_vec1`, `Tensor::new` of a new batch): hand these in as inputs, \
         or run the step by `eager`"
    )]
    Refused(String),
    /// An optimizer that runs on the host.
    #[error(
        "a captured step cannot run this optimizer: candle's, `MasterWeights` and `MasterVars` work out each step on \
         the host, and a graph would repeat the first; use one of `optim`"
    )]
    HostOptimizer,
    /// A second optimizer step.
    #[error(
        "a captured step has one optimizer, which `run` is given, and the function takes a second step: step it \
         outside, or run the step by `eager`"
    )]
    SecondStep,
    /// A moving average within the step.
    #[error(
        "a captured step cannot update a moving average, whose share changes from step to step: call `Ema::update` \
         after `run`"
    )]
    Average,
    /// The function does something else than before.
    #[error(
        "the captured step does not match its rehearsal: it draws more random numbers than in the rehearsal, returns \
         something else, or makes state of the optimizer; its function must do the same every time"
    )]
    Differs,
    /// The function seeds the generator.
    #[error(
        "the step seeds the random generator, so that every replay would have to draw the same numbers: call \
         `random::manual_seed` outside"
    )]
    Reseeded,
    /// A device with one stream for all threads.
    #[error(
        "all threads share the stream of this device, made by `Device::new_cuda_with_stream`, so that a capture would record \
         what others launch, and could not wait for the events of tensors made before: use `Device::new_cuda`"
    )]
    Events,
}

fn list(inputs: &[(Shape, DType)]) -> String {
    let one = |(shape, dtype): &(Shape, DType)| format!("{dtype:?} {:?}", shape.dims());
    inputs.iter().map(one).collect::<Vec<_>>().join(", ")
}
