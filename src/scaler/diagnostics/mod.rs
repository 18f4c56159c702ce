//! Diagnostics of a scaler: skipped steps and lost gradients.

mod histogram;
mod history;
mod overflow;
pub(crate) mod warnings;

pub use histogram::{Exponents, F16Fit, GradientHistogram};
pub use history::{ScaleHistory, ScaleStep};
pub use overflow::{NonFinite, OverflowReport};
pub use warnings::Warnings;
