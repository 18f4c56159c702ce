//! An optimizer on every rank, or in parts.

use anyhow::Result;
use candle_amp::{
    checkpoints::{State, Stateful},
    dist::{DataParallel, Sharded},
    optim::{Config, Group, LearningRate, Masters, Optim, Step, UnscaledGradients},
};
use candle_core::{Tensor, TensorId};

use super::ranks;

/// An optimizer, of which each rank has the whole or a part.
#[derive(Debug)]
pub(crate) enum Optimizer<C: Config> {
    Whole(Optim<C>),
    Sharded(Sharded<C>),
}

impl<C: Config> Optimizer<C> {
    /// In parts, if `sharded` says over which ranks.
    pub(crate) fn new(groups: Vec<Group<C>>, sharded: Option<&DataParallel>) -> Result<Self> {
        Ok(match sharded {
            Some(parallel) => Self::Sharded(Sharded::from_groups(parallel, groups, Masters::F32)?),
            None => Self::Whole(Optim::from_groups(groups)?),
        })
    }
}

impl<C: Config> Step for Optimizer<C> {
    fn variables(&self) -> Option<Vec<TensorId>> {
        match self {
            Self::Whole(whole) => whole.variables(),
            Self::Sharded(sharded) => sharded.variables(),
        }
    }

    fn inner(&self) -> Option<&dyn Step> {
        Some(match self {
            Self::Whole(whole) => whole,
            Self::Sharded(sharded) => sharded,
        })
    }

    fn skips_on_device(&self) -> bool {
        match self {
            Self::Whole(whole) => whole.skips_on_device(),
            Self::Sharded(sharded) => sharded.skips_on_device(),
        }
    }

    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> candle_core::Result<()> {
        match self {
            Self::Whole(whole) => whole.apply(gradients),
            Self::Sharded(sharded) => sharded.apply(gradients),
        }
    }
}

impl<C: Config> LearningRate for Optimizer<C> {
    fn learning_rate(&self) -> f64 {
        match self {
            Self::Whole(whole) => whole.learning_rate(),
            Self::Sharded(sharded) => sharded.learning_rate(),
        }
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        match self {
            Self::Whole(whole) => whole.set_learning_rate(learning_rate),
            Self::Sharded(sharded) => sharded.set_learning_rate(learning_rate),
        }
    }
}

/// The parts of all ranks are one state, for a file that any number of ranks can go on from: all ranks save,
/// load and check together.
impl<C: Config> Stateful for Optimizer<C> {
    fn save(&self) -> candle_amp::Result<State> {
        match self {
            Self::Whole(whole) => whole.save(),
            Self::Sharded(sharded) => all_parts(&sharded.save()?),
        }
    }

    fn check(&self, state: &State) -> candle_amp::Result<()> {
        match self {
            Self::Whole(whole) => whole.check(state),
            Self::Sharded(sharded) => sharded.check_shards(&parts(state)?),
        }
    }

    fn load(&mut self, state: &State) -> candle_amp::Result<()> {
        match self {
            Self::Whole(whole) => whole.load(state),
            Self::Sharded(sharded) => sharded.load_shards(&parts(state)?),
        }
    }
}

/// The state with the tensors of all ranks. A rank's number is the one value in which states differ.
fn all_parts(own: &State) -> candle_amp::Result<State> {
    let communicator = ranks::communicator();
    let mut all = State { values: own.values.clone(), ..State::default() };
    for (name, tensor) in &own.tensors {
        all.tensors.insert(name.clone(), communicator.all_gather(tensor)?);
    }
    Ok(all)
}

/// The state of each rank that has saved.
fn parts(all: &State) -> candle_amp::Result<Vec<State>> {
    let size: usize = all.value("size")?;
    let part = |rank: usize| {
        let part = |tensor: &Tensor| {
            let len = tensor.dim(0)? / size;
            tensor.narrow(0, rank * len, len)?.force_contiguous()
        };
        let tensors = all.tensors.iter().map(|(name, all)| Ok((name.clone(), part(all)?)));
        let tensors = tensors.collect::<candle_core::Result<_>>()?;
        Ok(State { tensors, values: all.values.clone() }.with("rank", rank))
    };
    (0..size).map(part).collect()
}
