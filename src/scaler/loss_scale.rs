//! The loss-scale rule as a state machine: no tensors, no device.

use crate::Result;
use crate::error::ArgumentError;

/// When the loss scale grows, how it backs off, and the range it stays in.
///
/// Factors and interval default to PyTorch's (`torch.amp.GradScaler`). PyTorch has no floor: 166
/// overflows in a row take its scale to zero, and the weights to NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct ScaleConfig {
    /// The first scale. Default `65536` (2¹⁶).
    pub init_scale: f32,
    /// Factor after `growth_interval` clean steps in a row; above 1. Default `2`.
    pub growth_factor: f64,
    /// Factor after a step with a non-finite gradient; between 0 and 1. Default `0.5`.
    pub backoff_factor: f64,
    /// Clean steps in a row between two growths; at least 1. Default `2000`.
    pub growth_interval: u32,
    /// The first `hysteresis - 1` overflows since the scale last grew skip their step and leave the scale; each later one lowers
    /// it, until it grows. Clean steps in between do not start the count anew. At least 1. Default `1`, as in PyTorch: the first
    /// backs off. Megatron-LM's `hysteresis`, there 2.
    #[cfg_attr(feature = "serde", serde(default = "one"))]
    pub hysteresis: u32,
    /// The scale never falls below this; at least [`f32::MIN_POSITIVE`], so that its inverse is
    /// finite. Default 2⁻²⁴.
    pub min_scale: f32,
    /// The scale never rises above this; finite. Default 2²⁴.
    pub max_scale: f32,
}

/// The hysteresis of settings that were saved before there was any.
#[cfg(feature = "serde")]
fn one() -> u32 {
    1
}

impl Default for ScaleConfig {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            hysteresis: 1,
            min_scale: 2f32.powi(-24),
            max_scale: 2f32.powi(24),
        }
    }
}

impl ScaleConfig {
    /// A scale that never moves: floor and ceiling meet at `scale`. Overflows are still skipped.
    pub fn constant(scale: f32) -> Self {
        Self { init_scale: scale, min_scale: scale, max_scale: scale, ..Self::default() }
    }

    fn validate(&self) -> Result<()> {
        let (growth, backoff) = (self.growth_factor, self.backoff_factor);
        let finite = "a finite number above 1";
        check("growth_factor", growth, growth > 1.0 && growth.is_finite(), finite)?;
        let fraction = "a number above 0 and below 1";
        check("backoff_factor", backoff, backoff > 0.0 && backoff < 1.0, fraction)?;
        let interval = self.growth_interval;
        check("growth_interval", interval.into(), interval >= 1, "at least 1 step")?;
        let hysteresis = self.hysteresis;
        check("hysteresis", hysteresis.into(), hysteresis >= 1, "at least 1 overflow")?;
        for (name, scale) in [
            ("min_scale", self.min_scale),
            ("max_scale", self.max_scale),
            ("init_scale", self.init_scale),
        ] {
            let ok = scale.is_normal() && scale > 0.0;
            check(name, scale.into(), ok, "a finite number, not below f32::MIN_POSITIVE")?;
        }
        order("min_scale", self.min_scale, "init_scale", self.init_scale)?;
        order("init_scale", self.init_scale, "max_scale", self.max_scale)
    }
}

fn check(name: &'static str, got: f64, ok: bool, expected: &'static str) -> Result<()> {
    if ok { Ok(()) } else { Err(ArgumentError::Setting { name, got, expected }.into()) }
}

fn order(low_name: &'static str, low: f32, high_name: &'static str, high: f32) -> Result<()> {
    match low <= high {
        true => Ok(()),
        false => {
            Err(ArgumentError::Order { low_name, low: low.into(), high_name, high: high.into() }
                .into())
        }
    }
}

/// The current loss scale, the clean steps since it last moved, and the overflows that were forgiven since it grew.
///
/// ```
/// use candle_amp::{LossScale, ScaleConfig};
///
/// let config = ScaleConfig { init_scale: 8.0, growth_interval: 2, ..Default::default() };
/// let scale = LossScale::new(config)?;
/// let scale = scale.after(false).after(false);
/// assert_eq!(scale.get(), 16.0); // two clean steps
/// let scale = scale.after(true);
/// assert_eq!(scale.get(), 8.0); // an overflow
/// # Ok::<(), candle_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Unchecked"))]
pub struct LossScale {
    config: ScaleConfig,
    scale: f32,
    growth_tracker: u32,
    hysteresis_tracker: u32,
}

/// A [`LossScale`] that nobody has checked yet.
#[cfg(feature = "serde")]
#[derive(serde::Deserialize)]
struct Unchecked {
    config: ScaleConfig,
    scale: f32,
    growth_tracker: u32,
    #[serde(default)]
    hysteresis_tracker: u32,
}

#[cfg(feature = "serde")]
impl TryFrom<Unchecked> for LossScale {
    type Error = crate::Error;

    fn try_from(saved: Unchecked) -> Result<Self> {
        let trackers = [saved.growth_tracker, saved.hysteresis_tracker];
        Self::saved(saved.config, saved.scale, trackers)
    }
}

