//! Learning rates over a run.
//!
//! Rules without tensors: how much of the learning rate there is after so many steps.

use std::f64::consts::PI;

use super::config::{check, check_fractions, check_not_negative};
use crate::Result;

/// How the learning rate goes, as a factor of the one the optimizer was made with.
///
/// All are pure: [`factor`](Self::factor) depends on the number of steps taken and nothing else.
/// PyTorch's schedules are given as formulas of the base rate; divide an absolute rate (`eta_min`,
/// `max_lr`) by it.
///
/// ```
/// use candle_amp::optim::Schedule;
///
/// let schedule = Schedule::cosine(100).with_warm_up(10);
/// assert_eq!(schedule.factor(0), 1.0 / 11.0);
/// assert_eq!(schedule.factor(10), 1.0); // warmed up
/// assert!((schedule.factor(60) - 0.5).abs() < 1e-12); // half way down
/// assert_eq!(schedule.factor(110), 0.0);
/// ```
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Schedule {
    /// Steps of a linear rise before the rest begins: the `n`th of `warm_up` has `n / (warm_up + 1)`
    /// of the rate. 0 for none, the default.
    pub warm_up: u64,
    /// What follows, its steps counted from the end of the warm-up.
    pub shape: ScheduleShape,
}

/// The shape of a [`Schedule`], once warmed up.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum ScheduleShape {
    /// Always 1.
    Constant,
    /// Half a cosine from 1 to `end` over `steps`, and `end` from there on. PyTorch's
    /// `CosineAnnealingLR` with `T_max = steps` and `eta_min = end * lr`, which rises again after
    /// `T_max`.
    Cosine {
        /// Steps from 1 to `end`.
        steps: u64,
        /// The factor at the end.
        end: f64,
    },
    /// A straight line from 1 to `end` over `steps`, and `end` from there on. PyTorch's `LinearLR` with
    /// `start_factor = 1`, `end_factor = end` and `total_iters = steps`.
    Linear {
        /// Steps from 1 to `end`.
        steps: u64,
        /// The factor at the end.
        end: f64,
    },
    /// Up and down again in one cycle: from `1 / div_factor` to 1 over the first `pct_start` of
    /// `steps`, and to `1 / (div_factor * final_div_factor)` at the last, each along half a cosine.
    /// PyTorch's `OneCycleLR` with `max_lr = lr`, two phases and `cos` annealing; momentum is left
    /// alone, as with `cycle_momentum=False`. PyTorch refuses a step after the last; here the rate
    /// stays.
    OneCycle {
        /// Steps in all; the last one has the smallest rate.
        steps: u64,
        /// The share of them that goes up. PyTorch's default is 0.3.
        pct_start: f64,
        /// How much smaller the first rate is than the largest. PyTorch's default is 25.
        div_factor: f64,
        /// How much smaller the last rate is than the first. PyTorch's default is 1e4.
        final_div_factor: f64,
    },
    /// Times `gamma` after every `size` steps. PyTorch's `StepLR`.
    Step {
        /// Steps between two falls.
        size: u64,
        /// The factor of a fall.
        gamma: f64,
    },
    /// Times `gamma` at each of `milestones`, ascending. PyTorch's `MultiStepLR`.
    MultiStep {
        /// Steps at which the rate falls.
        milestones: Vec<u64>,
        /// The factor of a fall.
        gamma: f64,
    },
}

impl Schedule {
    /// [`ScheduleShape::Constant`].
    pub fn constant() -> Self {
        Self { warm_up: 0, shape: ScheduleShape::Constant }
    }

    /// [`ScheduleShape::Cosine`] to 0 in `steps`, a warm-up not counted.
    pub fn cosine(steps: u64) -> Self {
        Self { warm_up: 0, shape: ScheduleShape::Cosine { steps, end: 0.0 } }
    }

    /// [`ScheduleShape::Linear`] to 0 in `steps`, a warm-up not counted. With a warm-up it is a triangle.
    pub fn linear(steps: u64) -> Self {
        Self { warm_up: 0, shape: ScheduleShape::Linear { steps, end: 0.0 } }
    }

