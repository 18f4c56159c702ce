//! The saved state of an optimizer, from which training resumes.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Shape, Tensor};

use super::config::Config;
use super::optimizer::{GroupSettings, Optim};
use crate::autograd::version;
use crate::error::{CheckpointError, OptimizerError};
use crate::kernels::cuda::Gpu;
use crate::{Error, Result};

/// The state of an optimizer: everything but the variables themselves.
///
/// Tensors are copies, on the device of their variable (empty ones on the CPU), in the dtype they are kept in. With `w` the
/// name of a variable, they are called:
///
/// | | |
/// |---|---|
/// | `w.momentum_buffer` | of [`Sgd`](super::Sgd) with momentum |
/// | `w.exp_avg` | the first moment of [`AdamW`](super::AdamW), [`Lamb`](super::Lamb) and [`Lion`](super::Lion) |
/// | `w.exp_avg_sq`, `w.max_exp_avg_sq` | the second moment, and the largest so far with AMSGrad |
/// | `w.master` | the `F32` master of a 16-bit variable |
/// | `w.remainder` | the rest of one, `I16`, with [`Masters::Remainder`](super::Masters) |
///
/// A variable that has not been stepped has none, and no entry in `steps`. A state that settings have asked for
/// [since the last step](super::Optim::set_config), and that the next one makes, is an empty tensor.
#[derive(Clone, Debug)]
pub struct OptimizerState {
    /// Which optimizer: `sgd`, `adamw`, `lion` or `lamb`.
    pub optimizer: String,
    /// By name.
    pub tensors: BTreeMap<String, Tensor>,
    /// How many steps each variable has taken.
    pub steps: BTreeMap<String, u64>,
    /// In the order of the groups.
    pub groups: Vec<GroupState>,
    /// How many steps, skipped ones too, were rounded stochastically by random bits that all ranks of a
    /// [`DataParallel`](crate::dist::DataParallel) have.
    pub common_draws: u64,
}

/// The settings of a group and whose they are.
#[derive(Clone, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct GroupState {
    /// The learning rate the group was made with, which `set_learning_rate` keeps in proportion.
    pub base_lr: f64,
    /// The settings, `lr` as it is now among them; a flag is 0 or 1.
    pub settings: BTreeMap<String, f64>,
    /// The names of the group's variables.
    pub variables: Vec<String>,
}

/// What loading one slot will put there.
type Loaded = (u64, Option<Tensor>, Vec<Tensor>);

impl<C: Config> Optim<C> {
    /// The state, to save.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::Unnamed`] where the optimizer was not made from [`Parameters`](crate::Parameters).
    pub fn state(&self) -> Result<OptimizerState> {
        let mut state = OptimizerState {
            optimizer: C::NAME.to_owned(),
            tensors: BTreeMap::new(),
            steps: BTreeMap::new(),
            groups: Vec::new(),
            common_draws: self.common_draws,
        };
        for GroupSettings { config, base_lr } in &self.groups {
            let settings = config.settings().into_iter().map(|(name, x)| (name.to_owned(), x));
            let (base_lr, settings) = (*base_lr, settings.collect());
            state.groups.push(GroupState { base_lr, settings, variables: Vec::new() });
        }
        for (slot, steps) in self.slots.iter().zip(self.steps_taken()?) {
            let Some(name) = &slot.name else {
                return Err(OptimizerError::Unnamed { call: "state" }.into());
            };
            state.groups[slot.group].variables.push(name.clone());
            if steps == 0 {
                continue;
            }
            state.steps.insert(name.clone(), steps);
            let states = self.groups[slot.group].config.states();
            for (at, kind) in states.iter().enumerate() {
                let tensor = match slot.states.get(at) {
                    Some(made) => made.copy()?,
                    None => Tensor::zeros(0, slot.state_dtype(self.state_dtype), &Device::Cpu)?,
                };
                state.tensors.insert(format!("{name}.{kind}"), tensor);
            }
            if let (Some((kind, _)), Some(master)) = (slot.master_dtype(self.masters), &slot.master)
            {
                state.tensors.insert(format!("{name}.{kind}"), master.copy()?);
            }
        }
        Ok(state)
    }

