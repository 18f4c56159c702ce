//! Which learning rate to start from.

use super::config::{check, check_fractions, fits_f32};
use super::scheduler::LearningRate;
use crate::Result;

/// The range that [`LrFinder`] tries; fastai's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct LrFinderConfig {
    /// The first rate. Default `1e-7`.
    pub min_lr: f64,
    /// The last one. Default `10`.
    pub max_lr: f64,
    /// How many rates are tried, each a constant factor above the one before. Default `100`.
    pub steps: usize,
    /// How much of the average of losses is kept at each. Default `0.98`.
    pub smoothing: f64,
    /// The test ends where the smoothed loss is this many times its least. Default `4`.
    pub divergence: f64,
}

impl Default for LrFinderConfig {
    fn default() -> Self {
        Self { min_lr: 1e-7, max_lr: 10.0, steps: 100, smoothing: 0.98, divergence: 4.0 }
    }
}

/// Leslie Smith's range test: a short training whose learning rate grows by a constant factor, until the loss diverges.
/// A good rate is where the loss falls fastest.
///
/// It changes weights and optimizer, and restores nothing: save a [`Checkpoint`](crate::checkpoints::Checkpoint) of
/// weights, optimizer and scaler before, and load it afterwards. Or test on a model that you then build anew.
///
/// # Examples
///
/// ```
/// use candle_amp::optim::{LrFinder, LrFinderConfig, Sgd, SgdConfig};
/// use candle_amp::{GradScaler, ops};
/// use candle_core::{Device, Var};
///
/// let w = Var::new(&[1f32, -2.0], &Device::Cpu)?;
/// let mut sgd = Sgd::new(vec![w.clone()], SgdConfig::default())?;
/// let mut scaler = GradScaler::default();
/// let config = LrFinderConfig { min_lr: 1e-3, smoothing: 0.0, ..Default::default() };
/// let mut finder = LrFinder::new(config, &mut sgd)?;
/// loop {
///     let loss = ops::mean(&ops::square(&w)?)?;
///     scaler.scale(&loss)?.backward()?;
///     let taken = !scaler.step(&mut sgd)?.skipped()?;
///     scaler.update()?;
///     // A skipped step says nothing of the rate: it is tried again.
///     if taken && !finder.step(loss.to_scalar::<f32>()?.into(), &mut sgd) {
///         break;
///     }
/// }
/// let lr = finder.suggestion().expect("more than a dozen rates were tried");
/// assert!((0.03..2.0).contains(&lr), "{lr}"); // from 2 on, this training diverges
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// Smith, [Cyclical Learning Rates for Training Neural Networks](https://arxiv.org/abs/1506.01186); `Learner.lr_find` of
/// fastai, `Tuner.lr_find` of Lightning.
#[derive(Clone, Debug, PartialEq)]
pub struct LrFinder {
    config: LrFinderConfig,
    average: f64,
    best: f64,
    history: Vec<(f64, f64)>,
    diverged: bool,
}

/// As Lightning, the suggestion looks neither at the first losses, whose average is of few, nor at the last.
const SKIPPED: (usize, usize) = (10, 1);

impl LrFinder {
    /// Before the first step; sets the first learning rate.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`](crate::error::ArgumentError::Setting) for a number outside its range.
    pub fn new(config: LrFinderConfig, optimizer: &mut impl LearningRate) -> Result<Self> {
        let LrFinderConfig { min_lr, max_lr, steps, smoothing, divergence } = config;
        check("min_lr", min_lr, min_lr > 0.0 && fits_f32(min_lr), "a rate above 0 that F32 has")?;
        let expected = "a rate above min_lr that F32 has";
        check("max_lr", max_lr, max_lr > min_lr && fits_f32(max_lr), expected)?;
        check("steps", steps as f64, steps > 1, "at least 2")?;
        check_fractions([("smoothing", smoothing)])?;
        check("divergence", divergence, divergence > 1.0, "a number above 1")?;
        let new = Self {
            config,
            average: 0.0,
            best: f64::INFINITY,
            history: Vec::new(),
            diverged: false,
        };
        optimizer.set_learning_rate(new.learning_rate());
        Ok(new)
    }

    /// Takes the loss of the step that was taken, and sets the next learning rate; false where the test is over.
    pub fn step(&mut self, loss: f64, optimizer: &mut impl LearningRate) -> bool {
        if self.is_over() {
            return false;
        }
        let LrFinderConfig { smoothing, divergence, .. } = self.config;
        let lr = self.learning_rate();
        self.average = smoothing * self.average + (1.0 - smoothing) * loss;
        let count = self.history.len() as f64 + 1.0;
        let smoothed = self.average / (1.0 - smoothing.powf(count));
        self.history.push((lr, smoothed));
        self.best = self.best.min(smoothed);
        // Of a loss below zero, as far above as of one above it.
        let limit = self.best + (divergence - 1.0) * self.best.abs();
        self.diverged = !smoothed.is_finite() || smoothed > limit;
        if !self.is_over() {
            optimizer.set_learning_rate(self.learning_rate());
        }
        !self.is_over()
    }

    /// Whether all rates were tried, or the loss has diverged.
    pub fn is_over(&self) -> bool {
        self.diverged || self.history.len() >= self.config.steps
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        let LrFinderConfig { min_lr, max_lr, steps, .. } = self.config;
        let share = self.history.len().min(steps - 1) as f64 / (steps - 1) as f64;
        min_lr * (max_lr / min_lr).powf(share)
    }

    /// The rates tried, each with the smoothed loss, to plot.
    pub fn history(&self) -> &[(f64, f64)] {
        &self.history
    }

    /// The rate at which the loss falls fastest over the logarithm of the rate. The first ten losses and the last do
    /// not count; `None` where fewer than two are left, or where it falls nowhere.
    pub fn suggestion(&self) -> Option<f64> {
        let (first, last) = SKIPPED;
        let counted = self.history.get(first..self.history.len().checked_sub(last)?)?;
        let end = counted.len().checked_sub(1).filter(|&end| end > 0)?;
        // Central differences, one-sided at both ends. The logarithms are equally far apart.
        let slope = |i: usize| {
            let (from, to) = (i.saturating_sub(1), (i + 1).min(end));
            (counted[to].1 - counted[from].1) / (to - from) as f64
        };
        let slopes = (0..=end).map(|i| (counted[i].0, slope(i))).filter(|(_, s)| *s < 0.0);
        slopes.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(lr, _)| lr)
    }
}
