//! What a run measures, step by step and in the test.

use std::time::Duration;

use crate::{common::steps::Steps, data::CLASSES};

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

/// How many test images there are of every class, and how many were recognised.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Score {
    pub(crate) hits: [usize; CLASSES],
    pub(crate) of: [usize; CLASSES],
}

impl Score {
    /// Counts images of `labels` that were taken for `predictions`.
    pub(crate) fn count(&mut self, labels: &[u32], predictions: &[u32]) {
        for (&label, prediction) in labels.iter().zip(predictions) {
            self.of[label as usize] += 1;
            self.hits[label as usize] += usize::from(label == *prediction);
        }
    }

    /// The fraction of all images recognised.
    pub(crate) fn accuracy(&self) -> f64 {
        ratio(self.hits.iter().sum(), self.of.iter().sum())
    }

    /// The fraction recognised of every class; 0 for a class without images.
    pub(crate) fn by_class(&self) -> [f64; CLASSES] {
        std::array::from_fn(|class| ratio(self.hits[class], self.of[class]))
    }
}

fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
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

    #[test]
    fn a_score_counts_hits_by_class() {
        let mut score = Score::default();
        score.count(&[0, 0, 3], &[0, 3, 3]);
        score.count(&[9], &[0]);
        assert_eq!(score.accuracy(), 0.5);
        assert_eq!(score.by_class(), [0.5, 0., 0., 1., 0., 0., 0., 0., 0., 0.]);
    }
}
