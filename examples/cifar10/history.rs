//! What a run measures, step by step and in the test.

use std::time::Duration;

use candle_amp::diagnostics::Exponents;
use serde::{Deserialize, Serialize};

use crate::common::steps::Steps;

/// Everything that was measured in training.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) steps: Steps,
    pub(crate) epochs: Vec<Epoch>,
    /// Of the last step of an epoch, if the run has a folder.
    pub(crate) gradients: Option<Gradients>,
}

/// One pass over the training images, and the test after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    pub(crate) steps: usize,
    /// The mean over its steps.
    pub(crate) loss: f64,
    pub(crate) test_accuracy: f64,
}

/// How large the gradients of a step were, before they were multiplied by the loss scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Gradients {
    /// The loss scale.
    pub(crate) scale: f32,
    pub(crate) zeros: u64,
    pub(crate) infinite: u64,
    pub(crate) nan: u64,
    /// How many there are of each `floor(log2(|x|))`.
    pub(crate) exponents: Vec<(i32, u64)>,
    pub(crate) in_f16: InF16,
}

/// What becomes of gradients in F16, at the loss scale.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct InF16 {
    pub(crate) to_zero: u64,
    pub(crate) subnormal: u64,
    pub(crate) normal: u64,
    pub(crate) overflow: u64,
}

impl Gradients {
    pub(crate) fn new(exponents: &Exponents, scale: f32) -> Self {
        let fit = exponents.in_f16(scale);
        Self {
            scale,
            zeros: exponents.zeros(),
            infinite: exponents.infinite(),
            nan: exponents.nan(),
            exponents: exponents.iter().collect(),
            in_f16: InF16 {
                to_zero: fit.to_zero,
                subnormal: fit.subnormal,
                normal: fit.normal,
                overflow: fit.overflow,
            },
        }
    }

    pub(crate) fn elements(&self) -> u64 {
        let counted: u64 = self.exponents.iter().map(|(_, count)| count).sum();
        counted + self.zeros + self.infinite + self.nan
    }
}

impl History {
    /// Ends an epoch of `steps` steps.
    pub(crate) fn epoch(&mut self, steps: usize, test_accuracy: f64) {
        self.epochs.push(Epoch { steps, loss: self.steps.recent_loss(steps), test_accuracy });
    }

    /// Steps of the epoch that has not ended yet.
    pub(crate) fn unfinished(&self) -> usize {
        let finished: usize = self.epochs.iter().map(|epoch| epoch.steps).sum();
        self.steps.count() - finished
    }

    pub(crate) fn median_step(&self) -> Duration {
        let mut times = self.steps.times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_step_is_not_the_mean() {
        let mut history = History::default();
        assert_eq!(history.median_step(), Duration::ZERO);
        for time in [30, 500, 70].map(Duration::from_millis) {
            history.steps.add(1., time, false, 8.);
        }
        assert_eq!(history.median_step(), Duration::from_millis(70));
    }
}
