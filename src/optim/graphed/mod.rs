//! A training step that a GPU repeats as one CUDA graph.

mod captured;
mod key;
#[cfg(test)]
mod tests;

use std::fmt;
use std::marker::PhantomData;

use candle_core::{DType, Device, Shape, Tensor};

use super::{Config, Optim, Step};
use crate::autograd::{no_grad_is_active, profile};
use crate::error::{CaptureError, ScalerError};
use crate::kernels::cuda::Gpu;
use crate::{GradScaler, Result, StepOutcome, autocast};
use captured::{Captured, LossAndOutcome, Rehearsed};
use key::GraphKey;

/// A whole training step that a GPU repeats as one CUDA graph: forward, backward, unscaling, clipping, the optimizer, and
/// the scale's move. The host then launches one graph instead of some hundred kernels. That makes steps faster where
/// the host takes longer than the GPU, as with small networks.
///
/// The first steps (three, [`with_warm_up`](Self::with_warm_up)) run as always. The next one is captured, and from then on
/// each [`run`](Self::run) copies its inputs into the graph's own and replays it. Results are those of
/// [`eager`](Self::eager), to the bit.
///
/// On a CPU, or another device without CUDA, every step runs as always: one program serves all.
///
/// # What a graph repeats
///
/// | | in a replay |
/// |---|---|
/// | inputs | copied in: shapes and dtypes as in the first run |
/// | learning rate, and every other setting of the optimizer | as it is now: schedules work as always |
/// | steps that are skipped | the GPU decides, as always |
/// | loss scale | on the GPU, as always |
/// | dropout | goes on with the generator, as always; [`random::state`](crate::random::state) is right |
/// | running statistics of batch norm | go on |
/// | the function itself | does not run: neither its prints nor what else it does on the host |
///
/// The function must do the same each time. It may not read from the GPU, nor upload new numbers: hand them in as inputs.
/// Where it does so through candle or this crate, the capture is refused. It may not run an optimizer of candle's: a
/// scaler refuses that, but a direct `backward_step` of candle's `AdamW` would repeat one step's bias correction.
///
/// A graph is made anew, after a step that runs as always, when what it is bound to has changed. That is an optimizer
/// or scaler that loaded a state, frozen variables, the active [`Autocast`](crate::Autocast), TF32 and cuDNN settings.
/// It stays on the thread that made it.
///
/// # Memory
///
/// A graph keeps the memory of one step for itself, besides what eager steps use.
///
/// # Examples
///
/// ```
/// use candle_amp::optim::{AdamW, AdamWConfig, GraphedStep, Schedule, Scheduler};
/// use candle_amp::{Autocast, GradScaler, Parameters, nn, ops};
/// use candle_core::{DType, Device, Module, Tensor};
///
/// let device = Device::cuda_if_available(0)?;
/// let varmap = nn::VarMap::new();
/// let model = nn::linear(2, 3, nn::var_builder(&varmap, DType::F32, &device))?;
/// let (amp, mut scaler) = (Autocast::new(DType::F16), GradScaler::default());
/// let mut adamw = AdamW::new(&Parameters::from_varmap(&varmap), AdamWConfig::default())?;
/// let mut scheduler = Scheduler::new(Schedule::cosine(8), &mut adamw)?;
///
/// let mut train = GraphedStep::new(|inputs: &[Tensor]| {
///     amp.scope(|| ops::cross_entropy(&model.forward(&inputs[0])?, &inputs[1]))
/// });
/// for _ in 0..8 {
///     let x = Tensor::ones((4, 2), DType::F32, &device)?;
///     let y = Tensor::new(&[0u32, 1, 2, 1], &device)?;
///     let (loss, outcome) = train.run(&mut scaler, &mut adamw, &[x, y])?;
///     scheduler.step(&outcome, &mut adamw)?;
///     assert!(loss.to_scalar::<f32>()? < 10.0);
/// }
/// # Ok::<(), candle_amp::Error>(())
/// ```
///
/// # References
///
/// `torch.cuda.graph`, `torch.cuda.make_graphed_callables`; "Whole-network capture" in PyTorch's notes on CUDA.
pub struct GraphedStep<F> {
    forward: F,
    warm_up: u32,
    max_norm: Option<f64>,
    /// Of the first run.
    inputs: Option<Vec<(Shape, DType)>>,
    /// Steps that ran as always.
    warm: u32,
    rehearsed: Option<Rehearsed>,
    captured: Option<Captured>,
    /// A graph's addresses of temporary memory are this thread's.
    _not_send: PhantomData<*const ()>,
}

impl<F> fmt::Debug for GraphedStep<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { warm_up, max_norm, inputs, warm, .. } = self;
        f.debug_struct("GraphedStep")
            .field("inputs", inputs)
            .field("warm_up", &format_args!("{warm} of {warm_up}"))
            .field("max_norm", max_norm)
            .field("captured", &self.captured.is_some())
            .finish_non_exhaustive()
    }
}

impl<F: FnMut(&[Tensor]) -> candle_core::Result<Tensor>> GraphedStep<F> {
    /// A step whose loss is what `forward` makes of the inputs, with an autocast scope in it if there is to be one.
    pub fn new(forward: F) -> Self {
        Self {
            forward,
            warm_up: 3,
            max_norm: None,
            inputs: None,
            warm: 0,
            rehearsed: None,
            captured: None,
            _not_send: PhantomData,
        }
    }

