//! The scaler: the scale, the gradients it collects, and the steps that it lets through.

use std::sync::Mutex;

use candle_core::{Device, Tensor, TensorId};

use super::diagnostics::{GradientHistogram, ScaleHistory, Warnings};
use super::gradients::{Collected, Finding, Stage, Unscale};
use super::live_scale::LiveScale;
use super::loss_scale::{LossScale, ScaleConfig};
use super::outcome::StepOutcome;
use super::reducer::SharedReducer;
use super::step::{Step, UnscaledGradients};
use crate::autograd::{Ids, is_frozen};
use crate::error::lock::{get_mut, lock};
use crate::error::{ArgumentError, CaptureError, ScalerError};
use crate::kernels::capture;
use crate::kernels::multi_tensor::{FoundInf, Multiplier, NormOfRanks};
use crate::{Parameters, Result, autocast};

/// Scales the loss, so that small 16-bit gradients do not vanish, and holds the gradients between `backward` and the
/// optimizer.
///
/// The loop is PyTorch's, except that gradients collect here rather than in the variables, and
/// [`update`](Self::update) drops them. Calling `backward` again before
/// `step` accumulates, over micro-batches or over several losses.
///
/// It collects the gradients of variables only, in `F32`, whatever the variable's dtype (`F64` for `F64` variables). A gradient that an operator of
/// this crate computed for a 16-bit variable is never rounded to 16 bits.
///
/// | call | gradients | scale |
/// |---|---|---|
/// | `scale(&loss)?.backward()?` | added, scaled | |
/// | `unscale()?`, `clip_grad_norm(..)?` | unscaled and checked, once | |
/// | `step(&mut opt)?` | unscaled if they are not yet; given to `opt` if all are finite | |
/// | `update()?` | dropped | moves |
///
/// [`StepOutcome::report`] explains a skipped step, [`history`](Self::history) has the scale of the last steps, and
/// [`histogram`](Self::histogram) counts the gradients that `F16` loses. Slow failures are logged as warnings, through
/// `tracing`: see [`Warnings`].
///
/// # Examples
///
/// An overflow costs one step, and the next one is tried at half the scale:
///
/// ```
/// use candle_amp::GradScaler;
/// use candle_core::{Device, Var};
/// use candle_nn::{Optimizer, SGD};
///
/// let w = Var::new(1f32, &Device::Cpu)?;
/// let mut sgd = SGD::new(vec![w.clone()], 0.1)?;
/// let mut scaler = GradScaler::default();
///
/// let loss = (w.as_tensor() * 1e38)?; // times 65536 overflows F32
/// scaler.scale(&loss)?.backward()?;
/// let outcome = scaler.step(&mut sgd)?;
/// scaler.update()?;
///
/// assert!(outcome.skipped()?);
/// assert_eq!(scaler.current_scale(), 32768.0);
/// assert_eq!(w.to_scalar::<f32>()?, 1.0);
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `torch.amp.GradScaler`; Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740).
#[derive(Debug)]
pub struct GradScaler {
    /// Locked, because even `current_scale(&self)` may have to read it from a GPU.
    pub(super) scale: Mutex<LiveScale>,
    pub(super) collected: Collected,
    /// An optimizer that keeps its variables to itself was stepped since the last `update`.
    foreign_stepped: bool,
    /// The gradients of the last step, and whether one of them was not finite.
    verdict: Option<(Vec<usize>, FoundInf)>,
    /// The variables with gradients in a step that is being captured.
    captured: Vec<TensorId>,
    /// Combines the gradients of several ranks.
    pub(super) reducer: Option<SharedReducer>,
}

impl Default for GradScaler {
    /// Scale 65536, doubled after 2000 clean steps in a row, halved after an overflow.
    fn default() -> Self {
        match Self::new(ScaleConfig::default()) {
            Ok(scaler) => scaler,
            Err(error) => unreachable!("the default settings are valid: {error}"),
        }
    }
}

impl GradScaler {
    /// A scaler that follows `config`; [`ScaleConfig::constant`] for a scale that stays.
    ///
    /// # Errors
    ///
    /// As [`LossScale::new`].
    pub fn new(config: ScaleConfig) -> Result<Self> {
        Ok(Self::following(Some(LossScale::new(config)?)))
    }

