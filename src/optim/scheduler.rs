//! A schedule in a run: it counts the steps that were taken, and not those that a scaler skipped, and
//! sets the learning rate of any optimizer.

use candle_nn::Optimizer;

use super::config::{Config, check_settings};
use super::{Optim, Schedule};
use crate::{MasterWeights, Result, StepOutcome};

/// An optimizer with a learning rate: every `candle_nn::Optimizer`, this crate's, and
/// [`MasterWeights`].
pub trait LearningRate {
    /// The learning rate; of the first group, where there are groups.
    fn learning_rate(&self) -> f64;

    /// Sets it; [`Optim`] moves other groups in proportion.
    fn set_learning_rate(&mut self, learning_rate: f64);
}

impl<O: Optimizer> LearningRate for O {
    fn learning_rate(&self) -> f64 {
        Optimizer::learning_rate(self)
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        Optimizer::set_learning_rate(self, learning_rate)
    }
}

impl<C: Config> LearningRate for Optim<C> {
    fn learning_rate(&self) -> f64 {
        self.learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.set_learning_rate(learning_rate)
    }
}

impl<O: Optimizer> LearningRate for MasterWeights<O> {
    fn learning_rate(&self) -> f64 {
        self.learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.set_learning_rate(learning_rate)
    }
}

/// A [`Schedule`] in a run: it counts the steps, skipped ones not, and sets the learning rate.
///
/// ```
/// use candle_amp::optim::{AdamW, AdamWConfig, Schedule, Scheduler};
/// use candle_amp::{GradScaler, ops};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::ones(2, DType::F32, &Device::Cpu)?;
/// let mut adamw = AdamW::new(vec![w.clone()], AdamWConfig { lr: 0.1, ..Default::default() })?;
/// let mut scheduler = Scheduler::new(Schedule::cosine(100).with_warm_up(3), &mut adamw)?;
/// let mut scaler = GradScaler::default();
/// for scale in [1.0, f64::INFINITY] {
///     scaler.scale(&(ops::mean(&w)? * scale)?)?.backward()?;
///     let outcome = scaler.step(&mut adamw)?;
///     scheduler.step(&outcome, &mut adamw)?;
///     scaler.update()?;
///     assert_eq!(adamw.learning_rate(), 0.05); // the second step was skipped
/// }
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # Beside others
///
/// A rate that something else has set since, [`ReduceOnPlateau`](super::ReduceOnPlateau) or another scheduler for one,
/// counts as a factor on all that follow: the next step multiplies [`base_lr`](Self::base_lr) by it. So schedules can be
/// chained, as PyTorch's can. A scheduler that was loaded or resumed since does not know of such a change: let it take
/// one more step before it is saved.
///
/// To save one, save [`taken`](Self::taken), or the whole with the feature `serde`;
/// [`resume`](Self::resume) goes on from there.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "SavedSchedule", try_from = "SavedSchedule"))]
pub struct Scheduler {
    schedule: Schedule,
    base_lr: f64,
    /// With the last step, if that is `late`.
    taken: u64,
    /// The last step, if it was left to a GPU whether it was taken.
    late: Option<StepOutcome>,
    /// The rate that it set last. An optimizer with another one has it from somebody else.
    set: Option<f64>,
}

impl PartialEq for Scheduler {
    fn eq(&self, other: &Self) -> bool {
        let key = |s: &Self| (s.base_lr, s.taken());
        self.schedule == other.schedule && key(self) == key(other)
    }
}

/// What is saved of one.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
struct SavedSchedule {
    schedule: Schedule,
    base_lr: f64,
    taken: u64,
}

#[cfg(feature = "serde")]
impl From<Scheduler> for SavedSchedule {
    fn from(scheduler: Scheduler) -> Self {
        let taken = scheduler.taken();
        Self { schedule: scheduler.schedule, base_lr: scheduler.base_lr, taken }
    }
}

#[cfg(feature = "serde")]
impl TryFrom<SavedSchedule> for Scheduler {
    type Error = crate::Error;

