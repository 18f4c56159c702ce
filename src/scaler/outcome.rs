//! What became of a step.

use std::sync::OnceLock;
use std::thread::{self, ThreadId};

use candle_core::{Device, Tensor, TensorId};

use super::found_inf::FoundInf;
use super::live_scale::Snapshot;
use crate::kernels::cuda::Gpu;
use crate::kernels::multi_tensor::Flag;
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
    scale: Lazy<f32>,
    checked: usize,
    skipped: Lazy<bool>,
    overflowed: Lazy<Overflowed>,
    /// The thread that stepped on a GPU: each has a stream of its own there.
    stepped: Option<(ThreadId, Device)>,
}

type Overflowed = Vec<(TensorId, NonFinite)>;

/// What is known, or on a GPU until somebody asks; an outcome has copies of its own there.
#[derive(Clone, Debug)]
struct Lazy<T> {
    known: OnceLock<T>,
    unread: Unread,
}

/// Where what is not known yet can be read.
#[derive(Clone, Debug)]
enum Unread {
    Nothing,
    Scale(Snapshot),
    Flag(Tensor),
    Counts(Vec<Finding>),
}

impl<T: Clone> Lazy<T> {
    fn known(value: T) -> Self {
        Self { known: OnceLock::from(value), unread: Unread::Nothing }
    }

    fn unread(unread: Unread) -> Self {
        Self { known: OnceLock::new(), unread }
    }

    fn get(&self, read: impl FnOnce(&Unread) -> Result<T>) -> Result<T> {
        match self.known.get() {
            Some(value) => Ok(value.clone()),
            None => {
                let value = read(&self.unread)?;
                Ok(self.known.get_or_init(|| value).clone())
            }
        }
    }
}

impl StepOutcome {
    /// Of the step that `found_inf` decides, which is of `findings`.
    pub(crate) fn new(
        scale: Snapshot,
        checked: usize,
        found_inf: &FoundInf,
        findings: Vec<Finding>,
    ) -> Self {
        let scale = match scale {
            Snapshot::Host(scale) => Lazy::known(scale),
            on_device => Lazy::unread(Unread::Scale(on_device)),
        };
        let stepped = match found_inf {
            FoundInf::Host(_) => None,
            FoundInf::Device(flag) => Some((thread::current().id(), flag.device().clone())),
        };
        let (skipped, overflowed) = match found_inf {
            FoundInf::Host(skipped) => {
                let known = findings.iter().filter_map(Finding::known).collect();
                (Lazy::known(*skipped), Lazy::known(known))
            }
            FoundInf::Device(flag) => {
                let counts = Lazy::unread(Unread::Counts(findings));
                (Lazy::unread(Unread::Flag(flag.clone())), counts)
            }
        };
        Self { scale, checked, skipped, overflowed, stepped }
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
        self.skipped.get(|unread| match unread {
            Unread::Flag(flag) => {
                self.launched()?;
                Ok(Gpu::to_host::<u32>(flag)?.iter().any(|&flag| flag != 0))
            }
            _ => Ok(false),
        })
    }

    /// Whether [`skipped`](Self::skipped) answers without waiting: always on a CPU, on a GPU from
    /// the second call on.
    pub fn is_known(&self) -> bool {
        self.skipped.known.get().is_some()
    }

    /// The scale the gradients were made with; 1 for a disabled scaler.
    ///
    /// # Synchronisation
    ///
    /// One read on a GPU, the first time; NaN should that fail.
    pub fn scale(&self) -> f32 {
        let read = |unread: &Unread| match unread {
            Unread::Scale(scale) => self.launched().and_then(|()| scale.read()),
            _ => Ok(1.0),
        };
        self.scale.get(read).unwrap_or(f32::NAN)
    }

    /// The gradients that were not finite.
    fn non_finite(&self) -> Result<Overflowed> {
        // Mostly there are none, and one flag says so.
        if !self.skipped()? {
            return Ok(Vec::new());
        }
        self.overflowed.get(|unread| {
            let Unread::Counts(findings) = unread else { return Ok(Vec::new()) };
            self.launched()?;
            let flags: Vec<&Flag> = findings.iter().flat_map(Finding::flags).collect();
            let mut counts = Flag::read(&flags)?.into_iter();
            let mut found = Vec::new();
            for finding in findings {
                let own = counts.by_ref().take(finding.flags().len());
                let [infinite, nan] = own.fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
                if infinite + nan > 0 {
                    let elements = finding.elements;
                    found.push((finding.variable, NonFinite { infinite, nan, elements }));
                }
            }
            Ok(found)
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
