// On docs.rs the README's relative links lead nowhere, so its pages are those of the packaged source. The first
// definition of a link wins.
//! [docs/examples.md]: https://docs.rs/crate/candle-amp/latest/source/docs/examples.md
//! [docs/guide.md]: https://docs.rs/crate/candle-amp/latest/source/docs/guide.md
//! [docs/porting.md]: https://docs.rs/crate/candle-amp/latest/source/docs/porting.md
//! [docs/porting-from.md]: https://docs.rs/crate/candle-amp/latest/source/docs/porting-from.md
//! [docs/tuning.md]: https://docs.rs/crate/candle-amp/latest/source/docs/tuning.md
//! [docs/operators.md]: https://docs.rs/crate/candle-amp/latest/source/docs/operators.md
//! [docs/numerics.md]: https://docs.rs/crate/candle-amp/latest/source/docs/numerics.md
//! [docs/distributed.md]: https://docs.rs/crate/candle-amp/latest/source/docs/distributed.md
//! [docs/performance.md]: https://docs.rs/crate/candle-amp/latest/source/docs/performance.md
//! [docs/architecture.md]: https://docs.rs/crate/candle-amp/latest/source/docs/architecture.md
//! [docs/design.md]: https://docs.rs/crate/candle-amp/latest/source/docs/design.md
//! [never run on a GPU]: https://docs.rs/crate/candle-amp/latest/source/docs/performance.md#never-run-on-a-gpu
//! [CHANGELOG.md]: https://docs.rs/crate/candle-amp/latest/source/CHANGELOG.md
//! [CONTRIBUTING.md]: https://docs.rs/crate/candle-amp/latest/source/CONTRIBUTING.md
//! [SECURITY.md]: https://docs.rs/crate/candle-amp/latest/source/SECURITY.md
//!
#![doc = include_str!("../README.md")]

mod autocast;
pub mod autograd;
pub mod backend;
pub mod checkpoints;
pub mod dist;
pub mod error;
mod kernels;
mod master;
pub mod nn;
pub mod ops;
pub mod optim;
mod parameters;
pub mod random;
mod scaler;

pub use autocast::{Autocast, AutocastGuard, Cast, Op, Policy};
pub use autograd::no_grad;
pub use error::{Error, Result};
pub use master::{MasterVars, MasterWeights};
pub use parameters::Parameters;
pub use scaler::{GradScaler, LossScale, ScaleConfig, ScaledLoss, StepOutcome};

/// Why steps were skipped, which gradients are lost or missing, in which dtype operators ran, and how long they took.
pub mod diagnostics {
    pub use crate::autocast::{Trace, TraceRow};
    pub use crate::autograd::profile::{Profile, ProfileRow, profile};
    pub use crate::master::{MissingGradients, MissingReason};
    pub use crate::scaler::diagnostics::{
        Exponents, F16Fit, GradientHistogram, NonFinite, OverflowReport, ScaleHistory, ScaleStep,
        Warnings,
    };
}

/// Compiles the programs in `docs/porting.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/porting.md")]
mod porting {}

/// Compiles the programs in `docs/porting-from.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/porting-from.md")]
mod porting_from {}

/// Compiles the programs in `docs/guide.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/guide.md")]
mod guide {}

/// Compiles the programs in `docs/tuning.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/tuning.md")]
mod tuning {}

/// Compiles the programs in `docs/distributed.md`.
#[cfg(doctest)]
#[doc = include_str!("../docs/distributed.md")]
mod distributed {}
