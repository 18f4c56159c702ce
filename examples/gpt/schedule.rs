//! When a training looks at the held-out text.

/// The length of a training.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) steps: usize,
}

impl Schedule {
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
