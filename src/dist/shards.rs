//! The state of a sharded optimizer, in parts.

use candle_core::{DType, Shape, Tensor};

use super::buckets::shard_len;
use super::reducer::in_shards;
use super::sharded::{Shard, Sharded};
use crate::Result;
use crate::checkpoints::{State, Stateful};
use crate::error::{CheckpointError, ParallelError};
use crate::optim::Config;

/// This rank's masters and states, and the settings. A master is called as in
/// [`OptimizerState`](crate::optim::OptimizerState). Load the variables too.
impl<C: Config> Stateful for Sharded<C> {
    fn save(&self) -> Result<State> {
        let communicator = self.parallel.communicator();
        communicator.synchronize()?; // else a read of what a failed call has left would wait
        let mut state = self.inner.save()?;
        for shard in self.shards.iter().filter(|shard| shard.is_master()) {
            if state.values.contains_key(&format!("steps.{}", shard.name)) {
                state.tensors.insert(master(shard), shard.part.as_tensor().copy()?);
            }
        }
        Ok(state.with("rank", communicator.rank()).with("size", communicator.size()))
    }

    fn check(&self, state: &State) -> Result<()> {
        let communicator = self.parallel.communicator();
        let expected = [("rank", communicator.rank()), ("size", communicator.size())];
        for (name, expected) in expected {
            let got: usize = state.value(name)?;
            if got != expected {
                let expected = format!("{expected}: `load_shards` takes those of other ranks");
                let (name, got) = (name.to_owned(), got.to_string());
                return Err(CheckpointError::State { name, got, expected }.into());
            }
        }
        self.inner.check(&self.without_masters(state)?)
    }

    fn load(&mut self, state: &State) -> Result<()> {
        let inner = self.without_masters(state)?;
        self.inner.load(&inner)?;
        for shard in &mut self.shards {
            let saved = state.tensors.get(&master(shard)).filter(|_| shard.is_master());
            shard.stale = saved.is_none();
            if let Some(saved) = saved {
                shard.part.set(&saved.to_device(shard.part.device())?)?;
            }
        }
        Ok(())
    }
}

fn master(shard: &Shard) -> String {
    format!("{}.master", shard.name)
}

impl<C: Config> Sharded<C> {
    /// What the optimizer of the parts has of a state; that there are the masters, and that they fit.
    fn without_masters(&self, state: &State) -> Result<State> {
        let mut inner = state.clone();
        inner.values.retain(|name, _| name != "rank" && name != "size");
        for shard in self.shards.iter().filter(|shard| shard.is_master()) {
            if !inner.values.contains_key(&format!("steps.{}", shard.name)) {
                continue;
            }
            let (name, shape) = (master(shard), shard.part.shape());
            let found = inner.tensors.remove(&name);
            let fits = |master: &Tensor| master.dtype() == DType::F32 && master.shape() == shape;
            if !found.as_ref().is_some_and(fits) {
                let describe = |x: Tensor| format!("{:?} of shape {:?}", x.dtype(), x.shape());
                let got = found.map_or("missing".to_owned(), describe);
                let expected = format!("F32 of shape {shape:?}");
                return Err(CheckpointError::State { name, got, expected }.into());
            }
        }
        Ok(inner)
    }

