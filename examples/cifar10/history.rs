//! What a run measures, step by step and in the test.

use std::time::Duration;

use crate::common::steps::Steps;

/// Everything that was measured in training.
#[derive(Debug, Default)]
pub(crate) struct History {
    pub(crate) steps: Steps,
    pub(crate) epochs: Vec<Epoch>,
}

/// One pass over the training images, and the test after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch {
    pub(crate) steps: usize,
    /// The mean over its steps.
    pub(crate) loss: f64,
    pub(crate) test_accuracy: f64,
}

impl History {
    /// Ends an epoch of `steps` steps.
    pub(crate) fn epoch(&mut self, steps: usize, test_accuracy: f64) {
        self.epochs.push(Epoch { steps, loss: self.steps.recent_loss(steps), test_accuracy });
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
