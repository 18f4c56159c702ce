//! Stochastic gradient descent with momentum.

use super::Optim;
use super::config::{Field, Formula, check, check_lr, check_settings, fits_f32};
use crate::{Result, kernels::multi_tensor::optimizer as kernel};

/// The settings of [`Sgd`], PyTorch's names and defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdConfig {
    /// Learning rate. Default `1e-3`.
    pub lr: f64,
    /// How much of the last update goes into the next; 0 for none. Default `0`.
    pub momentum: f64,
    /// How much less of the gradient goes into the momentum. Default `0`.
    pub dampening: f64,
    /// L2 penalty, added to the gradient before momentum. Default `0`.
    pub weight_decay: f64,
    /// Look ahead along the momentum. Wants momentum, and no dampening. Default `false`.
    pub nesterov: bool,
    /// Climb instead of descending. Default `false`.
    pub maximize: bool,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
            maximize: false,
        }
    }
}

impl Formula for SgdConfig {
    const NAME: &'static str = "sgd";

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        let Self { lr, momentum, dampening, weight_decay, nesterov, maximize } = self;
        vec![
            ("lr", lr.into()),
            ("momentum", momentum.into()),
            ("dampening", dampening.into()),
            ("weight_decay", weight_decay.into()),
            ("nesterov", nesterov.into()),
            ("maximize", maximize.into()),
        ]
    }

    fn validate(&self) -> Result<()> {
        check_settings([
            ("lr", self.lr),
            ("momentum", self.momentum),
            ("weight_decay", self.weight_decay),
        ])?;
        check_lr(self.lr, self.weight_decay, 0.0)?;
        let finite = fits_f32(self.dampening);
        check("dampening", self.dampening, finite, "a number that is finite in F32")?;
        let nesterov = !self.nesterov || self.momentum > 0.0;
        check("momentum", self.momentum, nesterov, "more than 0 with nesterov")?;
        let undampened = !self.nesterov || self.dampening == 0.0;
        check("dampening", self.dampening, undampened, "0 with nesterov")
    }

    fn states(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn rule(&self, step: u64, first: bool) -> kernel::Rule {
        let Self { lr, momentum, dampening, weight_decay, nesterov, maximize } = *self;
        kernel::Rule::Sgd(kernel::Sgd {
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize,
            step,
            first,
        })
    }

    fn lr(&self) -> f64 {
        self.lr
    }
}

/// SGD with momentum, Nesterov momentum and weight decay.
///
/// ```text
/// g = gradient, negated to maximize, + weight_decay * w
/// b = g at the first step, momentum * b + (1 - dampening) * g afterwards
/// w = w - lr * (g + momentum * b  with nesterov, else b)
/// ```
///
/// Precision, and everything else, is that of [`Optim`].
///
/// # Examples
///
/// ```
/// use candle_amp::optim::{Sgd, SgdConfig};
/// use candle_amp::{GradScaler, ops};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let mut sgd = Sgd::new(vec![w.clone()], SgdConfig { lr: 0.5, ..Default::default() })?;
/// let mut scaler = GradScaler::default();
/// scaler.scale(&ops::sum(&w)?)?.backward()?;
/// let _ = scaler.step(&mut sgd)?;
/// scaler.update()?;
/// assert_eq!(w.to_vec1::<f32>()?, [0.5, 1.5]);
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `torch.optim.SGD`.
pub type Sgd = Optim<SgdConfig>;
