#![doc = include_str!("../README.md")]

mod autocast;
mod checkpoints;
mod cudnn;
mod error;
mod gradients;
mod held;
mod histogram;
mod history;
mod kernels;
mod live_scale;
mod master;
mod memory;
pub mod nn;
pub mod operator;
pub mod ops;
pub mod optim;
mod outcome;
mod overflow;
mod parameters;
mod policy;
pub mod random;
mod recompute;
mod scale;
mod scaler;
mod step;
mod tf32;
mod trace;
mod watch;
mod workers;

#[cfg(test)]
mod device_tests;

/// How often this thread has waited for a CUDA device, to read from it in this crate; 0 without the
/// feature `cuda`. candle's own reads (`to_scalar`, `to_vec1`) are not among them.
///
/// A training step with the crate's optimizers waits for nothing: the number stays as it is, until
/// somebody asks for [`StepOutcome::skipped`] or the scale.
pub fn device_reads() -> u64 {
    kernels::cuda::reads()
}

pub use autocast::{Autocast, AutocastGuard, clear_cast_cache};
pub use checkpoints::{Best, Checkpoint, Checkpointer, SavedCheckpoint, State, Stateful};
pub use cudnn::{
    cudnn_benchmark, cudnn_f32_weight_gradients, set_cudnn_benchmark,
    set_cudnn_f32_weight_gradients,
};
pub use error::{Error, Result};
pub use histogram::{Exponents, F16Fit, GradientHistogram};
pub use history::{ScaleHistory, ScaleStep};
pub use master::{
    AsCandle, MasterVars, MasterWeights, MissingGradients, MissingReason, Refreshing,
};
pub use memory::keep_memory;
pub use operator::{NoGradGuard, no_grad, no_grad_guard};
pub use outcome::StepOutcome;
pub use overflow::{NonFinite, OverflowReport};
pub use parameters::Parameters;
pub use policy::{Cast, Op, Policy};
pub use recompute::checkpoint;
pub use scale::{LossScale, ScaleConfig};
pub use scaler::{GradScaler, ScaledLoss};
pub use step::{Bound, Gradients, Step};
pub use tf32::{allow_tf32, set_allow_tf32};
pub use trace::{Trace, TraceRow};
pub use watch::Warnings;
pub use workers::on_workers;

/// Compiles the programs in `docs/porting.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/porting.md")]
mod porting {}
