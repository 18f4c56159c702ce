//! Warnings about slow failures, through `tracing`.

use std::collections::HashSet;

use candle_core::{TensorId, Var};

use crate::autograd::is_frozen;
use crate::error::ArgumentError;
use crate::scaler::diagnostics::ScaleHistory;
use crate::{LossScale, Parameters, Result};

/// When a scaler warns, through `tracing`. Each warning comes once, and again only after its cause has gone and
/// come back; the last one once at most for each call of `watch`.
///
/// | it warns when | cured by |
/// |---|---|
/// | the scale is at its floor, which is not its ceiling, and a step overflows | a look at the loss and the weights: they are likely infinite themselves |
/// | `skipped` of the last `of_last` steps were skipped; not again before less than half of that were | the same, a lower learning rate, or `BF16` |
/// | `F16` gradients pass a disabled scaler | an enabled scaler, or `BF16` |
/// | a variable given to [`GradScaler::watch`](crate::GradScaler::watch) has had no gradient in `missing_after` updates | [`GradScaler::missing`](crate::GradScaler::missing), or freezing it on purpose |
///
/// `F16` gradients of this crate's operators under candle's own `backward`, without any scaler, are
/// warned of once per thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Warnings {
    /// Skipped steps among the last `of_last` that are worth a warning; at least 1. Default `25`:
    /// one more than a scale takes to settle, from 2¹⁶ down to 2⁻⁸.
    pub skipped: usize,
    /// How far back skipped steps are counted; at least `skipped`, and what the history has room
    /// for. Default `100`.
    pub of_last: usize,
    /// Updates that a watched variable may go without a gradient before the warning; at least 1. Default `100`.
    pub missing_after: u64,
}

impl Default for Warnings {
    fn default() -> Self {
        Self { skipped: 25, of_last: 100, missing_after: 100 }
    }
}

impl Warnings {
    fn validate(&self) -> Result<()> {
        let check = |name, got: f64, ok: bool, expected| match ok {
            true => Ok(()),
            false => Err(ArgumentError::Setting { name, got, expected }),
        };
        check("skipped", self.skipped as f64, self.skipped >= 1, "at least 1 step")?;
        check("missing_after", self.missing_after as f64, self.missing_after >= 1, "at least 1")?;
        match self.skipped <= self.of_last {
            true => Ok(()),
            false => Err(ArgumentError::Order {
                low_name: "skipped",
                low: self.skipped as f64,
                high_name: "of_last",
                high: self.of_last as f64,
            }
            .into()),
        }
    }
}

/// A condition that is reported once, and again after it was gone.
#[derive(Debug, Default)]
struct Alarm {
    reported: bool,
}

impl Alarm {
    /// Whether to report it now.
    fn sets_in(&mut self, now: bool, gone: bool) -> bool {
        self.reported &= !gone;
        now && !std::mem::replace(&mut self.reported, true)
    }
}

/// What a scaler remembers in order to warn.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    warnings: Warnings,
    history: ScaleHistory,
    floor: Alarm,
    skips: Alarm,
    f16: Alarm,
    missing: Option<Missing>,
}

#[derive(Debug)]
struct Missing {
    parameters: Parameters,
    /// Variables that never had a gradient.
    never: HashSet<TensorId>,
    updates: u64,
}

impl Watch {
    pub(crate) fn history(&self) -> &ScaleHistory {
        &self.history
    }

    pub(crate) fn set_warnings(&mut self, warnings: Warnings) -> Result<()> {
        warnings.validate()?;
        self.warnings = warnings;
        Ok(())
    }

    pub(crate) fn set_history(&mut self, history: ScaleHistory) {
        self.history = history;
    }

    pub(crate) fn set_parameters(&mut self, parameters: &Parameters) {
        let never = parameters.vars().iter().map(|var| var.id()).collect();
        self.missing = Some(Missing { parameters: parameters.clone(), never, updates: 0 });
    }

    /// After a backward pass through a scaler.
    pub(crate) fn after_backward(&mut self, f16: bool, enabled: bool) {
        let unscaled = f16 && !enabled;
        if self.f16.sets_in(unscaled, !unscaled) {
            tracing::warn!(
                "F16 gradients without a loss scale: those below 2^-25 become zero; enable the \
                 scaler, or compute in BF16"
            );
        }
    }

    /// Before the gradients of an iteration are forgotten.
    pub(crate) fn after_update(&mut self, scale: Option<LossScale>, skipped: bool) {
        if let Some(scale) = scale {
            self.history.push(scale.get(), skipped);
            self.tell_of_skips(scale, skipped);
        }
    }

    /// Notes which variables have a gradient.
    pub(crate) fn saw(&mut self, variables: impl Iterator<Item = TensorId>) {
        if let Some(missing) = &mut self.missing {
            missing.after_step(variables, self.warnings.missing_after);
        }
    }

    fn tell_of_skips(&mut self, scale: LossScale, skipped: bool) {
        // A clean step at the floor is no cure: the scale has to leave it.
        let floor = scale.is_at_floor();
        if self.floor.sets_in(skipped && floor, !floor) {
            tracing::warn!(
                scale = f64::from(scale.get()),
                "the loss scale is at its floor and gradients still overflow: the loss or the \
                 weights are likely infinite or NaN themselves"
            );
        }
        let Warnings { skipped: limit, of_last, .. } = self.warnings;
        let count = self.history.skipped_of_last(of_last);
        if self.skips.sets_in(count >= limit, 2 * count < limit) {
            tracing::warn!(
                skipped = count,
                of_last,
                scale = f64::from(scale.get()),
                "many steps are skipped: the scale cannot settle; look at the overflow reports"
            );
        }
    }
}

impl Missing {
    fn after_step(&mut self, variables: impl Iterator<Item = TensorId>, limit: u64) {
        if self.never.is_empty() {
            return;
        }
        for id in variables {
            self.never.remove(&id);
        }
        self.updates += 1;
        if self.updates == limit {
            let never = |var: &Var| self.never.contains(&var.id()) && !is_frozen(var);
            let never = self.parameters.iter().filter(|(_, var)| never(var));
            let names: Vec<_> = never.map(|(name, _)| name).collect();
            if names.is_empty() {
                return;
            }
            tracing::warn!(
                variables = names.join(", "),
                updates = limit,
                "variables never got a gradient: unused, or behind an operator that cuts gradients"
            );
        }
    }
}
