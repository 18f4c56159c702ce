//! What a run measures, step by step and in the test.

use std::time::Duration;

use crate::data::CLASSES;

/// Everything that was measured step by step.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The loss of every step, skipped or not.
    pub(crate) losses: Vec<f32>,
    pub(crate) times: Vec<Duration>,
    pub(crate) skipped: usize,
    /// The loss scale after the last step.
    pub(crate) scale: f32,
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
    pub(crate) fn step(&mut self, loss: f32, time: Duration, skipped: bool, scale: f32) {
        self.losses.push(loss);
        self.times.push(time);
        self.skipped += usize::from(skipped);
        self.scale = scale;
    }

    /// Ends an epoch of `steps` steps.
    pub(crate) fn epoch(&mut self, steps: usize, test_accuracy: f64) {
        self.epochs.push(Epoch { steps, loss: self.recent_loss(steps), test_accuracy });
    }

    /// Steps begun, skipped ones included.
    pub(crate) fn steps(&self) -> usize {
        self.losses.len()
    }

    /// The mean loss of the last `count` steps: one step's alone is noise.
    pub(crate) fn recent_loss(&self, count: usize) -> f64 {
        let last = &self.losses[self.steps().saturating_sub(count)..];
        last.iter().map(|&loss| f64::from(loss)).sum::<f64>() / last.len().max(1) as f64
    }

    pub(crate) fn median_step(&self) -> Duration {
        let mut times = self.times.clone();
        times.sort_unstable();
        times.get(times.len() / 2).copied().unwrap_or_default()
    }

    /// Steps a second over the last `count` steps; 0 before the first.
    pub(crate) fn rate(&self, count: usize) -> f64 {
        let last = &self.times[self.steps().saturating_sub(count)..];
        let seconds = last.iter().sum::<Duration>().as_secs_f64();
        if seconds > 0. { last.len() as f64 / seconds } else { 0. }
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
    fn the_history_counts_steps_and_those_skipped() {
        let mut history = History::default();
        assert_eq!(history.median_step(), Duration::ZERO);
        for (i, skipped) in [false, true, false].into_iter().enumerate() {
            let time = Duration::from_millis([30, 500, 70][i]);
            history.step([4., 3., 1.][i], time, skipped, 8.);
        }
        assert_eq!((history.steps(), history.skipped), (3, 1));
        assert_eq!(history.median_step(), Duration::from_millis(70));
        assert_eq!(history.recent_loss(2), 2.);
        assert!((history.rate(3) - 5.).abs() < 1e-9);
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
