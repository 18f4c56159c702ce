//! The core all optimizers share.

use std::collections::{HashMap, HashSet};

use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor, TensorId};

use super::AsCandle;
use super::config::{Config, check};
use super::masters::Masters;
use super::parameters::{Group, Variables};
use super::slot::{Slot, label};
use crate::autograd::version;
use crate::error::{ArgumentError, OptimizerError};
use crate::kernels;
use crate::kernels::multi_tensor::Multiplier;
use crate::{Error, Result};

/// An optimizer of this crate: [`Sgd`](super::Sgd), [`AdamW`](super::AdamW), [`Lion`](super::Lion)
/// and [`Lamb`](super::Lamb) are this with settings of their own.
///
/// # Precision
///
/// Arithmetic is `F32`, whatever the dtype of variable and gradient, and `F64` for `F64` variables.
/// State is the same, or `BF16`. A 16-bit variable has a master, from which it is rewritten, rounded
/// once, in the same pass; see [`Masters`]. In a formula a sum with a product is one fused
/// multiply-add, as in PyTorch's CPU kernels (on other devices, candle's two operations). Results do
/// not depend on the number of threads.
///
/// # Synchronisation
///
/// None on a CPU or on CUDA, except that the first step after this crate has written a 16-bit variable with an `F32` master
/// reads that variable. On another GPU, LAMB's norms, remainders and stochastic rounding go through
/// the host.
///
/// # State
///
/// Masters and states are made at a variable's first step: what is written to a variable before
/// (loaded weights) counts. What is written later to a 16-bit variable with an `F32` master would be lost. Where this crate
/// has written it (a checkpoint, an average), the next step is
/// [`OptimizerError::StaleMaster`], until [`reload_masters`](Self::reload_masters) takes the masters from the variables.
/// The crate cannot detect candle's `Var::set` and `VarMap::load`: call it after them too. A variable without a gradient is
/// left alone, and its step is not counted.
///
/// # Groups
///
/// [`from_groups`](Self::from_groups) takes parameters in groups with settings of their own.
/// [`learning_rate`](Self::learning_rate) is the first group's.
/// [`set_learning_rate`](Self::set_learning_rate) sets the first group's and moves the others in
/// proportion to those they were made with, so that a schedule keeps them apart.
///
/// # As an optimizer of candle's
///
/// It implements [`Step`](crate::optim::Step), not candle's trait, so that [`GradScaler::step`] can hand it `F32`
/// gradients of 16-bit variables. [`as_candle`](Self::as_candle) and [`AsCandle`] are for code that
/// asks for candle's.
///
/// [`GradScaler::step`]: crate::GradScaler::step
///
/// # Examples
///
/// ```
/// use candle_amp::Parameters;
/// use candle_amp::optim::{AdamW, AdamWConfig, Group, Masters};
/// use candle_core::{DType, Device, Var};
///
/// let w = Var::ones((2, 2), DType::BF16, &Device::Cpu)?;
/// let parameters = Parameters::named([("w", w.clone())])?;
/// let config = AdamWConfig { lr: 1e-4, ..Default::default() };
/// let mut adamw = AdamW::new(&parameters, config)?.with_masters(Masters::Remainder)?;
/// for _ in 0..100 {
///     // 1 - 1e-4 is 1 in BF16.
///     adamw.backward_step(&w.to_dtype(DType::F32)?.sum_all()?)?;
/// }
/// let exact = adamw.master(&w)?.expect("it is one of the optimizer's");
/// assert!((exact.flatten_all()?.to_vec1::<f32>()?[0] - 0.9899).abs() < 1e-4);
/// # Ok::<(), candle_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct Optim<C> {
    pub(super) groups: Vec<GroupSettings<C>>,
    pub(super) slots: Vec<Slot>,
    pub(super) masters: Masters,
    pub(super) state_dtype: DType,
    /// Where the variables' memory is: a gradient that shares it is copied first.
    pub(super) addresses: Vec<usize>,
    /// `U32` on a GPU: how many steps of each slot were skipped there, of those it counts.
    pub(super) skips: Option<Tensor>,
    /// How many steps have drawn the random bits that all ranks have.
    pub(super) common_draws: u64,
}

/// The settings of a group.
#[derive(Debug)]
pub(super) struct GroupSettings<C> {
    pub(super) config: C,
    /// What a schedule's factor is taken of.
    pub(super) base_lr: f64,
}