    /// A scaler that scales nothing, checks nothing and never skips a step, but collects and clips
    /// gradients all the same, so that one loop serves every precision.
    ///
    /// `BF16` and `F32` have the exponent range to do without scaling; `F16` has not.
    pub fn disabled() -> Self {
        Self::following(None)
    }

    fn following(scale: Option<LossScale>) -> Self {
        let scale = Mutex::new(LiveScale::new(scale));
        Self {
            scale,
            collected: Collected::default(),
            foreign_stepped: false,
            verdict: None,
            captured: Vec::new(),
            reducer: None,
        }
    }

    /// Has `reducer` combine the gradients of several ranks from the next backward on.
    pub(crate) fn set_reducer(&mut self, reducer: SharedReducer) -> Result<()> {
        if self.has_gradients() {
            return Err(ScalerError::PendingGradients { call: "attach" }.into());
        }
        self.reducer = Some(reducer);
        Ok(())
    }

    fn check_synchronised(&self, call: &'static str) -> Result<()> {
        self.reducer.as_ref().map_or(Ok(()), |it| lock(it).check_synchronised(call))
    }

    /// What one rank found, as all ranks see it. Without a scale no rank looks.
    fn agree(&self, found: FoundInf) -> Result<FoundInf> {
        match &self.reducer {
            Some(reducer) if self.is_enabled() => lock(reducer).agree(found),
            _ => Ok(found),
        }
    }

    /// Whether it scales.
    pub fn is_enabled(&self) -> bool {
        lock(&self.scale).rule.is_some()
    }

    /// The factor the next loss is multiplied by; 1 when disabled.
    ///
    /// # Synchronisation
    ///
    /// None on a CPU. On a GPU, where the scale moves by itself, one read after an `update`. Should
    /// that fail, the answer is the last known scale, and the next `scale` or `update` returns the
    /// error. [`state`](Self::state) and [`history`](Self::history) are alike.
    pub fn current_scale(&self) -> f32 {
        self.state().map_or(1.0, |scale| scale.get())
    }

    /// Scale, tracker and settings, to save; `None` when disabled. Take it after `update`.
    pub fn state(&self) -> Option<LossScale> {
        lock(&self.scale).synchronised().rule
    }

    /// Whether it is between `backward` and `update`.
    pub(crate) fn has_gradients(&self) -> bool {
        let held = |reducer: &SharedReducer| lock(reducer).has_unsynchronised();
        !self.collected.is_empty() || self.reducer.as_ref().is_some_and(held)
    }

    /// Goes on from a saved state.
    ///
    /// # Errors
    ///
    /// [`ScalerError::PendingGradients`] between `backward` and `update`.
    pub fn load_state(&mut self, state: Option<LossScale>) -> Result<()> {
        if self.has_gradients() {
            return Err(ScalerError::PendingGradients { call: "load_state" }.into());
        }
        get_mut(&mut self.scale).load(state)
    }

    pub(super) fn unscaling(&self, device: &Device) -> Result<Unscale> {
        // Not within the expression below, which holds the lock that this takes.
        let check = self.is_enabled();
        Ok(Unscale { factor: lock(&self.scale).factor(device)?, check })
    }

    /// Checks which of the collected gradients are infinite or NaN, and marks them unscaled: whoever reads one next divides it
    /// by the scale.
    ///
    /// Optional: `step` and the clipping calls do it themselves. A second call changes nothing;
    /// gradients that a later `backward` adds are unscaled as they arrive.
    ///
    /// It reads the gradients and writes none: the crate's optimizers multiply where they read, and
    /// whoever else asks for a gradient gets it multiplied. The same goes for clipping by a norm.
    ///
    /// # Precision
    ///
    /// `F32`, times the reciprocal of the scale, which is exact for a power of two.
    ///
    /// # Synchronisation
    ///
    /// None on a CPU or on CUDA; one read on another GPU.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoBackward`]; gradients on several devices.
    pub fn unscale(&mut self) -> Result<()> {
        self.prepare("unscale", None).map(|_| ())
    }