    /// Goes on from the parts that any number of ranks have saved: all of them, in any order.
    ///
    /// ```
    /// # use candle_amp::dist::{DataParallel, Sharded, Single, Threads};
    /// # use candle_amp::checkpoints::{Checkpoint, State};
    /// # use candle_amp::optim::{AdamWConfig, Masters};
    /// # use candle_amp::{GradScaler, Parameters, ops};
    /// # use candle_core::{DType, Device, Var};
    /// # use std::sync::Arc;
    /// # let folder = std::env::temp_dir().join(format!("candle-amp-shards-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder).unwrap();
    /// # let w = || Var::ones(10, DType::BF16, &Device::Cpu);
    /// # let file = |rank: usize| folder.join(format!("rank{rank}.safetensors"));
    /// # Threads::run(2, |communicator| {
    /// # let w = w()?;
    /// # let parameters = Parameters::named([("w", w.clone())])?;
    /// # let mut scaler = GradScaler::default();
    /// # let parallel = DataParallel::new(communicator.clone(), &parameters)?;
    /// # parallel.attach(&mut scaler)?;
    /// # let mut adamw = Sharded::new(&parallel, &parameters, AdamWConfig::default(), Masters::F32)?;
    /// # scaler.scale(&ops::mean(&w.to_dtype(DType::F32)?)?)?.backward()?;
    /// # scaler.step(&mut adamw)?;
    /// # scaler.update()?;
    /// // On each of two ranks:
    /// Checkpoint::new(1).with("optimizer", &adamw)?.save(file(communicator.rank()))?;
    /// # Ok(()) })?;
    /// # let parameters = Parameters::named([("w", w()?)])?;
    /// # let parallel = DataParallel::new(Arc::new(Single), &parameters)?;
    /// # let mut adamw = Sharded::new(&parallel, &parameters, AdamWConfig::default(), Masters::F32)?;
    /// // Later, on another number of ranks, each:
    /// let mut shards = Vec::new();
    /// for rank in 0..2 {
    ///     let mut shard = State::default();
    ///     Checkpoint::open(file(rank))?.load(&mut [("optimizer", &mut shard)])?;
    ///     shards.push(shard);
    /// }
    /// adamw.load_shards(&shards)?;
    /// # assert_eq!(adamw.bytes(), 120);
    /// # std::fs::remove_dir_all(&folder).unwrap();
    /// # Ok::<(), candle_amp::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ParallelError::Shards`] where one is missing, or there twice; [`CheckpointError`] for what does not fit. Nothing
    /// is changed then.
    pub fn load_shards(&mut self, shards: &[State]) -> Result<()> {
        let state = self.joined(shards)?;
        self.check(&state)?;
        self.load(&state)
    }

    /// Whether [`load_shards`](Self::load_shards) would load them: nothing is changed.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn check_shards(&self, shards: &[State]) -> Result<()> {
        self.check(&self.joined(shards)?)
    }

    /// This rank's part of the state that all `shards` make up.
    fn joined(&self, shards: &[State]) -> Result<State> {
        let fault = |fault: String| ParallelError::Shards { fault };
        let mut in_order = vec![None; shards.len()];
        for shard in shards {
            let (rank, size): (usize, usize) = (shard.value("rank")?, shard.value("size")?);
            if size != shards.len() {
                return Err(fault(format!(
                    "{size} ranks have saved, and {} shards are given",
                    shards.len()
                ))
                .into());
            }
            match in_order.get_mut(rank) {
                Some(place) if place.is_none() => *place = Some(shard),
                _ => return Err(fault(format!("that of rank {rank} is given twice")).into()),
            }
        }
        let in_order: Vec<&State> = in_order.into_iter().flatten().collect();
        let Some(first) = in_order.first() else {
            return Err(fault("none is given".to_owned()).into());
        };
        let communicator = self.parallel.communicator();
        let values = first.values.clone();
        let mut state = State { values, ..State::default() }
            .with("rank", communicator.rank())
            .with("size", communicator.size());
        for name in first.tensors.keys() {
            let owner = name.rsplit_once('.').map_or("", |(owner, _)| owner);
            let owner = self.shards.iter().find(|shard| shard.name == owner);
            let Some(owner) = owner else {
                return Err(fault(format!("`{name}` is of no variable of this optimizer")).into());
            };
            let elements = owner.variable.elem_count();
            // A state that the next step makes is an empty tensor, on every rank.
            let unmade =
                |shard: &&State| shard.tensors.get(name).is_some_and(|part| part.dims() == [0]);
            if elements > 0 && in_order.iter().all(unmade) {
                state.tensors.insert(name.clone(), first.tensors[name].clone());
                continue;
            }
            let shape = Shape::from(shard_len(elements, in_order.len()));
            let mut parts = Vec::with_capacity(in_order.len());
            for (rank, shard) in in_order.iter().enumerate() {
                let part = shard.tensors.get(name).filter(|part| part.shape() == &shape);
                let wrong =
                    || fault(format!("`{name}` of rank {rank} is not there with shape {shape:?}"));
                parts.push(part.ok_or_else(wrong)?);
            }
            let whole = Tensor::cat(&parts, 0)?.narrow(0, 0, elements)?;
            let rows = in_shards(&whole, communicator.size())?;
            let own = rows.narrow(0, communicator.rank(), 1)?.flatten_all()?;
            state.tensors.insert(name.clone(), own.force_contiguous()?);
        }
        Ok(state)
    }
}
