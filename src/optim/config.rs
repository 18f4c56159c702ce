//! The settings of an optimizer, and the trait by which the one core of all optimizers reads them.

use std::fmt::Debug;

use crate::Result;
use crate::error::ArgumentError;
use crate::kernels::multi_tensor::optimizer::Rule;

/// The settings of one of this crate's optimizers: [`SgdConfig`](super::SgdConfig),
/// [`AdamWConfig`](super::AdamWConfig), [`LionConfig`](super::LionConfig) and
/// [`LambConfig`](super::LambConfig). Sealed.
#[expect(private_bounds, reason = "the formulas are the crate's own kernels")]
pub trait Config: Formula {}

impl<F: Formula> Config for F {}

/// A setting of a [`Formula`].
#[derive(Debug)]
pub(crate) enum Field<'a> {
    Number(&'a mut f64),
    Flag(&'a mut bool),
}

impl<'a> From<&'a mut f64> for Field<'a> {
    fn from(number: &'a mut f64) -> Self {
        Self::Number(number)
    }
}

impl<'a> From<&'a mut bool> for Field<'a> {
    fn from(flag: &'a mut bool) -> Self {
        Self::Flag(flag)
    }
}

pub(crate) trait Formula: Copy + Debug + PartialEq + Send + Sync + 'static {
    /// In errors and saved states.
    const NAME: &'static str;

    /// Whether the update of an element depends on that element alone, so that a part of a tensor is stepped like
    /// the whole.
    const ELEMENTWISE: bool = true;

    /// Every setting with its name; `lr` and `weight_decay` are among them.
    fn fields(&mut self) -> Vec<(&'static str, Field<'_>)>;

    fn validate(&self) -> Result<()>;

    /// The names of the states, in the order the rule has them.
    fn states(&self) -> &'static [&'static str];

    /// The `step`th step of a variable, counted from 1. `first` is true where its states are new.
    fn rule(&self, step: u64, first: bool) -> Rule;

    fn lr(&self) -> f64;

    fn with(mut self, name: &str, value: f64) -> Self {
        for (field, place) in self.fields() {
            match place {
                Field::Number(number) if field == name => *number = value,
                Field::Flag(flag) if field == name => *flag = value != 0.0,
                _ => {}
            }
        }
        self
    }

    /// The settings as numbers, a flag being 0 or 1.
    fn settings(mut self) -> Vec<(&'static str, f64)> {
        let number = |place| match place {
            Field::Number(number) => *number,
            Field::Flag(flag) => f64::from(u8::from(*flag)),
        };
        self.fields().into_iter().map(|(name, place)| (name, number(place))).collect()
    }
}

/// That a setting is in its range.
pub(crate) fn check(name: &'static str, got: f64, ok: bool, expected: &'static str) -> Result<()> {
    if ok { Ok(()) } else { Err(ArgumentError::Setting { name, got, expected }.into()) }
}

/// That all of these are numbers that `F32` has, in which optimizers compute, and not below zero.
pub(crate) fn check_settings<const N: usize>(settings: [(&'static str, f64); N]) -> Result<()> {
    settings.into_iter().try_for_each(|(name, got)| {
        let expected = "a number from 0 to 3.4e38, where F32 ends";
        check(name, got, got >= 0.0 && fits_f32(got), expected)
    })
}

/// Whether it is finite in `F32`.
pub(crate) fn fits_f32(number: f64) -> bool {
    (number as f32).is_finite()
}

/// That what a rule makes of the learning rate is finite in `F32` too: its product with the weight
/// decay. So must be the first step's size, for rules that correct the bias of a mean.
pub(crate) fn check_lr(lr: f64, weight_decay: f64, beta1: f64) -> Result<()> {
    let expected = "a rate whose product with weight_decay ends below 3.4e38, where F32 ends";
    check("lr", lr, fits_f32(lr * weight_decay), expected)?;
    let expected = "a rate that divided by 1 - beta1 ends below 3.4e38, where F32 ends";
    check("lr", lr, fits_f32(lr / (1.0 - beta1)), expected)
}

/// [`check_lr`], and that Adam's other settings are what they can be.
pub(crate) fn check_adam(lr: f64, betas: [f64; 2], eps: f64, weight_decay: f64) -> Result<()> {
    check_settings([("lr", lr), ("eps", eps), ("weight_decay", weight_decay)])?;
    check_fractions([("beta1", betas[0]), ("beta2", betas[1])])?;
    check_lr(lr, weight_decay, betas[0])
}

/// That all of these are finite and not below zero.
pub(crate) fn check_not_negative<const N: usize>(settings: [(&'static str, f64); N]) -> Result<()> {
    settings.into_iter().try_for_each(|(name, got)| {
        check(name, got, got >= 0.0 && got.is_finite(), "a finite number, not below zero")
    })
}

/// That all of these are at least 0 and below 1.
pub(crate) fn check_fractions<const N: usize>(settings: [(&'static str, f64); N]) -> Result<()> {
    settings.into_iter().try_for_each(|(name, got)| {
        check(name, got, (0.0..1.0).contains(&got), "a number from 0 to below 1")
    })
}