    /// The same with another number of steps before the capture; at least one. In these, kernels are compiled, libraries
    /// choose algorithms, and the optimizer makes its state.
    #[must_use]
    pub fn with_warm_up(self, steps: u32) -> Self {
        Self { warm_up: steps.max(1), ..self }
    }

    /// The same with [`clip_grad_norm`](GradScaler::clip_grad_norm) before the optimizer. A `max_norm` that is negative or NaN
    /// is an error in each step.
    #[must_use]
    pub fn with_clip_grad_norm(self, max_norm: f64) -> Self {
        Self { max_norm: Some(max_norm), rehearsed: None, captured: None, ..self }
    }

    /// Whether the next run with the same optimizer and scaler replays a graph.
    pub fn is_captured(&self) -> bool {
        self.captured.is_some()
    }

    /// One step: by the graph, if there is one. The loss and the outcome are this step's own.
    ///
    /// # Synchronisation
    ///
    /// None, but for the warm-up's first use of kernels and libraries, and where something else than a step has written
    /// variables that have masters: these are read then.
    ///
    /// # Errors
    ///
    /// [`CaptureError`]; [`ScalerError::PendingGradients`] between `backward` and `update`; what forward, backward or the
    /// optimizer meet. After an error of a capture, weights, optimizer, scaler and generator are as before; after one of a replay its
    /// random numbers may be used up.
    pub fn run<C: Config>(
        &mut self,
        scaler: &mut GradScaler,
        optimizer: &mut Optim<C>,
        inputs: &[Tensor],
    ) -> Result<(Tensor, StepOutcome)> {
        let given: Vec<_> = inputs.iter().map(|x| (x.shape().clone(), x.dtype())).collect();
        match &self.inputs {
            Some(expected) if *expected != given => {
                let expected = expected.clone();
                return Err(CaptureError::Inputs { expected, got: given }.into());
            }
            _ => {}
        }
        let observed = no_grad_is_active() || profile::is_active() || autocast::trace::is_active();
        let device = optimizer.device();
        let gpu = device.as_ref().and_then(Gpu::of).filter(|_| !observed);
        let Some(gpu) = gpu else {
            let stepped = self.eager(scaler, optimizer, inputs)?;
            self.inputs = Some(given);
            return Ok(stepped);
        };
        if scaler.has_gradients() {
            return Err(ScalerError::PendingGradients { call: "GraphedStep::run" }.into());
        }
        let bound = GraphKey::to(scaler, optimizer);
        if self.captured.as_ref().is_some_and(|captured| captured.bound != bound) {
            self.captured = None;
        }
        if let (None, Some(rehearsed)) = (&self.captured, &self.rehearsed)
            && rehearsed.bound == bound
        {
            let (forward, max_norm) = (&mut self.forward, self.max_norm);
            let step = |scaler: &mut GradScaler, optimizer: &mut Optim<C>, inputs: &[Tensor]| {
                step(forward, max_norm, scaler, optimizer, inputs)
            };
            self.captured = Some(rehearsed.capture(gpu, scaler, optimizer, inputs, step)?);
        }
        if let Some(captured) = &mut self.captured {
            return captured.replay(gpu, scaler, optimizer, inputs);
        }
        let (stepped, recording) = crate::kernels::capture::record(None, || {
            gpu.rehearse(|| self.eager(scaler, optimizer, inputs))
        });
        let (loss, outcome) = stepped?;
        self.inputs = Some(given);
        self.warm = self.warm.saturating_add(1);
        if self.warm >= self.warm_up {
            let bound = GraphKey::to(scaler, optimizer);
            self.rehearsed = Some(Rehearsed::new(&loss, &outcome, recording.words.len(), bound)?);
        }
        Ok((loss, outcome))
    }

    /// One step as always, without a graph: for a batch of another shape, and to compare.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run), without those of a capture. The gradients are dropped then.
    pub fn eager<C: Config>(
        &mut self,
        scaler: &mut GradScaler,
        optimizer: &mut Optim<C>,
        inputs: &[Tensor],
    ) -> Result<(Tensor, StepOutcome)> {
        if scaler.has_gradients() {
            return Err(ScalerError::PendingGradients { call: "GraphedStep::eager" }.into());
        }
        let device = optimizer.device();
        let on_device = |x: &Tensor| device.as_ref().map_or(Ok(x.clone()), |d| x.to_device(d));
        let inputs = inputs.iter().map(on_device).collect::<candle_core::Result<Vec<_>>>()?;
        step(&mut self.forward, self.max_norm, scaler, optimizer, &inputs)
    }
}

/// Forward, backward, and all that follows. After an error no gradients are left.
fn step<C: Config>(
    forward: &mut impl FnMut(&[Tensor]) -> candle_core::Result<Tensor>,
    max_norm: Option<f64>,
    scaler: &mut GradScaler,
    optimizer: &mut Optim<C>,
    inputs: &[Tensor],
) -> Result<LossAndOutcome> {
    let mut all = || {
        let loss = forward(inputs)?;
        scaler.scale(&loss)?.backward()?;
        if let Some(max_norm) = max_norm {
            scaler.clip_grad_norm(max_norm)?;
        }
        let outcome = scaler.step(optimizer)?;
        scaler.update()?;
        Ok((loss.detach(), outcome))
    };
    let stepped = all();
    if stepped.is_err() {
        scaler.zero_grad();
    }
    stepped
}

impl<C: Config> Optim<C> {
    /// The device that all variables are on.
    fn device(&self) -> Option<Device> {
        let first = self.slots.first()?.variable.device();
        self.skips_on_device().then(|| first.clone())
    }
}
