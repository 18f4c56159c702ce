//! LAMB: Adam with a step length for every tensor.

use super::Optim;
use super::config::{Field, Formula, check_adam};
use crate::{Result, kernels::multi_tensor::optimizer as kernel};

/// The settings of [`Lamb`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LambConfig {
    /// Learning rate. Default `1e-3`.
    pub lr: f64,
    /// How much of the mean gradient is kept at a step. Default `0.9`.
    pub beta1: f64,
    /// How much of the mean squared gradient is kept. Default `0.999`.
    pub beta2: f64,
    /// Added to the denominator. Default `1e-6`.
    pub eps: f64,
    /// Share of the weight added to the update, before its length is taken. Default `0.01`.
    pub weight_decay: f64,
    /// Scale tensors without weight decay too, which are norms and biases as a rule. Default
    /// `false`.
    pub always_adapt: bool,
    /// Let no trust ratio be above 1 (LAMBC). Default `false`.
    pub trust_clip: bool,
    /// Climb instead of descending. Default `false`.
    pub maximize: bool,
}

impl Default for LambConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-6,
            weight_decay: 0.01,
            always_adapt: false,
            trust_clip: false,
            maximize: false,
        }
    }
}

impl Formula for LambConfig {
    const NAME: &'static str = "lamb";
    const ELEMENTWISE: bool = false;

    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)> {
        let Self { lr, beta1, beta2, eps, weight_decay, always_adapt, trust_clip, maximize } = self;
        vec![
            ("lr", lr.into()),
            ("beta1", beta1.into()),
            ("beta2", beta2.into()),
            ("eps", eps.into()),
            ("weight_decay", weight_decay.into()),
            ("always_adapt", always_adapt.into()),
            ("trust_clip", trust_clip.into()),
            ("maximize", maximize.into()),
        ]
    }

    fn validate(&self) -> Result<()> {
        let Self { lr, beta1, beta2, eps, weight_decay, .. } = *self;
        check_adam(lr, [beta1, beta2], eps, weight_decay)
    }

    fn states(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn rule(&self, step: u64, _: bool) -> kernel::Rule {
        let Self { lr, beta1, beta2, eps, weight_decay, maximize, .. } = *self;
        let taken = step as f64;
        kernel::Rule::LambMoments(kernel::Lamb {
            lr,
            step,
            weight_decay,
            beta1,
            beta2,
            eps,
            correction1: 1.0 - beta1.powf(taken),
            correction2: (1.0 - beta2.powf(taken)).sqrt(),
            maximize,
            adapt: self.always_adapt || weight_decay != 0.0,
            clip: self.trust_clip,
        })
    }

    fn lr(&self) -> f64 {
        self.lr
    }
}

/// Adam whose step on a tensor is in proportion to that tensor's norm, for very large batches.
///
/// ```text
/// g = gradient, negated to maximize
/// m = m + (1 - beta1) * (g - m)
/// v = v * beta2 + (1 - beta2) * g * g
/// r = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * w
/// w = w - lr * trust * r,   trust = |w| / |r|
/// ```
///
/// The norms are those of the whole tensor, their squares summed in `F64` where the device has it. `trust` is 1
/// where one of them is 0; and where `weight_decay` is 0, unless `always_adapt`, as in NVIDIA's and
/// timm's implementations: [`decay_groups`](super::decay_groups) thereby exempts norms and biases
/// from both. Gradients are not clipped first, as those two do:
/// [`GradScaler::clip_grad_norm`](crate::GradScaler::clip_grad_norm) does that. The moments are
/// bias-corrected, as in the paper.
///
/// Precision, and everything else, is that of [`Optim`]. On a CPU and on CUDA no step waits. On another GPU a step waits for the
/// norms of each tensor.
///
/// # Examples
///
/// ```
/// use candle_amp::optim::{Lamb, LambConfig};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::new(&[3f32, 4.0], &Device::Cpu)?;
/// let config = LambConfig { lr: 0.1, weight_decay: 0.0, always_adapt: true, ..Default::default() };
/// let mut lamb = Lamb::new(vec![w.clone()], config)?;
/// lamb.backward_step(&w.sum_all()?)?;
/// // A tenth of the weight's length, 5, in the direction (1, 1).
/// let step = 0.5 / 2f32.sqrt();
/// for (w, start) in w.to_vec1::<f32>()?.into_iter().zip([3.0, 4.0]) {
///     assert!((w - (start - step)).abs() < 1e-5);
/// }
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020,
/// algorithm 2.
pub type Lamb = Optim<LambConfig>;
