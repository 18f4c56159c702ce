//! `F32` masters for 16-bit variables.

mod as_candle;
mod backend;
mod missing;
mod refreshing;
mod vars;

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, TensorId, Var};
use candle_nn::Optimizer;

use crate::autograd::version;
use crate::error::OptimizerError;
use crate::scaler::{OptimizerFacts, Step, UnscaledGradients, facts_of_candles};
use crate::{autocast, kernels};

pub use as_candle::AsCandle;
pub use missing::{MissingGradients, MissingReason};
pub use refreshing::Refreshing;
pub use vars::MasterVars;

/// A variable and the one the optimizer sees: an `F32` copy of a 16-bit variable, or itself.
#[derive(Debug)]
struct Pair {
    variable: Var,
    master: Var,
}

/// The pairs of the floating-point variables among `variables`, each once.
fn pairs(variables: Vec<Var>) -> Result<Vec<Pair>> {
    let mut seen = HashSet::new();
    let pair = |variable: Var| {
        let master = match variable.dtype() {
            DType::F16 | DType::BF16 => Var::from_tensor(&kernels::cast(&variable, DType::F32)?)?,
            _ => variable.clone(),
        };
        Ok(Pair { variable, master })
    };
    let chosen = variables.into_iter().filter(|v| v.dtype().is_float() && seen.insert(v.id()));
    chosen.map(pair).collect()
}

/// Any candle optimizer, over `F32` masters of 16-bit variables.
///
/// A 16-bit variable cannot be trained as it is: an update below its last bit is lost, and candle's
/// AdamW turns `F16` variables to NaN. So the optimizer inside sees an `F32` copy of each, and the
/// variable is rewritten from it, rounded once, after every step. `F32` and `F64` variables pass
/// through.
///
/// | model's variables | memory a parameter, without optimizer state |
/// |---|---|
/// | `F32`, under autocast | 4 bytes, and 2 while a scope holds its 16-bit copy |
/// | 16-bit, with masters | 2 + 4 bytes |
///
/// Masters are `F32` tensors, always: the optimizer inside wants variables. The crate's own
/// optimizers ([`optim`](crate::optim)) keep 16-bit variables themselves, in 6, 4 or 2 bytes a
/// parameter ([`Masters`](crate::optim::Masters)), update everything in one pass, and can be saved.
/// They need no `MasterWeights`.
///
/// It implements [`Step`], not candle's `Optimizer`, so that [`GradScaler::step`] can hand it `F32`
/// gradients; [`as_candle`](Self::as_candle) is for code that asks for candle's trait.
///
/// [`GradScaler::step`]: crate::GradScaler::step
///
/// # Writes to the variables
///
/// A step rewrites the variables from the masters. Where something of this crate has written another value to one since (a
/// checkpoint, [`DataParallel::new`](crate::dist::DataParallel::new)), the step is an error, until
/// [`reload_masters`](Self::reload_masters) takes the masters from the variables. The crate cannot detect candle's `Var::set`
/// and `VarMap::load`: call it after them too, or the next step undoes what they wrote.
///
/// # Precision
///
/// The optimizer inside gets `F32` gradients of 16-bit variables, without rounding from a [`GradScaler`](crate::GradScaler). It
/// computes as candle does, in the dtype of the masters. A variable is its master, rounded once to nearest even.
///
/// # Synchronisation
///
/// None by itself. On a GPU, [`GradScaler::step`] reads once whether a gradient overflowed. After a
/// [write to a variable](#writes-to-the-variables) the next step reads whether the variable still is its master, rounded.
///
/// # Examples
///
/// ```
/// use candle_amp::MasterWeights;
/// use candle_core::{DType, Device, Var};
/// use candle_nn::SGD;
///
/// let w = Var::ones(1, DType::BF16, &Device::Cpu)?;
/// let mut sgd = MasterWeights::<SGD>::new(vec![w.clone()], 1e-3)?;
/// for _ in 0..100 {
///     sgd.backward_step(&w.to_dtype(DType::F32)?.sum_all()?)?; // 1 - 1e-3 is 1 in BF16
/// }
/// assert!((w.to_dtype(DType::F32)?.to_vec1::<f32>()?[0] - 0.9).abs() < 4e-3);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), section 3.1; `apex.amp` with
/// `opt_level="O2"`.
#[derive(Debug)]
pub struct MasterWeights<O> {
    optimizer: O,
    pairs: Vec<Pair>,
    /// When variables and masters were last the same.
    at: AtomicU64,
}

impl<O: Optimizer> MasterWeights<O> {
    /// Masters for `variables` (those of a model; repeated ones count once, integers are left out)
    /// and the optimizer over them.
    ///
    /// # Errors
    ///
    /// Whatever the optimizer's constructor returns.
    pub fn new(variables: Vec<Var>, config: O::Config) -> Result<Self> {
        let pairs = pairs(variables)?;
        let masters = pairs.iter().map(|pair| pair.master.clone()).collect();
        let at = version::tick().into();
        Ok(Self { optimizer: O::new(masters, config)?, pairs, at })
    }

