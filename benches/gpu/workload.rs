//! What is measured. PyTorch's side gets the same descriptions, as JSON.

use anyhow::Result;
use candle_amp_benches::measure::{Runner, Workload};
use candle_amp_benches::networks::{GptSize, ResNetSize};
use candle_amp_benches::precision::Precision;
use candle_core::Device;
use serde::Serialize;

use crate::operators::{Operator, Pass};
use crate::parameters::Parameters;
use crate::passes::{Passes, Storage};
use crate::steps::TrainingStep;
use crate::{device, passes, steps};

/// A workload in a precision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spec {
    #[serde(flatten)]
    pub(crate) work: Work,
    pub(crate) precision: Precision,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Work {
    /// A copy from memory to memory.
    Copy { bytes: usize },
    /// Unscaling all gradients, and looking for infinities. PyTorch multiplies them there and then, the
    /// crate in the step.
    Unscale { parameters: Parameters },
    /// Clipping all gradients by their norm; the same goes for it.
    Clip { parameters: Parameters },
    /// What follows backward under a scaler: unscaling, perhaps clipping, and a step of AdamW.
    Update { parameters: Parameters, clip: bool },
    /// A step of SGD with momentum and weight decay.
    Sgd { parameters: Parameters },
    /// A step of AdamW.
    Adamw { parameters: Parameters, storage: Storage },
    /// A step of Lion. PyTorch has none.
    Lion { parameters: Parameters },
    /// A step of LAMB. PyTorch has none.
    Lamb { parameters: Parameters },
    /// An update of averaged weights.
    Ema { parameters: Parameters },
    /// Half variables from their F32 masters, of `MasterWeights`.
    RefreshWeights { parameters: Parameters },
    /// The same of `MasterVars`.
    RefreshVars { parameters: Parameters },
    /// An operator by itself.
    Operator { operator: Operator, pass: Pass },
    /// A training step of GPT-2.
    Gpt { size: GptSize, batch: usize },
    /// A training step of a residual network on images of 32x32.
    Resnet { size: ResNetSize, batch: usize, channels_last: bool },
    /// A training step of GPT-2 as one CUDA graph. PyTorch's is by `torch.compile`, with CUDA graphs.
    GraphedGpt { size: GptSize, batch: usize },
    /// A training step of a residual network as one CUDA graph, channels last; PyTorch's the same.
    GraphedResnet { size: ResNetSize, batch: usize },
    /// A training step of a residual network on candle's own operators.
    CandleResnet { size: ResNetSize, batch: usize },
}

impl Work {
    pub(crate) const fn at(self, precision: Precision) -> Spec {
        Spec { work: self, precision }
    }

    /// Whether it is a pass over all parameters.
    pub(crate) fn is_pass(self) -> bool {
        !matches!(self, Self::Copy { .. }) && self.bytes().is_some()
    }

    /// Whether PyTorch has the same: it has no Lion, no LAMB, and no AdamW of BF16 variables with masters.
    pub(crate) fn has_torch(self) -> bool {
        match self {
            Self::Lion { .. } | Self::Lamb { .. } => false,
            Self::Adamw { storage, .. } => storage == Storage::F32,
            _ => true,
        }
    }

    /// Bytes that must be read and written, however it is done.
    fn bytes(self) -> Option<usize> {
        let of = |parameters: Parameters, each: usize| Some(parameters.count() * each);
        match self {
            Self::Copy { bytes } => Some(2 * bytes),
            Self::Unscale { parameters } | Self::Clip { parameters } => of(parameters, 4),
            Self::Update { parameters, .. } => of(parameters, 4 + 4 + 16 + 8),
            Self::Sgd { parameters } => of(parameters, 4 + 8 + 8),
            Self::Adamw { parameters, storage } => {
                // The gradient and two moments; the variable, or what stands for it.
                let variable = match storage {
                    Storage::F32 => 8,
                    Storage::Bf16Masters => 8 + 2,
                    Storage::Bf16Remainder => 4 + 4,
                };
                of(parameters, 4 + 16 + variable)
            }
            Self::Lion { parameters } => of(parameters, 4 + 8 + 8),
            // The moments, with both norms; then the update.
            Self::Lamb { parameters } => of(parameters, 4 + 4 + 16 + 8 + 8),
            Self::Ema { parameters } => of(parameters, 4 + 8),
            Self::RefreshWeights { parameters } | Self::RefreshVars { parameters } => {
                of(parameters, 4 + 2)
            }
            Self::Operator { .. }
            | Self::Gpt { .. }
            | Self::GraphedGpt { .. }
            | Self::Resnet { .. }
            | Self::GraphedResnet { .. }
            | Self::CandleResnet { .. } => None,
        }
    }
}

