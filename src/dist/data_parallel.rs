//! One model on several ranks, which see different samples.

use std::sync::{Arc, Mutex, MutexGuard};

use candle_core::Var;

use super::communicator::Communicator;
use super::config::DataParallelConfig;
use super::exchange::{Facts, compare};
use super::reducer::BucketReducer;
use crate::autograd::{is_frozen, version};
use crate::error::lock::lock;
use crate::{GradScaler, Parameters, Result, autocast};

/// Averages the gradients of a [`GradScaler`] over all ranks, while backward goes on.
///
/// Every rank has the whole model and a part of the batch. Made from a communicator and the model's parameters, then
/// [attached](Self::attach) to the scaler, it leaves the loop as it is. When `backward` returns, the scaler has the
/// average of all ranks' gradients, the same bits on each.
///
/// # Ranks
///
/// All ranks run the same program: they make the same calls in the same order. Making this compares the crate's version,
/// the settings, and the names, shapes and dtypes of parameters and buffers, and gives all ranks the weights and buffers
/// of rank 0. Every [`check_every`](DataParallelConfig::check_every) passes they compare the loss scale, the generator's
/// seed and the weights. At the step after it they compare the optimizer: its settings and steps, or the learning rate
/// alone of one of candle's. Of an optimizer of your own, the one that [`Step::inner`](crate::optim::Step::inner) names is
/// compared, or nothing.
///
/// Without [`attach`](Self::attach) nothing is averaged, and each rank trains alone, without an error. So does an optimizer's
/// own `backward_step`.
///
/// # Copies of weights
///
/// Make what copies weights after this. A [`MasterWeights`](crate::MasterWeights) made before returns an error at its first
/// step where rank 0's weights differ, until [`reload_masters`](crate::MasterWeights::reload_masters). Tensors of
/// [`MasterVars`](crate::MasterVars) need a [`refresh`](crate::MasterVars::refresh), or `backward` returns an error. An
/// [`Ema`](crate::optim::Ema) made before goes on with other weights, without an error.
///
/// # Frozen parameters
///
/// What is frozen when this is made is compared by name, shape and dtype, and gets rank 0's values. It does not travel with the
/// gradients, and is not among the weights that are compared later. A gradient of it is an error. What is frozen later travels as zeros.
///
/// # Buckets
///
/// Gradients travel in buckets, in the order in which backward completes them: at first in the reverse of the
/// parameters' order, then as rank 0 saw them come. A bucket starts as soon as it is full, if only operators of this
/// crate lie between the loss and the variables. Where candle schedules backward, buckets start at its end.
///
/// # Precision
///
/// Gradients are `F32` (`F64` of `F64` variables), added in the order of the ranks, and divided by their number. With
/// `BF16` on the wire each gradient, and the sum, is rounded once. Runs repeat bit for bit.
///
/// # Loss scale
///
/// An infinity on one rank is in the average on all, so that all skip the step, and all scales move alike.
///
/// # Accumulation
///
/// Backward within [`no_sync`](Self::no_sync) does not communicate. The next backward outside averages what has
/// accumulated. `step`, `clip_grad_norm`, `unscale` and `update` before that are errors.
///
/// # Synchronisation
///
/// `backward` returns once all gradients are averaged. On a GPU it reads which parameters had one.
///
/// # Errors
///
/// Of `backward`: [`ParallelError`](crate::error::ParallelError) on all ranks, where a rank has no gradient of a
/// parameter ([`Unused`](crate::error::ParallelError::Unused)), where a variable is not among the parameters, or where
/// the comparison finds a difference. Also those of the communicator.
///
/// # Examples
///
/// Two threads train one model; each has half of the batch:
///
/// ```
/// use candle_amp::dist::{DataParallel, Threads};
/// use candle_amp::optim::{Sgd, SgdConfig};
/// use candle_amp::{GradScaler, Parameters, nn, ops, random};
/// use candle_core::{DType, Device, Module, Tensor};
///
/// let weights = Threads::run(2, |communicator| {
///     let varmap = nn::VarMap::new();
///     let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
///     let model = nn::linear(2, 1, vb)?;
///     let parameters = Parameters::from_varmap(&varmap);
///     let mut sgd = Sgd::new(&parameters, SgdConfig { lr: 0.1, ..Default::default() })?;
///     let mut scaler = GradScaler::default();
///
///     let parallel = DataParallel::new(communicator.clone(), &parameters)?; // rank 0's weights
///     parallel.attach(&mut scaler)?;
///
///     let x = Tensor::full(1.0 + communicator.rank() as f32, (4, 2), &Device::Cpu)?;
///     for _ in 0..3 {
///         let loss = ops::mean(&model.forward(&x)?.sqr()?)?;
///         scaler.scale(&loss)?.backward()?; // the average of both ranks
///         scaler.step(&mut sgd)?;
///         scaler.update()?;
///     }
///     Ok(model.weight().flatten_all()?.to_vec1::<f32>()?)
/// })?;
/// assert_eq!(weights[0], weights[1]);
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// Li et al., [PyTorch Distributed](https://arxiv.org/abs/2006.15704);
/// `torch.nn.parallel.DistributedDataParallel`.
#[derive(Clone, Debug)]
pub struct DataParallel {
    reducer: Arc<Mutex<BucketReducer>>,
    communicator: Arc<dyn Communicator>,
    parameters: Parameters,
}