    /// The entries of `parameters`, or all that no optimizer has had.
    fn choose(&self, call: &'static str, parameters: Option<&Parameters>) -> Result<Vec<usize>> {
        self.check_synchronised(call)?;
        if self.collected.is_empty() {
            return Err(ScalerError::NoBackward { call }.into());
        }
        let ids = parameters.map(|p| p.vars().iter().map(|var| var.id()).collect::<Vec<_>>());
        Ok(self.collected.select(ids.as_deref()))
    }

    /// As [`choose`](Self::choose), unscaled.
    fn prepare(
        &mut self,
        call: &'static str,
        parameters: Option<&Parameters>,
    ) -> Result<Vec<usize>> {
        let chosen = self.choose(call, parameters)?;
        self.unscale_chosen(&chosen)?;
        Ok(chosen)
    }

    fn unscale_chosen(&mut self, chosen: &[usize]) -> Result<()> {
        let Some(unscaling) = self.unscaling_of(chosen)? else { return Ok(()) };
        self.collected.unscale(chosen, &unscaling)
    }

    /// What unscales these entries, if there are any.
    fn unscaling_of(&self, chosen: &[usize]) -> Result<Option<Unscale>> {
        let Some(&first) = chosen.first() else { return Ok(None) };
        let (gradient, _) = self.collected.entries()[first].scaled_gradient();
        self.unscaling(gradient.device()).map(Some)
    }

    /// Scales all gradients that no optimizer has had down together, so that their L2 norm is at
    /// most `max_norm`; unscales them first. Returns the norm before, an `F32` scalar.
    ///
    /// With an infinite `max_norm` it only measures. Where a gradient overflowed, the norm is infinite or NaN, and
    /// `step` will skip, for every optimizer that has one of these gradients. The norm of finite gradients can be
    /// beyond `F32`: then the result is infinite. The gradients are scaled down all the same (on Metal, where there
    /// is no `F64`, to zeros). So are, to zeros, those of `F64` variables beyond `1e154`, whose squares are
    /// infinite.
    ///
    /// # Precision
    ///
    /// Squares in `F64` on a CPU and on CUDA, in `F32` elsewhere.
    ///
    /// # Synchronisation
    ///
    /// None on a CPU or on CUDA; the norm stays on the device. One read on another GPU.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoBackward`]; [`ArgumentError::Setting`] for a `max_norm` that is negative or NaN.
    ///
    /// # References
    ///
    /// `torch.nn.utils.clip_grad_norm_`.
    pub fn clip_grad_norm(&mut self, max_norm: f64) -> Result<Tensor> {
        self.clip_norm(None, max_norm)
    }

    /// As [`clip_grad_norm`](Self::clip_grad_norm), for the gradients of `parameters`: with
    /// several optimizers, each has its own norm.
    pub fn clip_grad_norm_of(&mut self, parameters: &Parameters, max_norm: f64) -> Result<Tensor> {
        self.clip_norm(Some(parameters), max_norm)
    }

    fn clip_norm(&mut self, parameters: Option<&Parameters>, max_norm: f64) -> Result<Tensor> {
        limit("max_norm", max_norm)?;
        let chosen = self.choose("clip_grad_norm", parameters)?;
        let Some(unscaling) = self.unscaling_of(&chosen)? else {
            return Ok(Tensor::new(0f32, &Device::Cpu)?);
        };
        let reducer = self.reducer.as_ref().map(|reducer| lock(reducer));
        let ranks = reducer.as_deref().map(|reducer| reducer as &dyn NormOfRanks);
        self.collected.clip_norm(&chosen, max_norm, &unscaling, ranks)
    }

    /// Limits every element of the gradients that no optimizer has had to `-limit..=limit`;
    /// unscales them first. NaN stays NaN.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoBackward`]; [`ArgumentError::Setting`] for a `limit` that is negative or NaN.
    ///
    /// # References
    ///
    /// `torch.nn.utils.clip_grad_value_`.
    pub fn clip_grad_value(&mut self, limit: f64) -> Result<()> {
        self::limit("limit", limit)?;
        let chosen = self.prepare("clip_grad_value", None)?;
        self.collected.clip_value(&chosen, limit)
    }