impl Spec {
    /// A training step, or a pass of an operator, if it is one.
    pub(crate) fn step(&self, device: &Device) -> Result<Option<TrainingStep>> {
        Ok(Some(match self.work {
            Work::Gpt { size, batch } => steps::gpt(size, batch, self.precision, device)?,
            Work::Resnet { size, batch, channels_last } => {
                steps::resnet(size, batch, channels_last, self.precision, device)?
            }
            Work::GraphedGpt { size, batch } => {
                steps::graphed_gpt(size, batch, self.precision, device)?
            }
            Work::GraphedResnet { size, batch } => {
                steps::graphed_resnet(size, batch, self.precision, device)?
            }
            Work::CandleResnet { size, batch } => steps::candle_resnet(size, batch, device)?,
            Work::Operator { operator, pass } => operator.step(pass, self.precision, device)?,
            _ => return Ok(None),
        }))
    }

    /// Passes over all parameters, if it is one.
    pub(crate) fn passes(&self, device: &Device) -> Result<Option<Passes>> {
        Ok(Some(match self.work {
            Work::Unscale { parameters } => passes::unscale(parameters, device)?,
            Work::Clip { parameters } => passes::clip(parameters, device)?,
            Work::Update { parameters, clip } => passes::update(parameters, clip, device)?,
            Work::Sgd { parameters } => passes::sgd(parameters, device)?,
            Work::Adamw { parameters, storage } => passes::adamw(parameters, storage, device)?,
            Work::Lion { parameters } => passes::lion(parameters, device)?,
            Work::Lamb { parameters } => passes::lamb(parameters, device)?,
            Work::Ema { parameters } => passes::ema(parameters, device)?,
            Work::RefreshWeights { parameters } => passes::refresh_weights(parameters, device)?,
            Work::RefreshVars { parameters } => passes::refresh_vars(parameters, device)?,
            _ => return Ok(None),
        }))
    }

    /// Whether it is a step as one CUDA graph.
    pub(crate) fn is_graphed(&self) -> bool {
        matches!(self.work, Work::GraphedGpt { .. } | Work::GraphedResnet { .. })
    }

    /// Whether there is more to say of it than its times: of steps, of convolutions, whose algorithms differ by precision, and
    /// of other operators in one precision.
    pub(crate) fn has_details(&self) -> bool {
        match self.work {
            Work::Operator { operator: Operator::Conv { .. }, .. } => true,
            Work::Operator { .. } => self.precision == Precision::Bf16,
            _ => true,
        }
    }

    /// The one that PyTorch's side uses for it: this side's.
    pub(crate) fn layout(&self) -> &'static str {
        match self.work {
            Work::Resnet { channels_last: true, .. } | Work::GraphedResnet { .. } => {
                "channels-last"
            }
            _ => "contiguous",
        }
    }
}

impl Workload for Spec {
    fn runner(&self, device: &Device) -> Result<Runner> {
        if let Some(step) = self.step(device)? {
            return Ok(steps::timed(step, device));
        }
        if let Some(mut passes) = self.passes(device)? {
            return Ok(Box::new(move || Ok(passes()?.all)));
        }
        match self.work {
            Work::Copy { bytes } => device::copy(bytes, device),
            _ => unreachable!("the others are steps or passes"),
        }
    }

    fn amount(&self) -> Option<(f64, &'static str)> {
        match self.work {
            Work::Gpt { size, batch } | Work::GraphedGpt { size, batch } => {
                Some(((size.context * batch) as f64, "tokens/s"))
            }
            Work::Resnet { batch, .. }
            | Work::GraphedResnet { batch, .. }
            | Work::CandleResnet { batch, .. } => Some((batch as f64, "images/s")),
            Work::Operator { operator, pass } => operator.amount(pass, self.precision),
            pass => pass.bytes().map(|bytes| (bytes as f64 / 1e9, "GB/s")),
        }
    }

    fn is_slow(&self) -> bool {
        matches!(self.work, Work::CandleResnet { .. })
    }

    fn shrink(&mut self) {
        match &mut self.work {
            Work::Operator { operator, .. } => operator.shrink(),
            Work::Copy { bytes } => *bytes = 1 << 16,
            Work::Unscale { parameters }
            | Work::Clip { parameters }
            | Work::Update { parameters, .. }
            | Work::Sgd { parameters }
            | Work::Adamw { parameters, .. }
            | Work::Lion { parameters }
            | Work::Lamb { parameters }
            | Work::Ema { parameters }
            | Work::RefreshWeights { parameters }
            | Work::RefreshVars { parameters } => {
                *parameters = Parameters::Even { tensors: 3, length: 1025 };
            }
            Work::Gpt { size, batch } | Work::GraphedGpt { size, batch } => {
                *size = GptSize { layers: 2, width: 32, heads: 2, vocabulary: 65, context: 16 };
                *batch = 2;
            }
            Work::Resnet { size, batch, .. }
            | Work::GraphedResnet { size, batch }
            | Work::CandleResnet { size, batch } => {
                size.width = 8;
                size.stages = size.stages.map(|blocks| blocks.min(1));
                *batch = 2;
            }
        }
    }
}
