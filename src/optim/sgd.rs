//! Stochastic gradient descent with momentum.

use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, TensorId, Var};

use crate::master::{Pair, pairs};
use crate::step::{Gradients, Step};
use crate::{Error, autocast, kernels};

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
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false }
    }
}

impl SgdConfig {
    fn validate(&self) -> crate::Result<()> {
        let check = |name, got: f64, ok: bool, expected| match ok {
            true => Ok(()),
            false => Err(Error::Setting { name, got, expected }),
        };
        let not_negative = |x: f64| x >= 0.0 && x.is_finite();
        let finite = "a finite number, not below zero";
        check("lr", self.lr, not_negative(self.lr), finite)?;
        check("momentum", self.momentum, not_negative(self.momentum), finite)?;
        check("weight_decay", self.weight_decay, not_negative(self.weight_decay), finite)?;
        check("dampening", self.dampening, self.dampening.is_finite(), "a finite number")?;
        let nesterov = !self.nesterov || self.momentum > 0.0;
        check("momentum", self.momentum, nesterov, "more than 0 with nesterov")?;
        let undampened = !self.nesterov || self.dampening == 0.0;
        check("dampening", self.dampening, undampened, "0 with nesterov")
    }
}

/// SGD with momentum, Nesterov momentum and weight decay.
///
/// ```text
/// g = gradient + weight_decay * w
/// b = g at the first step, momentum * b + (1 - dampening) * g afterwards
/// w = w - lr * (g + momentum * b  with nesterov, else b)
/// ```
///
/// # Precision
///
/// Weights, momentum and arithmetic are `F32` (`F64` for `F64` variables). A half variable has an
/// `F32` master, from which it is rewritten, rounded once, after every step.
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
#[derive(Debug)]
pub struct Sgd {
    config: SgdConfig,
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    pair: Pair,
    /// `None` without momentum, and before the first gradient.
    momentum: Option<Tensor>,
}

impl Sgd {
    /// An optimizer of `variables`; repeated ones count once, integers are left out.
    ///
    /// # Errors
    ///
    /// [`Error::Setting`] for a setting outside its range.
    pub fn new(variables: Vec<Var>, config: SgdConfig) -> crate::Result<Self> {
        config.validate()?;
        let slot = |pair| Slot { pair, momentum: None };
        Ok(Self { config, slots: pairs(variables)?.into_iter().map(slot).collect() })
    }

    /// Steps with gradients keyed by the model's variables, in any floating-point dtype.
    ///
    /// # Errors
    ///
    /// A gradient of another shape than its variable; nothing is updated then.
    pub fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.step_with(|variable| gradients.get(variable))
    }

    /// Back-propagates `loss` and steps, without loss scaling.
    ///
    /// # Errors
    ///
    /// Those of backward.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.step(&loss.backward()?)
    }

    /// The learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.config.lr
    }

    /// Sets the learning rate.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.config.lr = learning_rate;
    }

    fn step_with<'a>(&mut self, gradient: impl Fn(&Tensor) -> Option<&'a Tensor>) -> Result<()> {
        let mut updates = Vec::with_capacity(self.slots.len());
        for slot in &mut self.slots {
            let Some(gradient) = gradient(&slot.pair.variable) else { continue };
            let (got, expected) = (gradient.shape(), slot.pair.variable.shape());
            if got != expected {
                let expected = format!("{expected:?}, that of its variable");
                let got = got.clone();
                return Err(Error::Shape { op: "sgd", name: "a gradient", got, expected }.into());
            }
            // A cast to the same dtype is a copy.
            let dtype = slot.pair.master.dtype();
            let gradient = match gradient.dtype() == dtype {
                true => gradient.contiguous()?,
                false => kernels::cast(gradient, dtype)?,
            };
            updates.push((gradient, slot));
        }
        for (gradient, slot) in updates {
            slot.update(&gradient, &self.config)?;
        }
        autocast::clear_cast_cache();
        Ok(())
    }
}

impl Slot {
    fn update(&mut self, gradient: &Tensor, config: &SgdConfig) -> Result<()> {
        let SgdConfig { lr, momentum, dampening, weight_decay, nesterov } = *config;
        let first = self.momentum.is_none();
        if momentum != 0.0 && first {
            self.momentum = Some(gradient.zeros_like()?);
        }
        let buffer = self.momentum.as_ref().filter(|_| momentum != 0.0);
        let step = kernels::update::Sgd { lr, momentum, dampening, weight_decay, nesterov, first };
        kernels::update::sgd(&self.pair.master, buffer, gradient, step)?;
        self.pair.refresh()
    }
}

impl Step for Sgd {
    fn variables(&self) -> Option<Vec<TensorId>> {
        Some(self.slots.iter().map(|slot| slot.pair.variable.id()).collect())
    }

    fn apply(&mut self, gradients: &Gradients<'_>) -> Result<()> {
        self.step_with(|variable| gradients.get(variable))
    }
}