    /// Steps `optimizer`, unless one of its gradients is infinite or NaN.
    ///
    /// | gradients        | variables, optimizer | [`StepOutcome`] |
    /// |------------------|----------------------|-----------------|
    /// | all finite       | updated              | taken           |
    /// | any `inf`, `NaN` | untouched            | skipped         |
    ///
    /// An optimizer that knows its variables ([`MasterWeights`](crate::MasterWeights), those of
    /// the crate, [`Parameters::bind`]) is given, and judged by, its own gradients. One of candle's
    /// is given all that are left, in the dtypes of their variables; a gradient that overflows in
    /// one of those counts as infinite.
    ///
    /// # Precision
    ///
    /// Gradients are unscaled, then clipped, in `F32`, rounded after each: in the pass of the crate's
    /// optimizers, in place before any other's. The bits are the same.
    ///
    /// # Synchronisation
    ///
    /// None on a CPU. On CUDA none with an optimizer that
    /// [skips by itself](Step::skips_on_device), as the crate's do; with any other, one. On another
    /// GPU one, and one more for each gradient that overflowed.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoBackward`], [`ScalerError::NoGradientForOptimizer`], [`ScalerError::AlreadyStepped`],
    /// [`ScalerError::SecondForeignStep`]; [`ScalerError::StaleGradient`] where this crate has written a variable since its
    /// gradient was computed (`Var::set` leaves no trace). These come before anything has changed. And whatever
    /// `optimizer` returns.
    pub fn step<S: Step>(&mut self, optimizer: &mut S) -> Result<StepOutcome> {
        self.check_synchronised("step")?;
        if self.collected.is_empty() {
            return Err(ScalerError::NoBackward { call: "step" }.into());
        }
        if capture::is_active() && !optimizer.skips_on_device() {
            // Their memory is the capture's, and is gone with it.
            self.zero_grad();
            return Err(CaptureError::HostOptimizer.into());
        }
        let variables = optimizer.variables();
        let chosen = self.collected.select(variables.as_deref());
        match &variables {
            None if self.foreign_stepped => return Err(ScalerError::SecondForeignStep.into()),
            Some(ids) if chosen.is_empty() && !self.any_stepped(ids) => {
                return Err(ScalerError::NoGradientForOptimizer { variables: ids.len() }.into());
            }
            Some(ids) if self.any_stepped(ids) && self.foreign_stepped => {
                return Err(ScalerError::SecondForeignStep.into());
            }
            Some(ids) if self.any_stepped(ids) => return Err(ScalerError::AlreadyStepped.into()),
            _ if chosen.is_empty() => return Err(ScalerError::AlreadyStepped.into()),
            _ => {}
        }
        self.collected.check_current(&chosen)?;
        if let Some(reducer) = &self.reducer {
            let takes_shards = optimizer.internals().takes_shards;
            let mut reducer = lock(reducer);
            reducer.check_optimizer(takes_shards, &|| optimizer.common_facts())?;
        }
        self.unscale_chosen(&chosen)?;
        if self.is_enabled() && optimizer.rounds_gradients() {
            self.collected.check_rounding(&chosen)?;
        }
        let findings = self.collected.concerned(&chosen);
        let found_inf = self.agree(Finding::any(&findings)?)?;
        let outcome =
            StepOutcome::new(lock(&self.scale).snapshot()?, chosen.len(), found_inf, findings);
        let outcome = match outcome.flag().is_some() && optimizer.skips_on_device() {
            true => outcome.left_to_device(),
            false => outcome,
        };
        let flag = outcome.flag().filter(|_| outcome.is_left_to_device());
        if flag.is_some() || !outcome.skipped()? {
            if !optimizer.internals().multiplies {
                self.collected.apply_scale(&chosen)?;
            }
            let entries = chosen.iter().map(|&at| &self.collected.entries()[at]);
            let pairs = entries.map(|entry| (&entry.variable, entry.scaled_gradient()));
            let gradients = UnscaledGradients::new(pairs, flag, self.reducer.is_some());
            let applied = optimizer.apply(&gradients);
            // On an error too: some variables may have been written.
            autocast::clear_cast_cache();
            applied?;
        }
        self.collected.mark_stepped(&chosen);
        self.verdict = Some((chosen, outcome.found_inf().clone()));
        self.foreign_stepped |= variables.is_none();
        Ok(outcome)
    }