impl DataParallel {
    /// With the default settings: see [`with_config`](Self::with_config).
    ///
    /// # Errors
    ///
    /// As [`with_config`](Self::with_config).
    pub fn new(communicator: Arc<dyn Communicator>, parameters: &Parameters) -> Result<Self> {
        Self::with_config(communicator, parameters, DataParallelConfig::default())
    }

    /// Compares the model of all ranks, and gives all the weights and buffers of rank 0.
    ///
    /// # Errors
    ///
    /// [`ParallelError::Differs`](crate::error::ParallelError::Differs),
    /// [`ArgumentError`](crate::error::ArgumentError) for settings that do not fit, those of the communicator.
    pub fn with_config(
        communicator: Arc<dyn Communicator>,
        parameters: &Parameters,
        config: DataParallelConfig,
    ) -> Result<Self> {
        config.validate()?;
        let reducer = BucketReducer::new(communicator.clone(), parameters, config);
        let facts = facts(parameters, &reducer);
        compare(&*communicator, "the model", &facts, &reducer.device())?;
        let reducer = Arc::new(Mutex::new(reducer));
        let parallel = Self { reducer, communicator, parameters: parameters.clone() };
        parallel.broadcast(parallel.parameters.vars().iter())?;
        parallel.broadcast_buffers()?;
        Ok(parallel)
    }

    /// Has `scaler` collect averaged gradients. One scaler at a time: two would share what [`no_sync`](Self::no_sync) holds.
    ///
    /// # Errors
    ///
    /// [`ScalerError::PendingGradients`](crate::error::ScalerError::PendingGradients) between `backward` and `update`.
    pub fn attach(&self, scaler: &mut GradScaler) -> Result<()> {
        scaler.set_reducer(self.reducer.clone())
    }

    /// Runs `f`, in which backward accumulates and does not communicate: for all micro-batches but the last.
    ///
    /// ```
    /// # use candle_amp::{GradScaler, Parameters, ops};
    /// # use candle_amp::dist::{DataParallel, Threads};
    /// # use candle_core::{Device, Var};
    /// # Threads::run(2, |communicator| {
    /// # let w = Var::new(&[1f32], &Device::Cpu)?;
    /// # let parameters = Parameters::named([("w", w.clone())])?;
    /// # let mut scaler = GradScaler::disabled();
    /// # let parallel = DataParallel::new(communicator.clone(), &parameters)?;
    /// # parallel.attach(&mut scaler)?;
    /// parallel.no_sync(|| scaler.scale(&ops::sum(&w)?)?.backward())?;
    /// scaler.scale(&ops::sum(&w)?)?.backward()?; // averages the sum of both
    /// assert_eq!(scaler.grad(&w)?.unwrap().to_vec1::<f32>()?, [2.0]);
    /// # Ok(()) })?;
    /// # Ok::<(), candle_amp::Error>(())
    /// ```
    pub fn no_sync<T>(&self, f: impl FnOnce() -> T) -> T {
        /// Goes back to what was before, on panic too.
        struct Paused<'a>(&'a DataParallel, bool);
        impl Drop for Paused<'_> {
            fn drop(&mut self) {
                self.0.reducer().paused = self.1;
            }
        }
        let before = std::mem::replace(&mut self.reducer().paused, true);
        let _paused = Paused(self, before);
        f()
    }

    /// Compares the state of `scaler`, the generator's seed and the weights of all ranks now.
    ///
    /// # Errors
    ///
    /// [`ParallelError::Differs`](crate::error::ParallelError::Differs), which says which rank and what; those of the
    /// communicator.
    pub fn check(&self, scaler: &GradScaler) -> Result<()> {
        self.reducer().check(scaler.state())
    }

    /// Gives all ranks the buffers of rank 0: running statistics that each rank has averaged over its own samples.
    /// Before an evaluation or a checkpoint. [`sync_batch_norm`](super::sync_batch_norm) makes it unnecessary.
    ///
    /// # Errors
    ///
    /// Those of the communicator.
    pub fn broadcast_buffers(&self) -> Result<()> {
        self.broadcast(self.parameters.buffers().map(|(_, var)| var))
    }

    /// The communicator it was made with.
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    pub(super) fn reducer(&self) -> MutexGuard<'_, BucketReducer> {
        lock(&self.reducer)
    }

    fn broadcast<'a>(&self, variables: impl Iterator<Item = &'a Var>) -> Result<()> {
        for variable in variables {
            let value = self.communicator.broadcast(&variable.as_detached_tensor(), 0)?;
            let set = variable.set(&value);
            version::written([variable.as_tensor()]);
            autocast::clear_cast_cache();
            set?;
        }
        self.communicator.synchronize()
    }
}

/// What all ranks must have in common before the first step.
fn facts(parameters: &Parameters, reducer: &BucketReducer) -> Facts {
    let mut facts = Facts::from([
        ("version of candle-amp".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("settings".to_owned(), format!("{:?}", reducer.config)),
        ("parameters that are not frozen".to_owned(), reducer.parameters.len().to_string()),
    ]);
    let all = parameters.iter().map(|named| ("parameter", named));
    for (kind, (name, var)) in all.chain(parameters.buffers().map(|named| ("buffer", named))) {
        let frozen = if is_frozen(var) { ", frozen" } else { "" };
        let fact = format!("{:?} {:?}{frozen}", var.dtype(), var.dims());
        facts.insert(format!("{kind} `{name}`"), fact);
    }
    facts
}
