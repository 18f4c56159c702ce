//! The outcome of a step: taken or skipped, and why.

use std::sync::OnceLock;
use std::thread::{self, ThreadId};

use candle_core::{Device, Tensor, TensorId};

use crate::kernels::cuda::Gpu;
use crate::kernels::multi_tensor::{FoundInf, Number};
use crate::scaler::diagnostics::{NonFinite, OverflowReport};
use crate::scaler::gradients::Finding;
use crate::{Parameters, Result};

/// What became of a step. Nothing about it is an error: a run with a dynamic scale skips a step
/// whenever the scale turns out too high.
///
/// ```
/// use candle_amp::{GradScaler, Parameters};
/// use candle_core::{Device, Tensor, Var};
/// use candle_nn::{Optimizer, SGD};
///
/// let (a, b) = (Var::zeros(3, candle_core::DType::F32, &Device::Cpu)?, Var::new(1f32, &Device::Cpu)?);
/// let parameters = Parameters::named([("layer.weight", a.clone()), ("layer.bias", b.clone())])?;
/// let mut sgd = SGD::new(parameters.vars(), 0.1)?;
/// let mut scaler = GradScaler::default();
///
/// let factors = Tensor::new(&[1f32, f32::INFINITY, f32::NAN], &Device::Cpu)?;
/// let loss = ((a.as_tensor() * factors)?.sum_all()? + b.as_tensor())?;
/// scaler.scale(&loss)?.backward()?;
/// let outcome = scaler.step(&mut sgd)?;
/// assert_eq!(outcome.report(&parameters)?.to_string(), "\
/// skipped at scale 65536: 1 of 2 gradients are not finite
/// variable      infinite  NaN  of
/// layer.weight         1    1   3");
/// # Ok::<(), candle_amp::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct StepOutcome {
    /// On a GPU a copy of its own.
    scale: Number,
    checked: usize,
    found_inf: FoundInf,
    findings: Vec<Finding>,
    /// Whether a GPU takes the step or skips it, whether or not the host has asked since.
    left_to_device: bool,
    /// The thread that stepped on a GPU: each has a stream of its own there.
    stepped: Option<(ThreadId, Device)>,
    read: Known,
}

/// What has been read of it.
#[derive(Clone, Debug, Default)]
struct Known {
    scale: OnceLock<f32>,
    skipped: OnceLock<bool>,
    non_finite: OnceLock<Vec<(TensorId, NonFinite)>>,
}

/// What `known` holds, or else is read now.
fn once<T: Clone>(known: &OnceLock<T>, read: impl FnOnce() -> Result<T>) -> Result<T> {
    match known.get() {
        Some(value) => Ok(value.clone()),
        None => {
            let value = read()?;
            Ok(known.get_or_init(|| value).clone())
        }
    }
}

impl StepOutcome {
    /// Of the step that `found_inf` decides, which is of `findings`.
    pub(crate) fn new(
        scale: Number,
        checked: usize,
        found_inf: FoundInf,
        findings: Vec<Finding>,
    ) -> Self {
        let device = match &found_inf {
            FoundInf::Host(_) => None,
            FoundInf::Device(flag) => Some(flag.tensor().device().clone()),
        };
        let stepped = device.map(|device| (thread::current().id(), device));
        let read = Known::default();
        Self { scale, checked, found_inf, findings, left_to_device: false, stepped, read }
    }

    /// The same, of an optimizer that was given the flag.
    pub(crate) fn left_to_device(self) -> Self {
        Self { left_to_device: true, ..self }
    }

    /// Whether a GPU decided the step, or will. Unlike [`is_known`](Self::is_known) it does not change when somebody reads.
    pub(crate) fn is_left_to_device(&self) -> bool {
        self.left_to_device
    }