    fn any_stepped(&self, ids: &[TensorId]) -> bool {
        let stepped = self.collected.entries().iter().filter(|e| e.stage == Stage::Stepped);
        stepped.into_iter().any(|e| ids.contains(&e.variable.id()))
    }

    /// Moves the scale by what `step` and `unscale` found since the last `update`, and forgets the
    /// gradients.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NothingChecked`]: neither was called.
    ///
    /// # Synchronisation
    ///
    /// None on a CPU. On CUDA the scale moves there; the host reads what became of it when it is
    /// asked for, or every 1,024 updates, and warns then of what [`Warnings`] names.
    pub fn update(&mut self) -> Result<()> {
        get_mut(&mut self.scale).check()?;
        self.check_synchronised("update")?;
        let entries = self.collected.entries().iter().enumerate();
        let checked = entries.filter(|(_, entry)| entry.stage != Stage::Scaled).map(|(at, _)| at);
        let checked: Vec<usize> = checked.collect();
        if checked.is_empty() {
            return Err(ScalerError::NothingChecked.into());
        }
        // Mostly there is one optimizer, and its step has asked already.
        let found_inf = match self.verdict.take() {
            Some((chosen, found_inf)) if chosen == checked => found_inf,
            _ => self.agree(Finding::any(&self.collected.concerned(&checked))?)?,
        };
        get_mut(&mut self.scale).update(found_inf)?;
        match capture::is_active() {
            true => self.captured = self.collected.variables().collect(),
            false => get_mut(&mut self.scale).watch.saw(self.collected.variables()),
        }
        self.zero_grad();
        Ok(())
    }

    /// What a captured step is bound to on the device; `None` where the scale is on the host.
    pub(crate) fn device_state(&self) -> Option<TensorId> {
        lock(&self.scale).device_state()
    }

    /// The variables that had gradients at the last `update` within a capture.
    pub(crate) fn last_collected(&mut self) -> Vec<TensorId> {
        std::mem::take(&mut self.captured)
    }

    /// Notes a captured step that has been replayed, with gradients of these variables.
    pub(crate) fn replayed(&mut self, variables: &[TensorId]) -> Result<()> {
        get_mut(&mut self.scale).replayed()?;
        get_mut(&mut self.scale).watch.saw(variables.iter().copied());
        autocast::clear_cast_cache();
        Ok(())
    }

    /// Drops all collected gradients without moving the scale: for an iteration given up. `update` does so itself.
    pub fn zero_grad(&mut self) {
        self.collected.clear();
        if let Some(reducer) = &self.reducer {
            lock(reducer).forget(None);
        }
        (self.foreign_stepped, self.verdict) = (false, None);
        autocast::clear_cast_cache();
    }

    /// Drops the gradients of `parameters` that no optimizer has had. They count as if no loss had reached these
    /// variables: for the next norm, step and `update`, and what `backward` adds later begins anew.
    ///
    /// For variables that a loss reaches, but is not to train. A gradient that was clipped together with others has
    /// changed them: an infinity in it still skips their step.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_amp::{GradScaler, Parameters, ops};
    /// use candle_core::{Device, Var};
    ///
    /// let (g, c) = (Var::new(&[2f32], &Device::Cpu)?, Var::new(&[3f32], &Device::Cpu)?);
    /// let generator = Parameters::named([("g", g.clone())])?;
    /// let mut scaler = GradScaler::default();
    /// scaler.scale(&ops::sum(&ops::mul(&g, &c)?)?)?.backward()?; // the critic's loss, of samples not detached
    /// scaler.zero_grad_of(&generator);
    /// assert!(scaler.grad(&g)?.is_none() && scaler.grad(&c)?.is_some());
    /// # Ok::<(), candle_amp::Error>(())
    /// ```
    ///
    /// # References
    ///
    /// `torch.optim.Optimizer.zero_grad`.
    pub fn zero_grad_of(&mut self, parameters: &Parameters) {
        let ids: Ids = parameters.vars().iter().map(|var| var.id()).collect();
        self.collected.remove(&ids);
        if let Some(reducer) = &self.reducer {
            lock(reducer).forget(Some(&ids));
        }
        // It names gradients by their places.
        self.verdict = None;
    }

