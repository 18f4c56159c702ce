//! What a run measures step by step, and its learning rate on the way.

use std::time::Duration;

use candle_amp::optim;

/// Everything that was measured step by step.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The loss of every step, skipped or not.
    losses: Vec<f32>,
    times: Vec<Duration>,
    pub(crate) skipped: usize,
    /// The loss scale after the last step.
    pub(crate) scale: f32,
}

impl History {
    pub(crate) fn step(&mut self, loss: f32, time: Duration, skipped: bool, scale: f32) {
        self.losses.push(loss);
        self.times.push(time);
        self.skipped += usize::from(skipped);
        self.scale = scale;
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

    /// The time all steps took.
    pub(crate) fn seconds(&self) -> f64 {
        self.times.iter().sum::<Duration>().as_secs_f64()
    }

    /// Steps a second over the last `count` steps; 0 before the first.
    pub(crate) fn rate(&self, count: usize) -> f64 {
        let last = &self.times[self.steps().saturating_sub(count)..];
        let seconds = last.iter().sum::<Duration>().as_secs_f64();
        if seconds > 0. { last.len() as f64 / seconds } else { 0. }
    }
}

/// A cosine over all steps, after a linear warm-up over the first twentieth.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) steps: usize,
}

impl Schedule {
    /// The learning rate on the way.
    pub(crate) fn rates(&self) -> optim::Schedule {
        let warm_up = self.steps.div_ceil(20);
        let rest = self.steps.saturating_sub(warm_up).max(1);
        optim::Schedule::cosine(rest as u64).with_warm_up(warm_up as u64)
    }

    /// Whether to look at the held-out text after `steps` steps: five times a run, the last
    /// excepted, as it is looked at then in any case.
    pub(crate) fn pauses_after(&self, steps: usize) -> bool {
        steps < self.steps && steps.is_multiple_of(self.steps.div_ceil(5))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_history_counts_steps_and_those_skipped() {
        let mut history = History::default();
        assert_eq!((history.recent_loss(5), history.rate(5)), (0., 0.));
        for (i, skipped) in [false, true, false].into_iter().enumerate() {
            let time = Duration::from_millis([30, 500, 70][i]);
            history.step([4., 3., 1.][i], time, skipped, 8.);
        }
        assert_eq!((history.steps(), history.skipped), (3, 1));
        assert_eq!(history.recent_loss(2), 2.);
        assert!((history.seconds() - 0.6).abs() < 1e-9);
        assert!((history.rate(3) - 5.).abs() < 1e-9);
    }

    #[test]
    fn the_rate_warms_up_peaks_and_falls_to_nothing() {
        let schedule = Schedule { steps: 200 }.rates();
        let rates: Vec<f64> = (0..200).map(|taken| schedule.factor(taken)).collect();
        assert_eq!(rates[10], 1.);
        assert!(rates[..10].is_sorted() && rates[0] > 0.);
        assert!(rates[10..].is_sorted_by(|a, b| a > b) && rates[199] > 0.);
        assert!((rates[105] - 0.5).abs() < 1e-9, "{}", rates[105]);
        assert!(rates[199] < 2e-3);
        assert_eq!(Schedule { steps: 1 }.rates().factor(0), 0.5);
    }

    #[test]
    fn a_run_pauses_four_times_before_its_end() {
        let pauses = |steps| {
            let schedule = Schedule { steps };
            (1..=steps).filter(|&step| schedule.pauses_after(step)).collect::<Vec<_>>()
        };
        assert_eq!(pauses(500), [100, 200, 300, 400]);
        assert_eq!(pauses(6), [2, 4]);
        assert!(pauses(1).is_empty());
    }
}
