//! The crate's optimizers where candle's are asked for.

use candle_core::backprop::GradStore;
use candle_core::{Result, Var};

use super::{Config, Optim};
use crate::master::held::Held;

/// An [`Optim`] as a `candle_nn::Optimizer`, borrowed by [`Optim::as_candle`] or owned, where generic
/// code makes its own.
///
/// ```
/// use candle_amp::optim::{AdamWConfig, AsCandle};
/// use candle_core::{DType, Device, Var};
/// use candle_nn::Optimizer;
///
/// fn train<O: Optimizer>(w: &Var, config: O::Config) -> candle_core::Result<()> {
///     O::new(vec![w.clone()], config)?.backward_step(&w.sum_all()?)
/// }
/// let w = Var::ones(1, DType::F32, &Device::Cpu)?;
/// train::<AsCandle<AdamWConfig>>(&w, AdamWConfig { lr: 0.5, ..Default::default() })?;
/// assert!((w.to_vec1::<f32>()?[0] - 0.495).abs() < 1e-6); // 1 - 0.5 * 0.01 - 0.5
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct AsCandle<'a, C>(Held<'a, Optim<C>>);

impl<'a, C> AsCandle<'a, C> {
    pub(super) fn new(optimizer: &'a mut Optim<C>) -> Self {
        Self(Held::Borrowed(optimizer))
    }

    /// The optimizer inside.
    pub fn inner(&self) -> &Optim<C> {
        &self.0
    }

    /// The optimizer inside.
    pub fn inner_mut(&mut self) -> &mut Optim<C> {
        &mut self.0
    }
}

impl<C: Config> candle_nn::Optimizer for AsCandle<'_, C> {
    type Config = C;

    fn new(variables: Vec<Var>, config: C) -> Result<Self> {
        Ok(Self(Held::Owned(Optim::new(variables, config)?)))
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.0.step(gradients)
    }

    fn learning_rate(&self) -> f64 {
        self.0.learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.0.set_learning_rate(learning_rate)
    }
}
