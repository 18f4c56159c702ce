//! Losses with PyTorch's settings, and candle_nn's losses by the names it has for them.

mod class;

pub use class::{CrossEntropyLoss, NllLoss};

pub use crate::ops::{
    Reduction, binary_cross_entropy, binary_cross_entropy_with_logit, cross_entropy, huber, mse,
    nll,
};
