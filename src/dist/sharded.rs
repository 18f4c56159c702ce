//! Masters and optimizer state, a part on each rank: ZeRO, stage 1.

use std::collections::HashMap;

use candle_core::{DType, Tensor, TensorId, Var};

use super::communicator::Pending;
use super::data_parallel::DataParallel;
use super::reducer::in_shards;
use crate::autograd::{is_frozen, version};
use crate::error::ParallelError;
use crate::optim::{
    Config, Group, LearningRate, Masters, Optim, Step, UnscaledGradients, Variables,
};
use crate::scaler::{Internals, OptimizerFacts};
use crate::{Result, autocast, kernels};

/// An optimizer of the crate's, of which each rank has a part: ZeRO, stage 1.
///
/// Every tensor is cut into as many equal parts as there are ranks. A rank gets the average of the gradients of its parts
/// alone (a reduce-scatter in place of an all-reduce), steps these in `F32`, and gathers the weights of the others.
/// Use it in place of the optimizer of [`DataParallel`]; the loop stays as it is.
///
/// # Memory
///
/// With [`AdamW`](crate::optim::AdamW) and 16-bit weights, `N` ranks take `6 + 12 / N` bytes per parameter each. The
/// weight takes 2, and its gradient 4 during backward. The master takes 4 and two moments 8, of one part in `N`. A part
/// of an `F32` variable takes 4 more.
///
/// # Precision
///
/// Weights are bit for bit those of the optimizer with `DataParallel` alone, with [`Masters::F32`] and
/// [`Masters::Remainder`]. After [`clip_grad_norm`](crate::GradScaler::clip_grad_norm) they are but for one case in some ten
/// million: squares are added in `F64` rank by rank, not tensor by tensor. The norm is rounded to `F32`. On Metal the norm of
/// each rank is rounded to `F32` before, so that the last bit of the norm differs more often. [`Masters::Stochastic`] draws
/// other random bits. [`Lamb`](crate::optim::Lamb) needs norms of whole tensors, and is refused.
///
/// # Which variables
///
/// The scaler that `parallel` is attached to has parts of all gradients from then on. So all variables that are trained belong
/// to `Sharded` optimizers, and the step of another one is an error. Variables that are frozen when this is made have no master.
/// Parts are copies: after a write to an `F32` variable too, call [`reload_masters`](Self::reload_masters), or the next step
/// undoes it.
///
/// # What the scaler sees
///
/// Once this is made, [`GradScaler::grad`](crate::GradScaler::grad), overflow reports and histograms show this rank's parts,
/// flat, with zeros after the end. The norm and the verdict on a step are of all ranks: one infinity skips the
/// step of all.
///
/// # Checkpoints
///
/// As a [`Stateful`](crate::checkpoints::Stateful) part of a checkpoint it is this rank's share: each rank writes a file of
/// its own. [`load_shards`](Self::load_shards) goes on on another number of ranks.
///
/// # Examples
///
/// ```
/// use candle_amp::dist::{DataParallel, Sharded, Threads};
/// use candle_amp::optim::{AdamWConfig, Masters};
/// use candle_amp::{GradScaler, Parameters, ops};
/// use candle_core::{DType, Device, Var};
///
/// Threads::run(2, |communicator| {
///     let w = Var::ones(10, DType::BF16, &Device::Cpu)?;
///     let parameters = Parameters::named([("w", w.clone())])?;
///     let mut scaler = GradScaler::default();
///     let parallel = DataParallel::new(communicator, &parameters)?;
///     parallel.attach(&mut scaler)?;
///     let mut adamw = Sharded::new(&parallel, &parameters, AdamWConfig::default(), Masters::F32)?;
///
///     scaler.scale(&ops::mean(&w.to_dtype(DType::F32)?)?)?.backward()?;
///     scaler.clip_grad_norm(1.0)?; // of all ranks
///     scaler.step(&mut adamw)?;
///     scaler.update()?;
///     assert_eq!(adamw.bytes(), 12 * 10 / 2);
///     Ok(())
/// })?;
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// Rajbhandari et al., [ZeRO](https://arxiv.org/abs/1910.02054);
/// `torch.distributed.optim.ZeroRedundancyOptimizer`.
#[derive(Debug)]
pub struct Sharded<C> {
    pub(super) inner: Optim<C>,
    pub(super) parallel: DataParallel,
    pub(super) shards: Vec<Shard>,
}

