//! Loss scaling on candle's autograd.

pub(crate) mod diagnostics;
mod grad_scaler;
mod gradients;
mod live_scale;
mod loss_scale;
mod outcome;
mod reducer;
mod scaled_loss;
mod step;

pub use grad_scaler::GradScaler;
pub use loss_scale::{LossScale, ScaleConfig};
pub use outcome::StepOutcome;
pub(crate) use reducer::Reducer;
pub use scaled_loss::ScaledLoss;
pub use step::{Bound, Step, UnscaledGradients};
pub(crate) use step::{Internals, OptimizerFacts, facts_of_candles};
