//! What a run measures, step by step.

use std::time::Duration;

/// Everything that was measured step by step.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    /// The loss of every step, skipped or not.
    pub(crate) losses: Vec<f32>,
    pub(crate) times: Vec<Duration>,
    pub(crate) skipped: usize,
    /// The loss scale after the last step.
    pub(crate) scale: f32,
}

impl Steps {
    pub(crate) fn add(&mut self, loss: f32, time: Duration, skipped: bool, scale: f32) {
        self.losses.push(loss);
        self.times.push(time);
        self.skipped += usize::from(skipped);
        self.scale = scale;
    }

    /// Steps begun, skipped ones included.
    pub(crate) fn count(&self) -> usize {
        self.losses.len()
    }

    /// The mean loss of the last `count` steps: one step's alone is noise.
    pub(crate) fn recent_loss(&self, count: usize) -> f64 {
        let last = &self.losses[self.count().saturating_sub(count)..];
        last.iter().map(|&loss| f64::from(loss)).sum::<f64>() / last.len().max(1) as f64
    }

    /// The time the last `count` steps took.
    pub(crate) fn seconds(&self, count: usize) -> f64 {
        let last = &self.times[self.count().saturating_sub(count)..];
        last.iter().sum::<Duration>().as_secs_f64()
    }

    /// Steps a second over the last `count` steps; 0 before the first.
    pub(crate) fn rate(&self, count: usize) -> f64 {
        let seconds = self.seconds(count);
        if seconds > 0. { self.count().min(count) as f64 / seconds } else { 0. }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_counts_steps_and_those_skipped() {
        let mut steps = Steps::default();
        assert_eq!((steps.recent_loss(5), steps.rate(5)), (0., 0.));
        for (i, skipped) in [false, true, false].into_iter().enumerate() {
            let time = Duration::from_millis([30, 500, 70][i]);
            steps.add([4., 3., 1.][i], time, skipped, 8.);
        }
        assert_eq!((steps.count(), steps.skipped), (3, 1));
        assert_eq!(steps.recent_loss(2), 2.);
        assert!((steps.seconds(usize::MAX) - 0.6).abs() < 1e-9);
        assert!((steps.rate(3) - 5.).abs() < 1e-9);
    }
}
