//! The parts this crate has.

use std::collections::{BTreeMap, HashMap};

use candle_core::{DType, Shape, Tensor, TensorId, Var};

use super::state::{State, Stateful};
use crate::autograd::version;
use crate::error::{CheckpointError, ScalerError};
use crate::optim::{
    Config, Ema, EmaState, GroupState, Optim, OptimizerState, PlateauState, ReduceOnPlateau,
    Scheduler,
};
use crate::random::{self, RandomState};
use crate::{
    GradScaler, LossScale, MasterVars, Parameters, Result, ScaleConfig, autocast, kernels,
};

/// One variable has one value, whatever the number of its names.
fn check_tied(parameters: &Parameters, state: &State) -> Result<()> {
    let mut first: HashMap<TensorId, (&str, &Tensor)> = HashMap::new();
    for (name, variable) in parameters.iter().chain(parameters.buffers()) {
        let Some(tensor) = state.tensors.get(name) else { continue };
        let &mut (other, found) = first.entry(variable.id()).or_insert((name, tensor));
        if other != name && !is_same(found, tensor)? {
            let got = format!("another tensor than `{other}`");
            let expected = "the same: both are names of one variable here".to_owned();
            return Err(CheckpointError::State { name: format!("`{name}`"), got, expected }.into());
        }
    }
    Ok(())
}

/// Whether two tensors of one shape and dtype have the same bits.
fn is_same(a: &Tensor, b: &Tensor) -> candle_core::Result<bool> {
    if a.dtype().is_float() {
        return kernels::same_bits(a, b);
    }
    let integers = |x: &Tensor| x.to_dtype(DType::I64)?.flatten_all()?.to_vec1::<i64>();
    Ok(integers(a)? == integers(b)?)
}

/// Weights and buffers, each in its own dtype. Where one variable has several names, the tensors of all of them must be
/// the same.
impl Stateful for Parameters {
    fn save(&self) -> Result<State> {
        let all = self.iter().chain(self.buffers());
        let tensors = all.map(|(name, var)| (name.to_owned(), var.as_detached_tensor()));
        Ok(State { tensors: tensors.collect(), values: BTreeMap::new() })
    }

    fn check(&self, state: &State) -> Result<()> {
        let expected = |(name, var): (_, &'_ Var)| (name, var.dtype(), var.shape().clone());
        let all: Vec<(&str, DType, Shape)> =
            self.iter().map(expected).chain(self.buffers().map(expected)).collect();
        state.expect(all.iter().map(|(name, dtype, shape)| (*name, *dtype, shape)), &[])?;
        check_tied(self, state)
    }

    fn load(&mut self, state: &State) -> Result<()> {
        let mut all = self.iter().chain(self.buffers());
        let loaded = all.try_for_each(|(name, var)| match state.tensors.get(name) {
            Some(tensor) => var.set(&tensor.to_device(var.device())?),
            None => Ok(()),
        });
        // Also after an error: some may have been written.
        let all = self.iter().chain(self.buffers());
        version::written(all.map(|(_, var)| var.as_tensor()));
        autocast::clear_cast_cache();
        Ok(loaded?)
    }
}

/// The masters. The 16-bit tensors are rewritten from them.
impl Stateful for MasterVars {
    fn save(&self) -> Result<State> {
        self.parameters().save()
    }

    fn check(&self, state: &State) -> Result<()> {
        self.parameters().check(state)
    }

    fn load(&mut self, state: &State) -> Result<()> {
        self.parameters().load(state)?;
        Ok(self.refresh()?)
    }
}

/// Scale, trackers and settings; of a disabled one, that it is, and no other is loaded from that. To be saved after
/// `update`.
impl Stateful for GradScaler {
    fn save(&self) -> Result<State> {
        if self.has_gradients() {
            return Err(ScalerError::PendingGradients { call: "save" }.into());
        }
        let state = State::default().with("enabled", self.is_enabled());
        Ok(match self.state() {
            None => state,
            Some(scale) => scale_values(&scale)
                .into_iter()
                .fold(state, |state, (name, value)| state.with(name, value)),
        })
    }

    fn check(&self, state: &State) -> Result<()> {
        if self.has_gradients() {
            return Err(ScalerError::PendingGradients { call: "load" }.into());
        }
        let (saved, here) = (read_scale(state)?.is_some(), self.is_enabled());
        if saved == here {
            return Ok(());
        }
        let cure = if here {
            "`GradScaler::disabled()` goes on without"
        } else {
            "`GradScaler::new` scales"
        };
        let expected = format!("{here}, as this scaler is: {cure}; or do not load this part");
        Err(CheckpointError::State { name: "enabled".into(), got: saved.to_string(), expected }
            .into())
    }

