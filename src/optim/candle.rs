//! The crate's optimizers where candle's are asked for.

use candle_core::backprop::GradStore;
use candle_core::{Result, Var};

use super::{Config, Optim};
use crate::master::AsCandle;

impl<C: Config> candle_nn::Optimizer for AsCandle<'_, Optim<C>> {
    type Config = C;

    fn new(variables: Vec<Var>, config: C) -> Result<Self> {
        Ok(Self::owned(Optim::new(variables, config)?))
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.inner_mut().step(gradients)
    }

    fn learning_rate(&self) -> f64 {
        self.inner().learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.inner_mut().set_learning_rate(learning_rate)
    }
}
