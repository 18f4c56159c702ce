//! Dropout layers.

use candle_core::{Result, Tensor};
use candle_nn::ModuleT;

use crate::ops;

/// [`ops::dropout`] in training, nothing in evaluation.
#[derive(Clone, Debug)]
pub struct Dropout {
    drop_p: f32,
}

impl Dropout {
    /// Drops each element with probability `drop_p`.
    pub fn new(drop_p: f32) -> Self {
        Self { drop_p }
    }

    /// As [`ops::dropout`] where `train` is set, else `x` itself.
    ///
    /// # Errors
    ///
    /// A probability below 0 or above 1.
    pub fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if train { ops::dropout(x, self.drop_p) } else { Ok(x.clone()) }
    }
}

impl ModuleT for Dropout {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(x, train)
    }
}
