//! Optimizers whose state is `F32`, for 16-bit and `F32` variables; parameter groups, schedules, and averages of the
//! weights.
//!
//! | | state | F32 numbers that the state has for each parameter |
//! |---|---|---|
//! | [`Sgd`] | momentum, if any | 0 or 1 |
//! | [`AdamW`] | two moments, three with AMSGrad | 2 or 3 |
//! | [`Lion`] | momentum | 1 |
//! | [`Lamb`] | two moments | 2 |
//!
//! All are an [`Optim`] with settings of their own. State is `F32`, or `BF16` where
//! [`Optim::with_state_dtype`] says so. A 16-bit variable keeps its exact value in one of three ways,
//! [`Masters`].

mod accumulation;
mod adamw;
mod candle;
mod config;
mod ema;
mod graphed;
mod lamb;
mod lion;
mod lr_finder;
mod masters;
mod optimizer;
mod parameters;
mod plateau;
mod schedule;
mod scheduler;
mod sgd;
mod slot;
mod state;
mod step;

pub use crate::master::{AsCandle, Refreshing};
pub use crate::scaler::{Bound, Step, UnscaledGradients};
pub use accumulation::Accumulation;
pub use adamw::{AdamW, AdamWConfig};
pub use config::Config;
pub use ema::{Ema, EmaConfig, EmaState};
pub use graphed::GraphedStep;
pub use lamb::{Lamb, LambConfig};
pub use lion::{Lion, LionConfig};
pub use lr_finder::{LrFinder, LrFinderConfig};
pub use masters::Masters;
pub use optimizer::Optim;
pub use parameters::{Group, Variables, decay_groups};
pub use plateau::{PlateauConfig, PlateauState, ReduceOnPlateau};
pub use schedule::{Schedule, ScheduleShape};
pub use scheduler::{LearningRate, Scheduler};
pub use sgd::{Sgd, SgdConfig};
pub use state::{GroupState, OptimizerState};
