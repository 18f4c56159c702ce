//! A moving average of a model's weights.

use std::collections::BTreeMap;

use candle_core::{DType, Tensor, Var};

use super::config::check_fractions;
use crate::autograd::version;
use crate::error::OptimizerError;
use crate::kernels::multi_tensor::Multiplier;
use crate::kernels::{self, multi_tensor::optimizer as kernel};
use crate::{MasterVars, Parameters, Result, autocast};

/// The settings of an [`Ema`].
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct EmaConfig {
    /// How much of the average is kept at an update. Default `0.999`.
    pub decay: f64,
    /// Keep less at first: `(1 + n) / (10 + n)` at the `n`th update (from 1), while that is below
    /// `decay`. An average that starts from random weights is rid of them sooner. Default `false`.
    pub warm_up: bool,
}

impl Default for EmaConfig {
    fn default() -> Self {
        Self { decay: 0.999, warm_up: false }
    }
}

/// An exponential moving average of the weights of a model, which often does better than the
/// weights themselves.
///
/// ```text
/// average = average + (1 - decay) * (weight - average)
/// ```
///
/// It starts as a copy of the weights. Buffers, such as running statistics, are not averaged.
///
/// # Precision
///
/// The average and its arithmetic are `F32` (`F64` for `F64` variables). In 16 bits the change, a
/// thousandth of a difference, would be lost. What is averaged are the variables it is given: of a 16-bit model
/// with masters in its optimizer, the rounded ones; of [`MasterVars`], by [`of_masters`](Self::of_masters), the masters.
///
/// # Examples
///
/// ```
/// use candle_amp::Parameters;
/// use candle_amp::optim::{Ema, EmaConfig};
/// use candle_core::{DType, Device, Tensor, Var};
///
/// let w = Var::zeros(1, DType::F32, &Device::Cpu)?;
/// let parameters = Parameters::named([("w", w.clone())])?;
/// let mut ema = Ema::new(&parameters, EmaConfig { decay: 0.75, ..Default::default() })?;
/// w.set(&Tensor::ones(1, DType::F32, &Device::Cpu)?)?; // a step
/// ema.update()?;
/// let average = ema.scope(|| w.to_vec1::<f32>())?; // an evaluation
/// assert_eq!(average?, [0.25]);
/// assert_eq!(w.to_vec1::<f32>()?, [1.0]);
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `torch.optim.swa_utils.get_ema_multi_avg_fn`; the warm-up is that of TensorFlow's
/// `ExponentialMovingAverage` with `num_updates`.
#[derive(Debug)]
pub struct Ema {
    config: EmaConfig,
    averages: Vec<Average>,
    updates: u64,
    /// The weights, while the averages are in their place, and since when.
    weights: Option<(Vec<Tensor>, u64)>,
    /// What the model's tensors are rewritten by.
    masters: Option<MasterVars>,
}

#[derive(Debug)]
struct Average {
    name: String,
    variable: Var,
    average: Tensor,
}

/// What an [`Ema`] remembers, to save: copies of the averages, by the names of the parameters.
#[derive(Clone, Debug)]
pub struct EmaState {
    /// `F32`, or `F64` for `F64` variables.
    pub averages: BTreeMap<String, Tensor>,
    /// How many updates there were.
    pub updates: u64,
}

impl Ema {
    /// The average of `parameters`, from a copy of them.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`](crate::error::ArgumentError::Setting) for a `decay` that is not from 0 to below 1.
    pub fn new(parameters: &Parameters, config: EmaConfig) -> Result<Self> {
        check_fractions([("decay", config.decay)])?;
        let mut averages: Vec<Average> = Vec::with_capacity(parameters.len());
        for (name, variable) in parameters.iter() {
            let repeated = averages.iter().any(|a| a.variable.id() == variable.id());
            if repeated || !variable.dtype().is_float() {
                continue;
            }
            let average = kernels::cast(variable, kernels::accumulator(variable.dtype()))?;
            averages.push(Average { name: name.to_owned(), variable: variable.clone(), average });
        }
        Ok(Self { config, averages, updates: 0, weights: None, masters: None })
    }