    /// Goes on from a saved state: steps, masters, states, and the settings of every group. The
    /// optimizer must be of the same kind over the same variables in the same groups, with the same
    /// [`Masters`](super::Masters) and state dtype. The variables are not touched: load them too.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::State`] for whatever does not fit,
    /// [`ArgumentError::Setting`](crate::error::ArgumentError::Setting), [`OptimizerError::Unnamed`]; nothing is
    /// changed then.
    pub fn load_state(&mut self, state: &OptimizerState) -> Result<()> {
        let (settings, loaded) = self.fitting(state)?;
        let own = |tensor: Tensor, device| tensor.to_device(device)?.contiguous()?.copy();
        let mut copies: Vec<Loaded> = Vec::with_capacity(loaded.len());
        for ((count, master, states), slot) in loaded.into_iter().zip(&self.slots) {
            let device = slot.variable.device();
            let master = master.map(|master| own(master, device)).transpose()?;
            let states = states.into_iter().map(|state| own(state, device));
            copies.push((count, master, states.collect::<candle_core::Result<_>>()?));
        }
        (self.groups, self.skips, self.common_draws) = (settings, None, state.common_draws);
        let now = version::tick();
        for (slot, (count, master, states)) in self.slots.iter_mut().zip(copies) {
            (slot.steps, slot.master, slot.states, slot.current) = (count, master, states, now);
        }
        Ok(())
    }

    /// Of every slot; those that a GPU skipped are counted there.
    pub(super) fn steps_taken(&self) -> Result<Vec<u64>> {
        let skips = match &self.skips {
            Some(counts) => Gpu::to_host::<u32>(counts)?,
            None => Vec::new(),
        };
        let skips = skips.into_iter().map(u64::from).chain(std::iter::repeat(0));
        Ok(self.slots.iter().zip(skips).map(|(slot, skips)| slot.steps - skips).collect())
    }

    /// Whether [`load_state`](Self::load_state) would take `state`, of which it does not read the
    /// elements.
    pub(crate) fn check_state(&self, state: &OptimizerState) -> Result<()> {
        self.fitting(state).map(|_| ())
    }

    /// What there is in `state` for each group and slot, all of it looked at.
    fn fitting(&self, state: &OptimizerState) -> Result<(Vec<GroupSettings<C>>, Vec<Loaded>)> {
        let settings = self.check_settings(state)?;
        let mut loaded = Vec::with_capacity(self.slots.len());
        let (mut tensors, mut steps) = (0, 0);
        for slot in &self.slots {
            let Some(name) = &slot.name else {
                return Err(OptimizerError::Unnamed { call: "load_state" }.into());
            };
            let Some(&count) = state.steps.get(name) else {
                loaded.push((0, None, Vec::new()));
                continue;
            };
            let shape = slot.variable.shape();
            let find = |kind: &str, dtype| {
                let name = format!("{name}.{kind}");
                let tensor = state.tensors.get(&name);
                Ok::<_, Error>(checked(name, tensor, shape, dtype)?.clone())
            };
            let master = slot.master_dtype(self.masters).map(|(kind, dtype)| find(kind, dtype));
            let master = master.transpose()?;
            let states = settings[slot.group].config.states().iter();
            let dtype = slot.state_dtype(self.state_dtype);
            let unmade = |kind: &&&str| {
                let saved = state.tensors.get(&format!("{name}.{kind}"));
                saved.is_some_and(|saved| {
                    saved.dims() == [0] && saved.dtype() == dtype && shape.dims() != [0]
                })
            };
            // The last ones: settings add states behind those that there are.
            let left_out = states.clone().rev().take_while(unmade).count();
            let made = states.len() - left_out;
            tensors += states.len() + usize::from(master.is_some());
            let states = states.take(made).map(|kind| find(kind, dtype));
            let states = states.collect::<Result<Vec<_>>>()?;
            steps += 1;
            loaded.push((count, master, states));
        }
        if steps != state.steps.len() || tensors != state.tensors.len() {
            return Err(self.surplus(state));
        }
        Ok((settings, loaded))
    }