    /// [`ScheduleShape::OneCycle`] of `steps`, with PyTorch's defaults.
    pub fn one_cycle(steps: u64) -> Self {
        let (pct_start, div_factor, final_div_factor) = (0.3, 25.0, 1e4);
        let shape = ScheduleShape::OneCycle { steps, pct_start, div_factor, final_div_factor };
        Self { warm_up: 0, shape }
    }

    /// [`ScheduleShape::Step`]: times `gamma` after every `size` steps.
    pub fn step(size: u64, gamma: f64) -> Self {
        Self { warm_up: 0, shape: ScheduleShape::Step { size, gamma } }
    }

    /// [`ScheduleShape::MultiStep`]: times `gamma` at each of `milestones`.
    pub fn multi_step(milestones: Vec<u64>, gamma: f64) -> Self {
        Self { warm_up: 0, shape: ScheduleShape::MultiStep { milestones, gamma } }
    }

    /// The same after `steps` of a linear rise.
    #[must_use]
    pub fn with_warm_up(self, steps: u64) -> Self {
        Self { warm_up: steps, ..self }
    }

    /// The factor after `taken` steps: that of the first step is `factor(0)`.
    pub fn factor(&self, taken: u64) -> f64 {
        if taken < self.warm_up {
            return (taken as f64 + 1.0) / (self.warm_up as f64 + 1.0);
        }
        self.shape.factor(taken - self.warm_up)
    }

    pub(super) fn validate(&self) -> Result<()> {
        let some = |name, steps: u64| check(name, steps as f64, steps > 0, "at least 1");
        match &self.shape {
            ScheduleShape::Constant => Ok(()),
            ScheduleShape::Cosine { steps, end } | ScheduleShape::Linear { steps, end } => {
                some("steps", *steps)?;
                check_not_negative([("end", *end)])
            }
            ScheduleShape::OneCycle { steps, pct_start, div_factor, final_div_factor } => {
                some("steps", *steps)?;
                check_fractions([("pct_start", *pct_start)])?;
                for (name, x) in
                    [("div_factor", div_factor), ("final_div_factor", final_div_factor)]
                {
                    check(name, *x, *x > 0.0 && x.is_finite(), "a finite number above 0")?;
                }
                Ok(())
            }
            ScheduleShape::Step { size, gamma } => {
                some("size", *size)?;
                check_not_negative([("gamma", *gamma)])
            }
            ScheduleShape::MultiStep { milestones, gamma } => {
                let fall = milestones.windows(2).find(|pair| pair[0] > pair[1]);
                let at = fall.map_or(0.0, |pair| pair[1] as f64);
                check("milestones", at, fall.is_none(), "steps in ascending order")?;
                check_not_negative([("gamma", *gamma)])
            }
        }
    }
}

/// Half a cosine from `from` to `to`.
fn anneal(from: f64, to: f64, progress: f64) -> f64 {
    to + (from - to) / 2.0 * (1.0 + (PI * progress).cos())
}

impl ScheduleShape {
    fn factor(&self, taken: u64) -> f64 {
        match self {
            Self::Constant => 1.0,
            Self::Cosine { steps, end } => {
                if taken >= *steps {
                    *end
                } else {
                    anneal(1.0, *end, taken as f64 / *steps as f64)
                }
            }
            Self::Linear { steps, end } => {
                if taken >= *steps {
                    *end
                } else {
                    1.0 + (end - 1.0) * taken as f64 / *steps as f64
                }
            }
            Self::OneCycle { steps, pct_start, div_factor, final_div_factor } => {
                let (start, last) = (1.0 / div_factor, steps.saturating_sub(1) as f64);
                let (end, taken) = (start / final_div_factor, (taken as f64).min(last));
                // PyTorch's: where the two phases end, the first one between two steps as a rule.
                let top = pct_start * *steps as f64 - 1.0;
                let share = |part: f64, all: f64| if all > 0.0 { part / all } else { 1.0 };
                if taken <= top {
                    anneal(start, 1.0, share(taken, top))
                } else {
                    anneal(1.0, end, share(taken - top, last - top))
                }
            }
            Self::Step { size, gamma } => gamma.powf((taken / size.max(&1)) as f64),
            Self::MultiStep { milestones, gamma } => {
                let passed = milestones.iter().filter(|&&milestone| milestone <= taken).count();
                gamma.powf(passed as f64)
            }
        }
    }
}