impl LossScale {
    /// The state before the first step.
    ///
    /// # Errors
    ///
    /// A factor, interval, floor or ceiling outside the range its field names.
    pub fn new(config: ScaleConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self { config, scale: config.init_scale, growth_tracker: 0, hysteresis_tracker: 0 })
    }

    /// A state as saved: `config`, the current `scale`, and the clean steps since it moved. With a
    /// hysteresis above 1, [`with_hysteresis_tracker`](Self::with_hysteresis_tracker) belongs to it.
    ///
    /// `config` may be another than the state was saved with. Where its interval is shorter than
    /// `growth_tracker`, the next clean step grows, and the tracker is the last before that.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and a `scale` outside the floor and the ceiling.
    pub fn restore(config: ScaleConfig, scale: f32, growth_tracker: u32) -> Result<Self> {
        config.validate()?;
        let number = "a finite number, not below f32::MIN_POSITIVE";
        check("scale", scale.into(), scale.is_normal() && scale > 0.0, number)?;
        order("min_scale", config.min_scale, "scale", scale)?;
        order("scale", scale, "max_scale", config.max_scale)?;
        let growth_tracker = growth_tracker.min(config.growth_interval - 1);
        Ok(Self { config, scale, growth_tracker, hysteresis_tracker: 0 })
    }

    /// The same state, with this many overflows forgiven since the scale last grew; of more than
    /// its hysteresis has room for, all that there is room for.
    #[must_use]
    pub fn with_hysteresis_tracker(self, forgiven: u32) -> Self {
        let hysteresis_tracker = forgiven.min(self.config.hysteresis - 1);
        Self { hysteresis_tracker, ..self }
    }

    /// A state as it was saved with this `config`, growth tracker and hysteresis tracker. No state
    /// has a tracker at its limit, so one that does was not saved.
    pub(crate) fn saved(
        config: ScaleConfig,
        scale: f32,
        [growth, hysteresis]: [u32; 2],
    ) -> Result<Self> {
        let state = Self::restore(config, scale, growth)?.with_hysteresis_tracker(hysteresis);
        let limit = "less than growth_interval";
        check("growth_tracker", growth.into(), growth == state.growth_tracker, limit)?;
        let limit = "less than hysteresis";
        let fits = hysteresis == state.hysteresis_tracker;
        check("hysteresis_tracker", hysteresis.into(), fits, limit)?;
        Ok(state)
    }

    /// The rule it follows.
    pub fn config(&self) -> &ScaleConfig {
        &self.config
    }

    /// The factor the next loss is multiplied by: finite, normal and above zero.
    pub fn get(&self) -> f32 {
        self.scale
    }

    /// `1 / scale`, finite, taken in `f64` and rounded once.
    pub fn inverse(&self) -> f32 {
        (1.0 / f64::from(self.scale)) as f32
    }

    /// Clean steps since the last overflow or growth.
    pub fn growth_tracker(&self) -> u32 {
        self.growth_tracker
    }

    /// Overflows forgiven since the scale last grew; always below the hysteresis.
    pub fn hysteresis_tracker(&self) -> u32 {
        self.hysteresis_tracker
    }

    /// Whether the scale can back off no further, though it can move.
    pub(crate) fn is_at_floor(&self) -> bool {
        self.scale <= self.config.min_scale && self.config.min_scale < self.config.max_scale
    }

    /// The state after a step in which a gradient was non-finite (`found_inf`) or none was.
    ///
    /// | `found_inf` | scale | growth tracker | hysteresis tracker |
    /// |---|---|---|---|
    /// | `true` | stays for the first `hysteresis - 1`; then `× backoff_factor`, not below `min_scale` | 0 | counts those |
    /// | `false` | `× growth_factor`, not above `max_scale`, once `growth_interval` clean steps are reached | counts, 0 on growth | 0 on growth |
    ///
    /// Products are taken in `f64` and rounded to `f32`, as in PyTorch's `_amp_update_scale_`.
    /// Growth is due *from* `growth_interval` on, so that a shorter interval taken over mid-run
    /// cannot be stepped past.
    #[must_use]
    pub fn after(self, found_inf: bool) -> Self {
        let ScaleConfig { growth_factor, backoff_factor, growth_interval, hysteresis, .. } =
            self.config;
        let moved = |factor: f64| {
            let scale = (f64::from(self.scale) * factor) as f32;
            scale.clamp(self.config.min_scale, self.config.max_scale)
        };
        let clean_steps = self.growth_tracker.saturating_add(1);
        if found_inf {
            if self.hysteresis_tracker.saturating_add(1) < hysteresis {
                let hysteresis_tracker = self.hysteresis_tracker + 1;
                return Self { growth_tracker: 0, hysteresis_tracker, ..self };
            }
            Self { scale: moved(backoff_factor), growth_tracker: 0, ..self }
        } else if clean_steps >= growth_interval {
            Self { scale: moved(growth_factor), growth_tracker: 0, hysteresis_tracker: 0, ..self }
        } else {
            Self { growth_tracker: clean_steps, ..self }
        }
    }
}