/// This rank's part of a variable.
#[derive(Debug)]
pub(super) struct Shard {
    pub(super) name: String,
    pub(super) variable: Var,
    /// What the optimizer steps: a vector, the master where that is `F32` and the variable is not.
    pub(super) part: Var,
    /// Whether the variable, and not `part`, has the value that counts.
    pub(super) stale: bool,
}

impl Shard {
    fn new(parallel: &DataParallel, variable: Var, masters: Masters) -> Result<Self> {
        let reducer = parallel.reducer();
        let number = reducer.number(&variable).ok_or(ParallelError::NotAParameter)?;
        let name = reducer.parameters[number].name.clone();
        let dtype = match variable.dtype() {
            DType::F16 | DType::BF16 if masters == Masters::F32 => DType::F32,
            dtype => dtype,
        };
        let part = kernels::in_dtype(&own_part(parallel, &variable)?, dtype)?;
        Ok(Self { name, variable, part: Var::from_tensor(&part)?, stale: true })
    }

    /// Whether the part is a master.
    pub(super) fn is_master(&self) -> bool {
        self.part.dtype() != self.variable.dtype()
    }
}

/// This rank's part of a tensor, a vector.
pub(super) fn own_part(parallel: &DataParallel, whole: &Tensor) -> Result<Tensor> {
    let communicator = parallel.communicator();
    let rows = in_shards(&whole.detach().flatten_all()?, communicator.size())?;
    Ok(rows.narrow(0, communicator.rank(), 1)?.flatten_all()?)
}

impl<C: Config> Sharded<C> {
    /// An optimizer of `variables`, which are among the parameters of `parallel`. From here on the scaler it is attached to
    /// collects this rank's parts of the gradients.
    ///
    /// # Errors
    ///
    /// [`ParallelError::NotAParameter`]; [`ParallelError::NotSharded`] for LAMB; [`ParallelError::TooLate`] after a
    /// backward; those of [`Optim::new`] and [`Optim::with_masters`].
    pub fn new(
        parallel: &DataParallel,
        variables: impl Into<Variables>,
        config: C,
        masters: Masters,
    ) -> Result<Self> {
        Self::from_groups(parallel, vec![Group::new(variables, config)], masters)
    }

    /// An optimizer of groups with settings of their own.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and those of [`Optim::from_groups`].
    pub fn from_groups(
        parallel: &DataParallel,
        groups: Vec<Group<C>>,
        masters: Masters,
    ) -> Result<Self> {
        if !C::ELEMENTWISE {
            return Err(ParallelError::NotSharded { optimizer: C::NAME }.into());
        }
        let mut shards = Vec::<Shard>::new();
        let mut numbers = HashMap::<TensorId, usize>::new();
        let mut part_groups = Vec::with_capacity(groups.len());
        for Group { parameters: Variables(variables), config } in groups {
            let mut parts = Vec::new();
            for (_, variable) in variables {
                if !variable.dtype().is_float() || is_frozen(&variable) {
                    continue;
                }
                let number = match numbers.get(&variable.id()) {
                    Some(&number) => number,
                    None => {
                        numbers.insert(variable.id(), shards.len());
                        shards.push(Shard::new(parallel, variable, masters)?);
                        shards.len() - 1
                    }
                };
                let Shard { name, part, .. } = &shards[number];
                parts.push((Some(name.clone()), part.clone()));
            }
            part_groups.push(Group { parameters: Variables(parts), config });
        }
        let inner = Optim::from_groups(part_groups)?.with_masters(masters)?;
        parallel.reducer().shard()?;
        Ok(Self { inner, parallel: parallel.clone(), shards })
    }

    /// The learning rate of the first group, 0 without any.
    pub fn learning_rate(&self) -> f64 {
        self.inner.learning_rate()
    }