    /// The same outcome with other tensors on the GPU, each that `f` gives for one: of a step that was captured. Nothing of
    /// it is read yet.
    pub(crate) fn with_tensors(
        &self,
        mut f: impl FnMut(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut seen: Vec<(TensorId, Tensor)> = Vec::new();
        let mut map = |tensor: &Tensor| -> Result<Tensor> {
            if let Some((_, other)) = seen.iter().find(|(id, _)| *id == tensor.id()) {
                return Ok(other.clone());
            }
            let other = f(tensor)?;
            seen.push((tensor.id(), other.clone()));
            Ok(other)
        };
        let scale = match &self.scale {
            Number::Host(scale) => Number::Host(*scale),
            Number::Device(scale) => Number::Device(map(scale)?),
        };
        let found_inf = match &self.found_inf {
            FoundInf::Host(found) => FoundInf::Host(*found),
            FoundInf::Device(flag) => FoundInf::Device(flag.with_tensor(map(flag.tensor())?)),
        };
        let mut findings = self.findings.clone();
        for flag in findings.iter_mut().flat_map(|finding| &mut finding.flags) {
            *flag = flag.with_tensor(map(flag.tensor())?);
        }
        let left_to_device = self.left_to_device;
        Ok(Self { left_to_device, ..Self::new(scale, self.checked, found_inf, findings) })
    }

    /// The flag on a GPU that decides whether the step is taken; `None` where the host knows.
    pub(crate) fn flag(&self) -> Option<&Tensor> {
        match &self.found_inf {
            FoundInf::Host(_) => None,
            FoundInf::Device(flag) => Some(flag.tensor()),
        }
    }

    pub(crate) fn found_inf(&self) -> &FoundInf {
        &self.found_inf
    }

    /// Waits for the thread that stepped, where it is another: the read itself waits for this one's launches.
    fn launched(&self) -> Result<()> {
        match &self.stepped {
            Some((by, device)) if *by != thread::current().id() => match Gpu::of(device) {
                Some(gpu) => Ok(gpu.wait_for_all_threads()?),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// True when a gradient was infinite or NaN, and neither the variables nor the optimizer were
    /// touched.
    ///
    /// # Synchronisation
    ///
    /// Waits for the device where the flag is still on its way; once, and
    /// [`is_known`](Self::is_known) tells. On another thread than the one that stepped, for all that any
    /// thread has launched.
    ///
    /// # Errors
    ///
    /// What reading it from the device meets.
    pub fn skipped(&self) -> Result<bool> {
        match &self.found_inf {
            FoundInf::Host(found) => Ok(*found),
            FoundInf::Device(flag) => once(&self.read.skipped, || {
                self.launched()?;
                Ok(flag.is_set()?)
            }),
        }
    }

    /// Whether [`skipped`](Self::skipped) answers without waiting: always on a CPU, on a GPU from
    /// the second call on.
    pub fn is_known(&self) -> bool {
        matches!(self.found_inf, FoundInf::Host(_)) || self.read.skipped.get().is_some()
    }

    /// The scale the gradients were made with; 1 for a disabled scaler.
    ///
    /// # Synchronisation
    ///
    /// One read on a GPU, the first time; NaN should that fail.
    pub fn scale(&self) -> f32 {
        match self.scale {
            Number::Host(scale) => scale,
            Number::Device(_) => {
                let read = || self.launched().and_then(|()| Ok(self.scale.read()?));
                once(&self.read.scale, read).unwrap_or(f32::NAN)
            }
        }
    }

    /// The gradients that were not finite.
    fn non_finite(&self) -> Result<Vec<(TensorId, NonFinite)>> {
        // Mostly there are none, and one flag says so.
        if !self.skipped()? {
            return Ok(Vec::new());
        }
        once(&self.read.non_finite, || {
            self.launched()?;
            Finding::count(&self.findings)
        })
    }

    /// The names of the variables whose gradient was infinite or NaN, sorted; empty when the step
    /// was taken.
    ///
    /// # Errors
    ///
    /// As [`skipped`](Self::skipped).
    pub fn overflowed<'p>(&self, parameters: &'p Parameters) -> Result<Vec<&'p str>> {
        let overflowed = self.non_finite()?;
        let overflowed = |id: TensorId| overflowed.iter().any(|(other, _)| *other == id);
        let named = parameters.iter().filter(|(_, var)| overflowed(var.id()));
        Ok(named.map(|(name, _)| name).collect())
    }

    /// Which gradients were infinite or NaN, in how many elements, and at which scale: a table by
    /// name, to print. A variable with several names is listed by the first.
    ///
    /// The elements were counted when the gradient was unscaled, before any clipping, which turns
    /// an infinity to NaN. On a CPU counting is one more pass over a gradient that overflowed, and
    /// none over the others; on CUDA it is done in passing.
    ///
    /// # Errors
    ///
    /// As [`skipped`](Self::skipped).
    pub fn report(&self, parameters: &Parameters) -> Result<OverflowReport> {
        let named = |(id, found)| (parameters.name_of_id(id).map(str::to_owned), found);
        let mut rows: Vec<_> = self.non_finite()?.into_iter().map(named).collect();
        rows.sort_by(|(a, _), (b, _)| (a.is_none(), a).cmp(&(b.is_none(), b)));
        Ok(OverflowReport { scale: self.scale(), rows, checked: self.checked })
    }
}