impl<C: Config> Optim<C> {
    /// An optimizer of `parameters`, a `Vec<Var>` or [`Parameters`](crate::Parameters); repeated
    /// ones count once, integers are left out.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`] for a setting outside its range; [`ArgumentError::DType`] for a float that is not
    /// `F16`, `BF16`, `F32` or `F64`.
    pub fn new(parameters: impl Into<Variables>, config: C) -> Result<Self> {
        Self::from_groups(vec![Group::new(parameters, config)])
    }

    /// An optimizer of groups with settings of their own.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new); [`OptimizerError::TwoGroups`] for a variable that is in two of them,
    /// [`ArgumentError::DuplicateName`] for two variables of one name.
    pub fn from_groups(groups: Vec<Group<C>>) -> Result<Self> {
        let (mut slots, mut settings) = (Vec::new(), Vec::new());
        let current = version::tick();
        let mut seen: HashMap<TensorId, usize> = HashMap::new();
        let mut names = HashSet::new();
        for (group, Group { parameters: Variables(variables), config }) in
            groups.into_iter().enumerate()
        {
            config.validate()?;
            settings.push(GroupSettings { config, base_lr: config.lr() });
            for (number, (name, variable)) in variables.into_iter().enumerate() {
                match seen.insert(variable.id(), group) {
                    Some(first) if first == group => continue,
                    Some(_) => {
                        return Err(OptimizerError::TwoGroups {
                            variable: label(name.as_deref(), number),
                        }
                        .into());
                    }
                    None => {}
                }
                if let Some(name) = &name
                    && !names.insert(name.clone())
                {
                    return Err(ArgumentError::DuplicateName { name: name.clone() }.into());
                }
                match variable.dtype() {
                    DType::F16 | DType::BF16 | DType::F32 | DType::F64 => {}
                    got if got.is_float() => return Err(dtype::<C>("a variable", got)),
                    _ => continue,
                }
                let (master, states) = (None, Vec::new());
                slots.push(Slot { name, variable, group, steps: 0, master, states, current });
            }
        }
        let mut addresses: Vec<usize> =
            slots.iter().map(|slot| kernels::place(&slot.variable)).collect();
        addresses.sort_unstable();
        let (masters, state_dtype) = (Masters::F32, DType::F32);
        let (skips, common_draws) = (None, 0);
        Ok(Self { groups: settings, slots, masters, state_dtype, addresses, skips, common_draws })
    }

    /// The same with another way to keep 16-bit variables.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Remainder`] for [`Masters::Remainder`] where a variable is F16;
    /// [`OptimizerError::AfterFirstStep`].
    pub fn with_masters(mut self, masters: Masters) -> Result<Self> {
        self.before_the_first_step("with_masters")?;
        let f16 = self.slots.iter().position(|slot| slot.variable.dtype() == DType::F16);
        match f16 {
            Some(number) if masters == Masters::Remainder => {
                let variable = label(self.slots[number].name.as_deref(), number);
                return Err(OptimizerError::Remainder { variable, got: DType::F16 }.into());
            }
            _ => self.masters = masters,
        }
        Ok(self)
    }

    /// The same with state in `dtype`, `F32` or `BF16`; that of `F64` variables stays `F64`.
    ///
    /// BF16 state is rounded at random, as [`Masters::Stochastic`] does with weights: AdamW's second
    /// moment changes by a thousandth at a step, and BF16 has 128 numbers between powers of two, so
    /// that rounded to nearest it would stop.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::DType`], [`OptimizerError::AfterFirstStep`].
    pub fn with_state_dtype(mut self, dtype: DType) -> Result<Self> {
        self.before_the_first_step("with_state_dtype")?;
        if !matches!(dtype, DType::F32 | DType::BF16) {
            let (op, name, expected) = (C::NAME, "state", "F32 or BF16".to_owned());
            return Err(ArgumentError::DType { op, name, got: dtype, expected }.into());
        }
        self.state_dtype = dtype;
        Ok(self)
    }

    fn before_the_first_step(&self, call: &'static str) -> Result<()> {
        match self.slots.iter().all(|slot| slot.steps == 0) {
            true => Ok(()),
            false => Err(OptimizerError::AfterFirstStep { call }.into()),
        }
    }

