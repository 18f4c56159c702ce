//! Lion: the sign of a momentum.

use super::Optim;
use super::config::{Field, Formula, check_fractions, check_lr, check_settings};
use crate::{Result, kernels::multi_tensor::optimizer as kernel};

/// The settings of [`Lion`], with the defaults of its authors' implementation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LionConfig {
    /// Learning rate; a third to a tenth of AdamW's is usual. Default `1e-4`.
    pub lr: f64,
    /// How much of the momentum goes into the direction, the gradient being the rest. Default `0.9`.
    pub beta1: f64,
    /// How much of the momentum is kept. Default `0.99`.
    pub beta2: f64,
    /// Share of the weight, times `lr`, taken off at every step; three to ten times AdamW's is
    /// usual. Default `0`.
    pub weight_decay: f64,
    /// Climb instead of descending. Default `false`.
    pub maximize: bool,
}

impl Default for LionConfig {
    fn default() -> Self {
        Self { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0, maximize: false }
    }
}

impl Formula for LionConfig {
    const NAME: &'static str = "lion";

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        let Self { lr, beta1, beta2, weight_decay, maximize } = self;
        vec![
            ("lr", lr.into()),
            ("beta1", beta1.into()),
            ("beta2", beta2.into()),
            ("weight_decay", weight_decay.into()),
            ("maximize", maximize.into()),
        ]
    }

    fn validate(&self) -> Result<()> {
        check_settings([("lr", self.lr), ("weight_decay", self.weight_decay)])?;
        check_fractions([("beta1", self.beta1), ("beta2", self.beta2)])?;
        check_lr(self.lr, self.weight_decay, 0.0)
    }

    fn states(&self) -> &'static [&'static str] {
        &["exp_avg"]
    }

    fn rule(&self, _: u64, _: bool) -> kernel::Rule {
        let Self { lr, beta1, beta2, weight_decay, maximize } = *self;
        let keep = 1.0 - lr * weight_decay;
        kernel::Rule::Lion(kernel::Lion { lr, keep, beta1, beta2, maximize })
    }

    fn lr(&self) -> f64 {
        self.lr
    }
}

/// Steps of one size in the direction of a momentum's sign, with decoupled weight decay. One state
/// for AdamW's two.
///
/// ```text
/// g = gradient, negated to maximize
/// w = w * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
/// m = beta2 * m + (1 - beta2) * g
/// ```
///
/// The sign of 0 is 0, that of NaN is NaN. A step moves every weight by `lr`, however small its
/// gradient: a 16-bit variable without a master would need an `lr` of half its last bit.
///
/// Precision, and everything else, is that of [`Optim`].
///
/// # Examples
///
/// ```
/// use candle_amp::optim::{Lion, LionConfig};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::new(&[1f32, -2.0, 0.0], &Device::Cpu)?;
/// let mut lion = Lion::new(vec![w.clone()], LionConfig { lr: 0.25, ..Default::default() })?;
/// lion.backward_step(&w.sqr()?.sum_all()?)?;
/// assert_eq!(w.to_vec1::<f32>()?, [0.75, -1.75, 0.0]);
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.
pub type Lion = Optim<LionConfig>;
