//! Optimizers with state in `F32`, for half and full variables alike.

mod sgd;

pub use sgd::{Sgd, SgdConfig};