    /// As [`Optim::set_learning_rate`].
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.inner.set_learning_rate(learning_rate);
    }

    /// How 16-bit variables are kept.
    pub fn masters(&self) -> Masters {
        self.inner.masters()
    }

    /// The bytes of this rank's masters and states. States are made at the first step.
    pub fn bytes(&self) -> usize {
        let parts = self.shards.iter().map(|Shard { part, .. }| part);
        let parts = parts.map(|part| part.elem_count() * part.dtype().size_in_bytes());
        self.inner.bytes() + parts.sum::<usize>()
    }

    /// Takes the masters from the variables again: after writing to variables by hand, the same on all ranks.
    ///
    /// # Errors
    ///
    /// As [`Optim::reload_masters`].
    pub fn reload_masters(&mut self) -> Result<()> {
        self.refresh(|_| true)?;
        self.inner.reload_masters()
    }

    /// Takes the parts of the variables chosen from these.
    fn refresh(&mut self, chosen: impl Fn(&Shard) -> bool) -> Result<()> {
        for shard in self.shards.iter_mut().filter(|shard| chosen(shard)) {
            let part = own_part(&self.parallel, &shard.variable)?;
            shard.part.set(&kernels::in_dtype(&part, shard.part.dtype())?)?;
            shard.stale = false;
        }
        Ok(())
    }

    /// Writes to each variable the parts of all ranks.
    fn gather(&self, shards: &[&Shard]) -> Result<()> {
        let communicator = self.parallel.communicator();
        let limit = self.parallel.reducer().config.bucket_bytes;
        let mut started = Vec::new();
        for together in buckets(shards, limit) {
            let parts: Vec<Tensor> = together
                .iter()
                .map(|shard| kernels::in_dtype(&shard.part, shard.variable.dtype()))
                .collect::<candle_core::Result<_>>()?;
            started.push((together, communicator.start_all_gather(&Tensor::cat(&parts, 0)?)?));
        }
        let write = |(together, pending): (Vec<&Shard>, Pending)| -> Result<()> {
            let rows = pending.wait()?.reshape((communicator.size(), ()))?;
            let mut start = 0;
            for shard in together {
                let (variable, len) = (&shard.variable, shard.part.elem_count());
                let whole = rows.narrow(1, start, len)?.contiguous()?.flatten_all()?;
                let whole = whole.narrow(0, 0, variable.elem_count())?;
                variable.set(&whole.reshape(variable.shape())?)?;
                start += len;
            }
            Ok(())
        };
        let written = started.into_iter().try_for_each(write);
        // On an error too: some have been written.
        version::written(shards.iter().map(|shard| shard.variable.as_tensor()));
        autocast::clear_cast_cache();
        written
    }
}

/// Consecutive shards of one dtype and device, up to a limit of bytes.
fn buckets<'a>(shards: &[&'a Shard], limit: usize) -> Vec<Vec<&'a Shard>> {
    let kind = |shard: &Shard| (shard.variable.dtype(), shard.variable.device().location());
    let mut buckets = Vec::<Vec<&'a Shard>>::new();
    let mut bytes = 0;
    for &shard in shards {
        let own = shard.variable.elem_count() * shard.variable.dtype().size_in_bytes();
        bytes += own;
        match buckets.last_mut() {
            Some(last) if bytes <= limit && kind(last[0]) == kind(shard) => last.push(shard),
            _ => {
                buckets.push(vec![shard]);
                bytes = own;
            }
        }
    }
    buckets
}

impl<C: Config> LearningRate for Sharded<C> {
    fn learning_rate(&self) -> f64 {
        self.learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.set_learning_rate(learning_rate)
    }
}

impl<C: Config> Step for Sharded<C> {
    fn variables(&self) -> Option<Vec<TensorId>> {
        Some(self.shards.iter().map(|shard| shard.variable.id()).collect())
    }

    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> candle_core::Result<()> {
        let has_gradient = |shard: &Shard| gradients.has(&shard.variable);
        self.refresh(|shard| shard.stale && has_gradient(shard))?;
        let variables: HashMap<TensorId, &Var> =
            self.shards.iter().map(|shard| (shard.part.id(), &shard.variable)).collect();
        let gradient = |part: &Tensor| gradients.scaled_gradient(variables.get(&part.id())?);
        self.inner.step_with(gradient, gradients.skip(), false)?;
        let stepped: Vec<&Shard> = self.shards.iter().filter(|shard| has_gradient(shard)).collect();
        Ok(self.gather(&stepped)?)
    }

    fn common_facts(&self) -> Result<OptimizerFacts> {
        self.inner.common_facts()
    }

    fn skips_on_device(&self) -> bool {
        self.inner.skips_on_device()
    }

    fn internals(&self) -> Internals {
        Internals { multiplies: true, takes_shards: true }
    }
}
