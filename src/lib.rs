#![doc = include_str!("../README.md")]

mod autocast;
pub mod autograd;
pub mod backend;
mod checkpoints;
mod error;
mod kernels;
mod master;
pub mod nn;
pub mod ops;
pub mod optim;
mod parameters;
pub mod random;
mod scaler;

pub use autocast::{Autocast, AutocastGuard, Cast, Op, Policy, Trace, TraceRow, clear_cast_cache};
pub use autograd::{NoGradGuard, checkpoint, no_grad, no_grad_guard};
pub use checkpoints::{Best, Checkpoint, Checkpointer, Resumed, SavedCheckpoint, State, Stateful};
pub use error::{Error, Result};
pub use master::{
    AsCandle, MasterVars, MasterWeights, MissingGradients, MissingReason, Refreshing,
};
pub use parameters::Parameters;
pub use scaler::diagnostics;
pub use scaler::{
    Bound, GradScaler, Gradients, LossScale, ScaleConfig, ScaledLoss, Step, StepOutcome,
};

/// Compiles the programs in `docs/porting.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/porting.md")]
mod porting {}

/// Compiles the programs in `docs/guide.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/guide.md")]
mod guide {}

/// Compiles the programs in `docs/tuning.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/tuning.md")]
mod tuning {}
