//! A learning rate that falls when a measure stops improving.

use super::config::{check, check_not_negative, check_settings};
use super::scheduler::LearningRate;
use crate::Result;

/// When [`ReduceOnPlateau`] lowers the learning rate; PyTorch's names and defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PlateauConfig {
    /// Whether a larger measure is better, as of an accuracy. Default `false`.
    pub maximize: bool,
    /// The learning rate falls to this share; below 1. Default `0.1`.
    pub factor: f64,
    /// How many measures in a row may be no better before it falls. Default `10`.
    pub patience: u64,
    /// How much better than the best one must be. Default `1e-4`.
    pub threshold: f64,
    /// Whether `threshold` is a share of the best (PyTorch's `rel`), or a difference (`abs`).
    /// Default `true`.
    pub relative: bool,
    /// How many measures after a fall do not count against it. Default `0`.
    pub cooldown: u64,
    /// The learning rate does not fall below this. Default `0`.
    pub min_lr: f64,
    /// A fall by less than this is left out. Default `1e-8`.
    pub eps: f64,
}

impl Default for PlateauConfig {
    fn default() -> Self {
        Self {
            maximize: false,
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            relative: true,
            cooldown: 0,
            min_lr: 0.0,
            eps: 1e-8,
        }
    }
}

/// Lowers the learning rate when a measure (a validation loss, once per epoch) has not improved for a
/// while. A measure of NaN is no improvement.
///
/// It knows no steps, so skipped ones do not concern it. Where an optimizer has groups, `min_lr` and
/// `eps` are those of the first, and the others fall in proportion.
///
/// ```
/// use candle_amp::optim::{PlateauConfig, ReduceOnPlateau, Sgd, SgdConfig};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::ones(1, DType::F32, &Device::Cpu)?;
/// let mut sgd = Sgd::new(vec![w], SgdConfig { lr: 1.0, ..Default::default() })?;
/// let config = PlateauConfig { patience: 1, factor: 0.5, ..Default::default() };
/// let mut plateau = ReduceOnPlateau::new(config)?;
/// let rates = [2.0, 1.5, 1.6, f64::NAN, 1.4].map(|loss| {
///     plateau.step(loss, &mut sgd);
///     sgd.learning_rate()
/// });
/// assert_eq!(rates, [1.0, 1.0, 1.0, 0.5, 0.5]);
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `torch.optim.lr_scheduler.ReduceLROnPlateau`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Unchecked"))]
pub struct ReduceOnPlateau {
    config: PlateauConfig,
    state: PlateauState,
}

/// A [`ReduceOnPlateau`] that nobody has checked yet.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct Unchecked {
    config: PlateauConfig,
    state: PlateauState,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for ReduceOnPlateau {
    type Error = crate::Error;

    fn try_from(Unchecked { config, state }: Unchecked) -> Result<Self> {
        Self::restore(config, state)
    }
}

/// What a [`ReduceOnPlateau`] remembers, to save.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct PlateauState {
    /// The best measure so far.
    pub best: Option<f64>,
    /// Measures since then that counted and were no better.
    pub bad: u64,
    /// Measures still to come that do not count.
    pub cooldown: u64,
}

impl ReduceOnPlateau {
    /// Before the first measure.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`](crate::error::ArgumentError::Setting) for a number outside its range.
    pub fn new(config: PlateauConfig) -> Result<Self> {
        Self::restore(config, PlateauState::default())
    }

    /// Goes on from a saved state.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and for a best measure that is NaN, which nothing is better than.
    pub fn restore(config: PlateauConfig, state: PlateauState) -> Result<Self> {
        let PlateauConfig { factor, threshold, min_lr, eps, .. } = config;
        check("factor", factor, (0.0..1.0).contains(&factor), "a number from 0 to below 1")?;
        check_not_negative([("threshold", threshold), ("eps", eps)])?;
        check_settings([("min_lr", min_lr)])?;
        let best = state.best.unwrap_or(0.0);
        check("best", best, !best.is_nan(), "a measure that can be compared")?;
        Ok(Self { config, state })
    }

    /// Takes a measure, and lowers the learning rate if it is time.
    pub fn step(&mut self, measure: f64, optimizer: &mut impl LearningRate) {
        let PlateauConfig { factor, patience, cooldown, min_lr, eps, .. } = self.config;
        let state = &mut self.state;
        if self.config.is_better(measure, state.best) {
            (state.best, state.bad) = (Some(measure), 0);
        } else {
            state.bad = state.bad.saturating_add(1);
        }
        if state.cooldown > 0 {
            (state.cooldown, state.bad) = (state.cooldown - 1, 0);
        }
        if state.bad > patience {
            (state.cooldown, state.bad) = (cooldown, 0);
            let old = optimizer.learning_rate();
            let new = (old * factor).max(min_lr);
            if old - new > eps {
                optimizer.set_learning_rate(new);
            }
        }
    }

    /// The settings.
    pub fn config(&self) -> &PlateauConfig {
        &self.config
    }

    /// What it remembers.
    pub fn state(&self) -> PlateauState {
        self.state
    }
}

impl PlateauConfig {
    fn is_better(&self, measure: f64, best: Option<f64>) -> bool {
        let Some(best) = best else { return !measure.is_nan() };
        let Self { threshold, .. } = *self;
        match (self.maximize, self.relative) {
            (false, true) => measure < best * (1.0 - threshold),
            (false, false) => measure < best - threshold,
            (true, true) => measure > best * (threshold + 1.0),
            (true, false) => measure > best + threshold,
        }
    }
}