    /// The average of masters. Whenever the average is put in their place, or they come back, the tensors that the model
    /// has are rewritten from them.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn of_masters(masters: &MasterVars, config: EmaConfig) -> Result<Self> {
        let ema = Self::new(&masters.parameters(), config)?;
        Ok(Self { masters: Some(masters.clone()), ..ema })
    }

    /// Moves the average towards the weights: after every step that was taken.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::AveragesInPlace`] between [`swap_in`](Self::swap_in) and
    /// [`swap_out`](Self::swap_out).
    pub fn update(&mut self) -> Result<()> {
        self.check_out("update")?;
        let rule = kernel::Rule::Average(1.0 - self.decay());
        let slot = |Average { variable, average, .. }: &'_ Average| {
            let wanted = average.dtype();
            // F16, BF16 and F32 are read as they are.
            let same = variable.dtype() == wanted || wanted == DType::F32;
            match same {
                true => Ok(variable.detach()),
                false => kernels::cast(variable, wanted),
            }
        };
        let weights: Vec<Tensor> =
            self.averages.iter().map(slot).collect::<candle_core::Result<_>>()?;
        let slots = self.averages.iter().zip(&weights).map(|(to, weight)| kernel::Slot {
            variable: &to.average,
            master: kernel::Master::Itself,
            states: &[],
            gradient: weight,
            by: &Multiplier::ONE,
            rule,
            seed: 0,
        });
        kernel::step(slots.collect(), None)?;
        version::written(self.averages.iter().map(|a| &a.average));
        self.updates = self.updates.saturating_add(1);
        Ok(())
    }

    /// How much of the average the next update keeps.
    pub fn decay(&self) -> f64 {
        let n = self.updates as f64 + 1.0;
        match self.config.warm_up {
            true => self.config.decay.min((1.0 + n) / (10.0 + n)),
            false => self.config.decay,
        }
    }

    /// How many updates there were.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// The average of `variable`, `F32` (`F64` for an `F64` variable); `None` where it has none.
    pub fn average(&self, variable: &Tensor) -> Option<&Tensor> {
        let found = self.averages.iter().find(|a| a.variable.id() == variable.id());
        found.map(|a| &a.average)
    }

    /// Runs `f`, an evaluation, with the averages in place of the weights.
    ///
    /// The weights are back afterwards, also where `f` panics.
    ///
    /// # Errors
    ///
    /// As [`swap_in`](Self::swap_in) and [`swap_out`](Self::swap_out); not seen where `f` panics.
    pub fn scope<T>(&mut self, f: impl FnOnce() -> T) -> Result<T> {
        /// Puts the weights back.
        struct Out<'a>(&'a mut Ema);
        impl Drop for Out<'_> {
            fn drop(&mut self) {
                let _ = self.0.swap_out();
            }
        }
        self.swap_in()?;
        let out = Out(self);
        let result = f();
        out.0.swap_out()?;
        Ok(result)
    }

    /// Puts the averages, rounded once, in place of the weights, which are kept.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::AveragesInPlace`] where they are already; [`OptimizerError::AverageOfMasters`] where a model
    /// reads copies of the weights, which would stay what they are.
    pub fn swap_in(&mut self) -> Result<()> {
        self.check_out("swap_in")?;
        self.check_masters()?;
        let keep = |a: &Average| a.variable.detach().copy();
        let weights = self.averages.iter().map(keep).collect::<candle_core::Result<_>>()?;
        self.weights = Some((weights, version::tick()));
        let written = self.write();
        if let Some((_, since)) = &mut self.weights {
            *since = version::written(self.averages.iter().map(|a| a.variable.as_tensor()));
        }
        let written = written.and_then(|()| self.refresh());
        written.or_else(|error| self.swap_out().and(Err(error)))
    }

    /// Puts the weights back, bit for bit. Without [`swap_in`](Self::swap_in) before it nothing
    /// happens.
    ///
    /// # Errors
    ///
    /// What the copy meets. [`OptimizerError::WrittenMeanwhile`] where this crate has written to weights while the averages
    /// were in their place: a step, a checkpoint. What was written stays, and the other weights are back.
    pub fn swap_out(&mut self) -> Result<()> {
        let Some((weights, since)) = self.weights.take() else { return Ok(()) };
        let all = self.averages.iter().zip(&weights);
        let is_written = |a: &Average| version::has_changed_since(since, &a.variable);
        let (lost, back): (Vec<_>, Vec<_>) = all.partition(|(to, _)| is_written(to));
        let pairs = back.iter().map(|(to, weight)| (to.variable.as_tensor(), *weight));
        if let Err(error) = kernels::cast_all(&pairs.collect::<Vec<_>>()) {
            self.weights = Some((weights, since)); // to be tried again
            return Err(error.into());
        }
        version::put_back(back.iter().map(|(to, _)| to.variable.as_tensor()), since);
        self.refresh()?;
        match lost.first() {
            Some((to, _)) => Err(OptimizerError::WrittenMeanwhile { name: to.name.clone() }.into()),
            None => Ok(()),
        }
    }

    /// Overwrites the weights with the averages for good: at the end of training. A 16-bit variable's
    /// master, if an optimizer has one, does not follow.
    ///
    /// # Errors
    ///
    /// [`OptimizerError::AveragesInPlace`] between [`swap_in`](Self::swap_in) and
    /// [`swap_out`](Self::swap_out); [`OptimizerError::AverageOfMasters`] as there.
    pub fn copy_to(&self) -> Result<()> {
        self.check_out("copy_to")?;
        self.check_masters()?;
        let written = self.write();
        version::written(self.averages.iter().map(|a| a.variable.as_tensor()));
        autocast::clear_cast_cache();
        written.and_then(|()| self.refresh())
    }

    /// Copies the averages to the weights. The caller notes the write.
    fn write(&self) -> Result<()> {
        let pairs = self.averages.iter().map(|a| (a.variable.as_tensor(), &a.average));
        Ok(kernels::cast_all(&pairs.collect::<Vec<_>>())?)
    }

    /// What is computed from the weights elsewhere follows them.
    fn refresh(&self) -> Result<()> {
        autocast::clear_cast_cache();
        self.masters.as_ref().map_or(Ok(()), |masters| Ok(masters.refresh()?))
    }

    /// Fails where copies of the weights would not follow.
    fn check_masters(&self) -> Result<()> {
        if self.masters.is_some() {
            return Ok(());
        }
        let masters = version::masters();
        match self.averages.iter().find(|a| masters.contains(&a.variable.id())) {
            Some(a) => Err(OptimizerError::AverageOfMasters { name: a.name.clone() }.into()),
            None => Ok(()),
        }
    }

    /// Fails between [`swap_in`](Self::swap_in) and [`swap_out`](Self::swap_out).
    pub(crate) fn check_out(&self, call: &'static str) -> Result<()> {
        match self.weights {
            Some(_) => Err(OptimizerError::AveragesInPlace { call }.into()),
            None => Ok(()),
        }
    }

    /// The averages themselves, by name.
    pub(crate) fn averages(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.averages.iter().map(|a| (a.name.as_str(), &a.average))
    }

    /// The state, to save.
    ///
    /// # Errors
    ///
    /// What the copies meet.
    pub fn state(&self) -> Result<EmaState> {
        let copy = |a: &Average| Ok((a.name.clone(), a.average.copy()?));
        let averages = self.averages.iter().map(copy).collect::<candle_core::Result<_>>()?;
        Ok(EmaState { averages, updates: self.updates })
    }

    /// Goes on from a saved state.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::State`](crate::error::CheckpointError::State) where names, shapes or dtypes do not fit,
    /// [`OptimizerError::AveragesInPlace`]; nothing is changed then.
    pub fn load_state(&mut self, state: &EmaState) -> Result<()> {
        self.check_out("load_state")?;
        let names: Vec<&String> = self.averages.iter().map(|a| &a.name).collect();
        let found: Vec<&String> = state.averages.keys().collect();
        super::state::expect("the averages", &found, &names)?;
        let mut loaded = Vec::with_capacity(names.len());
        for Average { name, average, .. } in &self.averages {
            let (tensor, shape) = (state.averages.get(name), average.shape());
            let tensor = super::state::checked(name.clone(), tensor, shape, average.dtype())?;
            loaded.push(tensor.to_device(average.device())?.contiguous()?.copy()?);
        }
        for (own, loaded) in self.averages.iter_mut().zip(loaded) {
            own.average = loaded;
        }
        self.updates = state.updates;
        Ok(())
    }
}