    /// Steps with gradients keyed by the model's variables, in any floating-point dtype.
    ///
    /// # Errors
    ///
    /// Whatever the optimizer returns; [`OptimizerError::StaleMaster`] after a
    /// [write to a variable](Self#writes-to-the-variables).
    pub fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.step_with(|variable| Ok(gradients.get(variable).cloned()))
    }

    fn step_with(&mut self, gradient: impl Fn(&Tensor) -> Result<Option<Tensor>>) -> Result<()> {
        self.check_masters()?;
        let mut store = GradStore::default();
        for Pair { variable, master } in &self.pairs {
            if let Some(gradient) = gradient(variable)? {
                store.insert(master, kernels::cast(&gradient, master.dtype())?);
            }
        }
        let done = self.optimizer.step(&store);
        // On an error too: some may have been written.
        let stepped = self.pairs.iter().filter(|pair| store.get(&pair.master).is_some());
        let both = stepped.flat_map(|pair| [pair.variable.as_tensor(), pair.master.as_tensor()]);
        version::written(both);
        autocast::clear_cast_cache();
        done?;
        self.rewrite()
    }

    /// Back-propagates `loss` and steps, without loss scaling: for `BF16`.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step).
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.step(&loss.backward()?)
    }

    /// Rewrites the 16-bit variables from their masters: after writing to a master by hand.
    ///
    /// # Errors
    ///
    /// What the copy meets.
    pub fn refresh(&self) -> Result<()> {
        version::written(self.copies().map(|pair| pair.variable.as_tensor()));
        self.rewrite()
    }

    fn rewrite(&self) -> Result<()> {
        let pairs = self.copies().map(|pair| (pair.variable.as_tensor(), pair.master.as_tensor()));
        let done = kernels::cast_all(&pairs.collect::<Vec<_>>());
        autocast::clear_cast_cache();
        done?;
        self.at.store(version::tick(), Ordering::Relaxed);
        Ok(())
    }

    /// Takes the masters from the variables: after writing to variables by hand.
    ///
    /// # Errors
    ///
    /// What the copy meets.
    pub fn reload_masters(&mut self) -> Result<()> {
        let pairs = self.copies().map(|pair| (pair.master.as_tensor(), pair.variable.as_tensor()));
        kernels::cast_all(&pairs.collect::<Vec<_>>())?;
        version::written(self.copies().map(|pair| pair.master.as_tensor()));
        self.at.store(version::tick(), Ordering::Relaxed);
        Ok(())
    }

    /// Fails where a variable was written, and is not its master, rounded.
    fn check_masters(&self) -> Result<()> {
        let at = self.at.load(Ordering::Relaxed);
        let written = |pair: &&Pair| version::has_changed_since(at, &pair.variable);
        for Pair { variable, master } in self.copies().filter(written) {
            if !kernels::is_rounded(variable, master)? {
                let shape = variable.shape().clone();
                return Err(OptimizerError::StaleMaster { shape }.into());
            }
        }
        Ok(())
    }

    /// The pairs whose master is a copy.
    fn copies(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| pair.variable.id() != pair.master.id())
    }

    /// The optimizer's learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }

    /// Sets the optimizer's learning rate.
    pub fn set_learning_rate(&mut self, learning_rate: f64) {
        self.optimizer.set_learning_rate(learning_rate)
    }

    /// The master of `variable`: an `F32` copy of a 16-bit variable, or the variable itself.
    pub fn master(&self, variable: &Tensor) -> Option<&Var> {
        let pair = self.pairs.iter().find(|pair| pair.variable.id() == variable.id());
        pair.map(|pair| &pair.master)
    }

    /// The optimizer inside.
    pub fn inner(&self) -> &O {
        &self.optimizer
    }

    /// The optimizer inside.
    pub fn inner_mut(&mut self) -> &mut O {
        &mut self.optimizer
    }

    /// This, where a `candle_nn::Optimizer` is asked for. Given to a scaler in this form it is
    /// like any of candle's: gradients come in the variable's dtype.
    pub fn as_candle(&mut self) -> AsCandle<'_, Self> {
        AsCandle::new(self)
    }
}

impl<O: Optimizer> Step for MasterWeights<O> {
    fn variables(&self) -> Option<Vec<TensorId>> {
        Some(self.pairs.iter().map(|pair| pair.variable.id()).collect())
    }

    fn common_facts(&self) -> crate::Result<OptimizerFacts> {
        Ok(facts_of_candles(&self.optimizer))
    }

    fn apply(&mut self, gradients: &UnscaledGradients<'_>) -> Result<()> {
        self.step_with(|variable| gradients.get(variable))
    }
}

impl<O: Optimizer> Optimizer for AsCandle<'_, MasterWeights<O>> {
    type Config = O::Config;

    fn new(variables: Vec<Var>, config: O::Config) -> Result<Self> {
        Ok(Self::owned(MasterWeights::new(variables, config)?))
    }

    fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.inner_mut().step(gradients)
    }

    fn learning_rate(&self) -> f64 {
        self.inner().learning_rate()
    }

    fn set_learning_rate(&mut self, learning_rate: f64) {
        self.inner_mut().set_learning_rate(learning_rate)
    }
}