    /// The settings of `state`, after a look at everything that is not a tensor.
    fn check_settings(&self, state: &OptimizerState) -> Result<Vec<GroupSettings<C>>> {
        expect("the optimizer", &state.optimizer, &C::NAME)?;
        expect("the number of groups", &state.groups.len(), &self.groups.len())?;
        let mut all = Vec::with_capacity(self.groups.len());
        for (number, (saved, own)) in state.groups.iter().zip(&self.groups).enumerate() {
            let slots = self.slots.iter().filter(|slot| slot.group == number);
            let Some(variables) =
                slots.map(|slot| slot.name.as_deref()).collect::<Option<Vec<_>>>()
            else {
                return Err(OptimizerError::Unnamed { call: "load_state" }.into());
            };
            expect(&format!("group {number} of variables"), &saved.variables, &variables)?;
            let names: Vec<&str> =
                own.config.settings().into_iter().map(|(name, _)| name).collect();
            let mut sorted = names.clone();
            sorted.sort_unstable();
            let found: Vec<&str> = saved.settings.keys().map(String::as_str).collect();
            expect(&format!("group {number} of settings"), &found, &sorted)?;
            let config = names.iter().fold(own.config, |config, &name| {
                saved.settings.get(name).map_or(config, |&value| config.with(name, value))
            });
            config.validate()?;
            super::config::check_settings([("base_lr", saved.base_lr)])?;
            all.push(GroupSettings { config, base_lr: saved.base_lr });
        }
        Ok(all)
    }

    /// The error for a state that has more than this optimizer.
    fn surplus(&self, state: &OptimizerState) -> Error {
        let known = |name: &str| self.slots.iter().any(|slot| slot.name.as_deref() == Some(name));
        let (mut names, mut tensors) = (state.steps.keys(), state.tensors.keys());
        let belongs = |tensor: &&String| {
            let owner = tensor.rsplit_once('.').map_or("", |(name, _)| name);
            state.steps.contains_key(owner)
        };
        let name = names.find(|name| !known(name)).or_else(|| tensors.find(|t| !belongs(t)));
        let expected = format!("{} of this kind, masters and state dtype alone", C::NAME);
        let name = name.map_or("it".to_owned(), |name| format!("`{name}`"));
        CheckpointError::State { name, got: "more than there is a place for".to_owned(), expected }
            .into()
    }
}

/// That a part of a state is what it must be.
pub(super) fn expect<A: std::fmt::Debug + PartialEq<B>, B: std::fmt::Debug>(
    name: &str,
    got: &A,
    expected: &B,
) -> Result<()> {
    if got == expected {
        return Ok(());
    }
    let (got, expected) = (format!("{got:?}"), format!("{expected:?}"));
    Err(CheckpointError::State { name: name.to_owned(), got, expected }.into())
}

/// That a tensor of a state is there and fits.
pub(super) fn checked<'t>(
    name: String,
    tensor: Option<&'t Tensor>,
    shape: &Shape,
    dtype: DType,
) -> Result<&'t Tensor> {
    let expected = format!("{dtype:?} of shape {shape:?}");
    let name = format!("`{name}`");
    let Some(tensor) = tensor else {
        return Err(CheckpointError::State { name, got: "missing".to_owned(), expected }.into());
    };
    if tensor.shape() == shape && tensor.dtype() == dtype {
        return Ok(tensor);
    }
    let got = format!("{:?} of shape {:?}", tensor.dtype(), tensor.shape());
    Err(CheckpointError::State { name, got, expected }.into())
}