    /// The true gradient collected for `variable`, unscaled; `None` where there is none.
    ///
    /// # Errors
    ///
    /// What the arithmetic meets.
    pub fn grad(&self, variable: &Tensor) -> Result<Option<Tensor>> {
        let Some(entry) = self.collected.get(variable) else { return Ok(None) };
        let gradient = match entry.stage {
            Stage::Scaled => {
                let (gradient, _) = entry.scaled_gradient();
                entry.times(&Multiplier::new(self.unscaling(gradient.device())?.factor))
            }
            Stage::Unscaled | Stage::Stepped => entry.value(),
        };
        gradient.map(Some)
    }

    /// The names of those `parameters` that have got no gradient since the last `update`: unused
    /// ones, and those behind an operator that cuts gradients. Frozen ones are not among them.
    pub fn missing<'p>(&self, parameters: &'p Parameters) -> Vec<&'p str> {
        let missing = |var: &Tensor| self.collected.get(var).is_none() && !is_frozen(var);
        let missing = parameters.iter().filter(|(_, var)| missing(var));
        missing.map(|(name, _)| name).collect()
    }

    /// The exponents of the gradients collected so far, unscaled, by the names of `parameters`; those
    /// of other variables go into the total alone.
    ///
    /// # Synchronisation
    ///
    /// One pass over the gradients. On CUDA a kernel counts, and the host reads the counts, once for each gradient. From
    /// another GPU each gradient is copied.
    ///
    /// # Errors
    ///
    /// [`ScalerError::NoBackward`], and what copying meets.
    pub fn histogram(&self, parameters: &Parameters) -> Result<GradientHistogram> {
        if self.collected.is_empty() {
            return Err(ScalerError::NoBackward { call: "histogram" }.into());
        }
        let mut histogram = GradientHistogram::default();
        let inverse = self.state().map_or(1.0, |scale| scale.inverse());
        for entry in self.collected.entries() {
            let name = parameters.name_of(&entry.variable);
            match entry.stage {
                Stage::Scaled => histogram.add(name, entry.scaled_gradient().0, inverse)?,
                Stage::Unscaled | Stage::Stepped => histogram.add(name, &entry.value()?, 1.0)?,
            }
        }
        Ok(histogram)
    }

    /// The scale of the last steps, and which were skipped: a line for each `update`, also where
    /// only one of several optimizers was. A disabled scaler has none.
    pub fn history(&self) -> ScaleHistory {
        lock(&self.scale).synchronised().watch.history().clone()
    }

    /// Goes on with another history: a longer one, or one that was saved.
    pub fn set_history(&mut self, history: ScaleHistory) {
        get_mut(&mut self.scale).watch.set_history(history);
    }

    /// When to warn, instead of the default.
    ///
    /// # Errors
    ///
    /// [`ArgumentError::Setting`], [`ArgumentError::Order`] for settings outside their range.
    pub fn set_warnings(&mut self, warnings: Warnings) -> Result<()> {
        get_mut(&mut self.scale).watch.set_warnings(warnings)
    }

    /// Warns of those `parameters` that never get a gradient, once enough updates have passed; see
    /// [`Warnings`].
    pub fn watch(&mut self, parameters: &Parameters) {
        get_mut(&mut self.scale).watch.set_parameters(parameters);
    }
}

fn limit(name: &'static str, got: f64) -> Result<()> {
    if got >= 0.0 {
        Ok(())
    } else {
        Err(ArgumentError::Setting { name, got, expected: "a number not below zero" }.into())
    }
}
