//! Losses with PyTorch's settings, and candle_nn's losses by the names it has for them.

mod class;
mod embedding;
mod pair;

pub use class::{CrossEntropyLoss, NllLoss};
pub use embedding::{CosineEmbeddingLoss, TripletMarginLoss};
pub use pair::{BceLoss, BceWithLogitsLoss, HuberLoss, KlDivLoss, L1Loss, MseLoss, SmoothL1Loss};

pub use crate::ops::{
    Reduction, binary_cross_entropy, binary_cross_entropy_with_logit, cross_entropy, huber, kl_div,
    l1, mse, nll,
};