    /// Steps with gradients keyed by the model's variables, in any floating-point dtype.
    ///
    /// # Errors
    ///
    /// A gradient of another shape than its variable, on another device, or of integers; [`OptimizerError::StaleMaster`]
    /// ([state](Self#state)). Nothing is updated then.
    pub fn step(&mut self, gradients: &GradStore) -> candle_core::Result<()> {
        self.step_with(|variable| Some((gradients.get(variable)?, &Multiplier::ONE)), None, false)
    }

    /// Back-propagates `loss` and steps, without loss scaling: for F32 and BF16.
    ///
    /// # Errors
    ///
    /// Those of backward and of [`step`](Self::step).
    pub fn backward_step(&mut self, loss: &Tensor) -> candle_core::Result<()> {
        self.step(&loss.backward()?)
    }

    /// The learning rate of the first group, 0 without any.
    pub fn learning_rate(&self) -> f64 {
        self.groups.first().map_or(0.0, |group| group.config.lr())
    }

    /// Sets the learning rate of the first group, and those of the others in proportion to the rates
    /// they were made with. Where the first was made with 0, the others keep theirs. One that is not finite, or
    /// is below 0, is an error at the next step.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        let first = self.groups.first().map_or(0.0, |group| group.base_lr);
        for (number, group) in self.groups.iter_mut().enumerate() {
            let lr = match number {
                0 => learning_rate,
                _ if first == 0.0 => continue,
                _ => learning_rate * (group.base_lr / first),
            };
            group.config = group.config.with("lr", lr);
        }
    }

    /// The settings of every group as they are now.
    pub fn configs(&self) -> impl ExactSizeIterator<Item = &C> {
        self.groups.iter().map(|group| &group.config)
    }

    /// Gives the group `number` other settings, from now on. A schedule goes on from this learning rate: where it would
    /// have halved that of the group, it halves this one.
    ///
    /// A momentum that SGD had not before starts as the gradient of the next step, or, where a GPU skips that one, at 0; these
    /// differ only if `dampening` is not 0.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`], also for a group there is not; nothing is changed then.
    pub fn set_config(&mut self, number: usize, config: C) -> Result<()> {
        config.validate()?;
        let groups = self.groups.len();
        let exists = number < groups;
        check("group", number as f64, exists, "less than the number of groups")?;
        // What a schedule has made of the first group's rate so far, it has made of each.
        let GroupSettings { base_lr: base, config: first } = &self.groups[0];
        let (base, factor) = (*base, first.lr() / base);
        let group = &mut self.groups[number];
        if config.lr() != group.config.lr() {
            let known = base != 0.0 && factor != 0.0;
            group.base_lr = if known { config.lr() / factor } else { config.lr() };
        }
        group.config = config;
        Ok(())
    }

    /// The exact value of `variable`, a copy: `F32`, or `F64` for an `F64` variable. `None` where it
    /// is not one of this optimizer's.
    ///
    /// # Errors
    ///
    /// What the copy meets.
    pub fn master(&self, variable: &Tensor) -> Result<Option<Tensor>> {
        let slot = self.slots.iter().find(|slot| slot.variable.id() == variable.id());
        Ok(slot.map(|slot| slot.exact(self.masters)).transpose()?)
    }

    /// Takes the masters from the variables again: after writing to 16-bit variables by hand.
    ///
    /// # Errors
    ///
    /// What the copies meet; the masters are as they were then.
    pub fn reload_masters(&mut self) -> Result<()> {
        let masters = self.slots.iter().map(|slot| match slot.steps {
            0 => Ok(None),
            _ => slot.new_master(self.masters),
        });
        let masters: Vec<_> = masters.collect::<candle_core::Result<_>>()?;
        let now = version::tick();
        for (slot, master) in self.slots.iter_mut().zip(masters) {
            (slot.master, slot.current) = (master, now);
        }
        Ok(())
    }

    /// The bytes of masters and states.
    pub(crate) fn bytes(&self) -> usize {
        let all = self.slots.iter().flat_map(|slot| slot.master.iter().chain(&slot.states));
        all.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// How 16-bit variables are kept.
    pub fn masters(&self) -> Masters {
        self.masters
    }

    /// This, where a `candle_nn::Optimizer` is asked for. Given to a scaler in this form it is
    /// like any of candle's: gradients come in the variable's dtype.
    pub fn as_candle(&mut self) -> AsCandle<'_, Self> {
        AsCandle::new(self)
    }
}

pub(super) fn dtype<C: Config>(name: &'static str, got: DType) -> Error {
    ArgumentError::DType { op: C::NAME, name, got, expected: "F16, BF16, F32 or F64".to_owned() }
        .into()
}