    fn load(&mut self, state: &State) -> Result<()> {
        self.load_state(read_scale(state)?)
    }
}

fn scale_values(scale: &LossScale) -> [(&'static str, String); 10] {
    let config = scale.config();
    [
        ("scale", scale.get().to_string()),
        ("growth_tracker", scale.growth_tracker().to_string()),
        ("hysteresis_tracker", scale.hysteresis_tracker().to_string()),
        ("init_scale", config.init_scale.to_string()),
        ("growth_factor", config.growth_factor.to_string()),
        ("backoff_factor", config.backoff_factor.to_string()),
        ("growth_interval", config.growth_interval.to_string()),
        ("hysteresis", config.hysteresis.to_string()),
        ("min_scale", config.min_scale.to_string()),
        ("max_scale", config.max_scale.to_string()),
    ]
}

fn read_scale(state: &State) -> Result<Option<LossScale>> {
    let names = scale_values(&LossScale::new(ScaleConfig::default())?).map(|(name, _)| name);
    if !state.value::<bool>("enabled")? {
        return state.expect([], &["enabled"]).map(|()| None);
    }
    state.expect([], &[&["enabled"], &names[..]].concat())?;
    let config = ScaleConfig {
        init_scale: state.value("init_scale")?,
        growth_factor: state.value("growth_factor")?,
        backoff_factor: state.value("backoff_factor")?,
        growth_interval: state.value("growth_interval")?,
        hysteresis: state.value("hysteresis")?,
        min_scale: state.value("min_scale")?,
        max_scale: state.value("max_scale")?,
    };
    let trackers = [state.value("growth_tracker")?, state.value("hysteresis_tracker")?];
    LossScale::saved(config, state.value("scale")?, trackers).map(Some)
}

/// A number of steps, draws or updates: no run has taken so many that it cannot take more.
fn count(state: &State, name: &str) -> Result<u64> {
    const MOST: u64 = 1 << 62;
    let got = state.value::<u64>(name)?;
    if got <= MOST {
        return Ok(got);
    }
    let expected = format!("a count of at most {MOST}");
    Err(CheckpointError::State { name: format!("`{name}`"), got: got.to_string(), expected }.into())
}

/// Where the generator stands that this thread draws from.
impl Stateful for random::Generator {
    fn save(&self) -> Result<State> {
        let RandomState { seed, draws } = random::state();
        let state = State::default().with("seed", seed).with("draws", draws);
        Ok(if random::is_forked() { state.with("fork", true) } else { state })
    }

    fn check(&self, state: &State) -> Result<()> {
        let is_fork = state.values.contains_key("fork");
        if is_fork && !random::is_forked() {
            let name = "the generator".to_owned();
            let (got, expected) = (
                "that of a `fork_rng` that it was saved in".to_owned(),
                "the process's: save it outside, or load it within a fork".to_owned(),
            );
            return Err(CheckpointError::State { name, got, expected }.into());
        }
        state.expect([], if is_fork { &["seed", "draws", "fork"] } else { &["seed", "draws"] })?;
        state.value::<u64>("seed").and_then(|_| count(state, "draws")).map(|_| ())
    }

    fn load(&mut self, state: &State) -> Result<()> {
        random::set_state(RandomState {
            seed: state.value("seed")?,
            draws: count(state, "draws")?,
        });
        Ok(())
    }
}

/// Steps, masters, states, and the settings of every group: needs an optimizer that was made from
/// [`Parameters`].
impl<C: Config> Stateful for Optim<C> {
    fn save(&self) -> Result<State> {
        let OptimizerState { optimizer, tensors, steps, groups, common_draws } = self.state()?;
        let mut state = State { tensors, values: BTreeMap::new() }.with("optimizer", optimizer);
        for (name, count) in steps {
            state = state.with(format!("steps.{name}"), count);
        }
        if common_draws > 0 {
            state = state.with(COMMON_DRAWS, common_draws);
        }
        for (number, group) in groups.into_iter().enumerate() {
            state = state.with(format!("group.{number}.base_lr"), group.base_lr);
            for (name, value) in group.settings {
                state = state.with(format!("group.{number}.settings.{name}"), value);
            }
            // A name can have any character in it, and a JSON string can have any name.
            let names = serde_json::to_string(&group.variables).unwrap_or_default();
            state = state.with(format!("group.{number}.variables"), names);
        }
        Ok(state)
    }

    fn check(&self, state: &State) -> Result<()> {
        self.check_state(&optimizer_state(state)?)
    }

    fn load(&mut self, state: &State) -> Result<()> {
        self.load_state(&optimizer_state(state)?)
    }
}

/// A value of an optimizer's part, where it is not 0.
const COMMON_DRAWS: &str = "common_draws";

fn optimizer_state(state: &State) -> Result<OptimizerState> {
    let unknown = |name: &str| {
        CheckpointError::Mismatch {
            part: String::new(),
            missing: Vec::new(),
            extra: vec![name.to_owned()],
            wrong: Vec::new(),
        }
        .into()
    };
    let (mut steps, mut groups) = (BTreeMap::new(), BTreeMap::<usize, GroupState>::new());
    let mut common_draws = 0;
    for name in state.values.keys().filter(|name| *name != "optimizer") {
        if name == COMMON_DRAWS {
            common_draws = count(state, name)?;
            continue;
        }
        if let Some(variable) = name.strip_prefix("steps.") {
            steps.insert(variable.to_owned(), count(state, name)?);
            continue;
        }
        let group = name.strip_prefix("group.").and_then(|rest| rest.split_once('.'));
        let number = group.and_then(|(number, what)| Some((number.parse::<usize>().ok()?, what)));
        let Some((number, what)) = number else { return Err(unknown(name)) };
        let empty =
            || GroupState { base_lr: 0.0, settings: BTreeMap::new(), variables: Vec::new() };
        let group = groups.entry(number).or_insert_with(empty);
        match (what, what.strip_prefix("settings.")) {
            ("base_lr", _) => group.base_lr = state.value(name)?,
            ("variables", _) => {
                let text: String = state.value(name)?;
                group.variables = serde_json::from_str(&text).map_err(|_| unknown(name))?;
            }
            (_, Some(setting)) => {
                group.settings.insert(setting.to_owned(), state.value(name)?);
            }
            _ => return Err(unknown(name)),
        }
    }
    for number in 0..groups.len() {
        // Not one that is made up of what is not there.
        state.value::<f64>(&format!("group.{number}.base_lr"))?;
        state.value::<String>(&format!("group.{number}.variables"))?;
    }
    Ok(OptimizerState {
        optimizer: state.value("optimizer")?,
        tensors: state.tensors.clone(),
        common_draws,
        steps,
        groups: groups.into_values().collect(),
    })
}

/// How many steps were taken, and from which rate. The schedule itself is the program's. The rate of
/// the optimizer is a part of the optimizer.
impl Stateful for Scheduler {
    fn save(&self) -> Result<State> {
        Ok(State::default().with("base_lr", self.base_lr()).with("taken", self.taken()))
    }

    fn check(&self, state: &State) -> Result<()> {
        state.expect([], &["base_lr", "taken"])?;
        count(state, "taken")?;
        Self::at(self.schedule().clone(), state.value("base_lr")?, 0).map(|_| ())
    }

    fn load(&mut self, state: &State) -> Result<()> {
        let (base_lr, taken) = (state.value("base_lr")?, count(state, "taken")?);
        *self = Self::at(self.schedule().clone(), base_lr, taken)?;
        Ok(())
    }
}

/// The best measure and the counts. The settings are the program's, the rate the optimizer's.
impl Stateful for ReduceOnPlateau {
    fn save(&self) -> Result<State> {
        let PlateauState { best, bad, cooldown } = self.state();
        let state = State::default().with("bad", bad).with("cooldown", cooldown);
        Ok(state.with("best", best.map_or("none".to_owned(), |best| best.to_string())))
    }

    fn check(&self, state: &State) -> Result<()> {
        state.expect([], &["bad", "best", "cooldown"])?;
        Self::restore(*self.config(), plateau_state(state)?).map(|_| ())
    }

    fn load(&mut self, state: &State) -> Result<()> {
        *self = Self::restore(*self.config(), plateau_state(state)?)?;
        Ok(())
    }
}

fn plateau_state(state: &State) -> Result<PlateauState> {
    let best = match state.value::<String>("best")?.as_str() {
        "none" => None,
        _ => Some(state.value("best")?),
    };
    Ok(PlateauState { best, bad: state.value("bad")?, cooldown: state.value("cooldown")? })
}

/// The averages, and how many updates they are of. Not while they are in place of the weights, which would be saved as if
/// they were.
impl Stateful for Ema {
    fn save(&self) -> Result<State> {
        self.check_out("save")?;
        let EmaState { averages, updates } = self.state()?;
        Ok(State { tensors: averages, values: BTreeMap::new() }.with("updates", updates))
    }

    fn check(&self, state: &State) -> Result<()> {
        self.check_out("load")?;
        let expected = self.averages().map(|(name, a)| (name, a.dtype(), a.shape()));
        state.expect(expected, &["updates"])?;
        count(state, "updates").map(|_| ())
    }

    fn load(&mut self, state: &State) -> Result<()> {
        let (averages, updates) = (state.tensors.clone(), count(state, "updates")?);
        self.load_state(&EmaState { averages, updates })
    }
}