    fn try_from(SavedSchedule { schedule, base_lr, taken }: SavedSchedule) -> Result<Self> {
        Self::at(schedule, base_lr, taken)
    }
}

impl Scheduler {
    /// Starts `schedule` from the learning rate that `optimizer` has, and sets that of the first
    /// step.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`](crate::error::ArgumentError::Setting) for a number outside its range.
    pub fn new(schedule: Schedule, optimizer: &mut impl LearningRate) -> Result<Self> {
        let mut scheduler = Self::at(schedule, optimizer.learning_rate(), 0)?;
        scheduler.set(optimizer);
        Ok(scheduler)
    }

    /// Goes on after `taken` steps of a run that began with the learning rate `base_lr`, and sets
    /// that of the next step.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn resume(
        schedule: Schedule,
        base_lr: f64,
        taken: u64,
        optimizer: &mut impl LearningRate,
    ) -> Result<Self> {
        let mut scheduler = Self::at(schedule, base_lr, taken)?;
        scheduler.set(optimizer);
        Ok(scheduler)
    }

    /// As [`resume`](Self::resume), of an optimizer that has its learning rate.
    pub(crate) fn at(schedule: Schedule, base_lr: f64, taken: u64) -> Result<Self> {
        schedule.validate()?;
        check_settings([("base_lr", base_lr)])?;
        Ok(Self { schedule, base_lr, taken, late: None, set: None })
    }

    fn set(&mut self, optimizer: &mut impl LearningRate) {
        let rate = self.learning_rate();
        optimizer.set_learning_rate(rate);
        self.set = Some(rate);
    }

    /// Takes over what somebody else has made of the rate.
    fn take_over(&mut self, now: f64) {
        /// Beyond what an optimizer that keeps its rate in `F32` makes of it.
        const CHANGED: f64 = 1e-6;
        let Some(set) = self.set else { return };
        if (now - set).abs() <= CHANGED * set.abs() {
            return;
        }
        self.base_lr = if set == 0.0 { now } else { self.base_lr * (now / set) };
    }

    /// After a step of a scaler: counts it if it was taken, and sets the next learning rate.
    ///
    /// # Synchronisation
    ///
    /// A step that a GPU decides counts as taken until the next call, which reads the flag: it waits for what has been launched
    /// by then. After a skipped step the schedule is one step ahead, once, also where [`StepOutcome::skipped`] was read
    /// before. Otherwise none.
    ///
    /// # Errors
    ///
    /// Those of [`StepOutcome::skipped`].
    pub fn step(&mut self, outcome: &StepOutcome, optimizer: &mut impl LearningRate) -> Result<()> {
        if let Some(late) = &self.late {
            self.taken -= u64::from(late.skipped()?);
            self.late = None;
        }
        // Nor does it matter whether somebody has read it by now: the ranks of a run need one rate.
        let is_late = outcome.is_left_to_device();
        let taken = is_late || !outcome.skipped()?;
        self.late = is_late.then(|| outcome.clone());
        self.after(taken, optimizer);
        Ok(())
    }

    /// The same where no scaler is: `taken` says whether the step was taken.
    pub fn after(&mut self, taken: bool, optimizer: &mut impl LearningRate) {
        self.take_over(optimizer.learning_rate());
        self.taken = self.taken.saturating_add(u64::from(taken));
        self.set(optimizer);
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.base_lr * self.schedule.factor(self.taken)
    }

    /// How many steps were taken. Waits for the last one, where a GPU has yet to decide it.
    pub fn taken(&self) -> u64 {
        let skipped = self.late.as_ref().is_some_and(|late| late.skipped().unwrap_or(false));
        self.taken - u64::from(skipped)
    }

    /// What the factors are taken of: the rate that the optimizer had at first, and what [others](Self#beside-others) have
    /// made of it since.
    pub fn base_lr(&self) -> f64 {
        self.base_lr
    }

    /// The rule it follows.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }
}
