//! Adam with decoupled weight decay.

use super::Optim;
use super::config::{Field, Formula, check_adam};
use crate::{Result, kernels::multi_tensor::optimizer as kernel};

/// The settings of [`AdamW`], PyTorch's names and defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate. Default `1e-3`.
    pub lr: f64,
    /// How much of the mean gradient is kept at a step. Default `0.9`.
    pub beta1: f64,
    /// How much of the mean squared gradient is kept. Default `0.999`.
    pub beta2: f64,
    /// Added to the denominator. Default `1e-8`.
    pub eps: f64,
    /// Share of the weight, times `lr`, taken off at every step. Default `0.01`.
    pub weight_decay: f64,
    /// Divide by the largest mean squared gradient so far. Default `false`.
    pub amsgrad: bool,
    /// Climb instead of descending. Default `false`.
    pub maximize: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            amsgrad: false,
            maximize: false,
        }
    }
}

impl Formula for AdamWConfig {
    const NAME: &'static str = "adamw";

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        let Self { lr, beta1, beta2, eps, weight_decay, amsgrad, maximize } = self;
        vec![
            ("lr", lr.into()),
            ("beta1", beta1.into()),
            ("beta2", beta2.into()),
            ("eps", eps.into()),
            ("weight_decay", weight_decay.into()),
            ("amsgrad", amsgrad.into()),
            ("maximize", maximize.into()),
        ]
    }

    fn validate(&self) -> Result<()> {
        let Self { lr, beta1, beta2, eps, weight_decay, .. } = *self;
        check_adam(lr, [beta1, beta2], eps, weight_decay)
    }

    fn states(&self) -> &'static [&'static str] {
        match self.amsgrad {
            false => &["exp_avg", "exp_avg_sq"],
            true => &["exp_avg", "exp_avg_sq", "max_exp_avg_sq"],
        }
    }

    fn rule(&self, step: u64, _: bool) -> kernel::Rule {
        let Self { lr, beta1, beta2, eps, weight_decay, amsgrad, maximize } = *self;
        let taken = step as f64;
        kernel::Rule::AdamW(kernel::AdamW {
            lr,
            step,
            keep: 1.0 - lr * weight_decay,
            beta1,
            beta2,
            eps,
            step_size: lr / (1.0 - beta1.powf(taken)),
            correction: (1.0 - beta2.powf(taken)).sqrt(),
            amsgrad,
            maximize,
        })
    }

    fn lr(&self) -> f64 {
        self.lr
    }
}

/// Adam with weight decay apart from the gradient.
///
/// ```text
/// g = gradient, negated to maximize
/// w = w * (1 - lr * weight_decay)
/// m = m + (1 - beta1) * (g - m)
/// v = v * beta2 + (1 - beta2) * g * g
/// w = w + (-lr / (1 - beta1^t) * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
/// ```
///
/// in this order, the brackets of settings in `F64`, rounded once to the `F32` of the rest; `t`
/// counts the steps of the variable, from 1. With `amsgrad` the largest `v` so far takes the place
/// of `v` in the last line. (`m` is PyTorch's `lerp`: with `beta1` of 0.5 or less it is
/// `g - beta1 * (g - m)`.)
///
/// Precision, and everything else, is that of [`Optim`].
///
/// # Examples
///
/// ```
/// use candle_amp::optim::{AdamW, AdamWConfig};
/// use candle_amp::{GradScaler, ops};
/// use candle_core::{DType, Device, Var};
///
/// // candle's own AdamW turns F16 variables to NaN: 1e-8 and the squares of gradients are 0 there.
/// let w = Var::ones(2, DType::F16, &Device::Cpu)?;
/// let config = AdamWConfig { lr: 1e-2, weight_decay: 0.0, ..Default::default() };
/// let mut adamw = AdamW::new(vec![w.clone()], config)?;
/// let mut scaler = GradScaler::default();
/// for _ in 0..10 {
///     scaler.scale(&ops::mean(&w.to_dtype(DType::F32)?)?)?.backward()?;
///     let _ = scaler.step(&mut adamw)?;
///     scaler.update()?;
/// }
/// for w in w.to_dtype(DType::F32)?.to_vec1::<f32>()? {
///     assert!((w - 0.9).abs() < 1e-3); // ten steps of `lr`
/// }
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `torch.optim.AdamW`. Loshchilov and Hutter, "Decoupled weight decay regularization", 2019; Reddi,
/// Kale and Kumar, "On the convergence of Adam and beyond", 2018, for AMSGrad.
pub type AdamW = Optim<AdamWConfig>;
