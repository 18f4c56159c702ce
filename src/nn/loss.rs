//! candle_nn's losses, by the names it has for them.

pub use crate::ops::{
    binary_cross_entropy, binary_cross_entropy_with_logit, cross_entropy, huber, mse, nll,
};
