//! What is measured. PyTorch's side gets the same descriptions, as JSON, so that shapes cannot
//! differ between the two.

use std::fmt;

use anyhow::Result;
use candle_amp::{Autocast, GradScaler};
use candle_core::DType;
use serde::{Deserialize, Serialize};

use crate::{backward, candle, layers, networks, products, scopes, updates};

/// Does the work once; the seconds it took, without what had to be set up for it.
pub(crate) type Runner = Box<dyn FnMut() -> Result<f64>>;

/// A workload in a precision.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Spec {
    #[serde(flatten)]
    pub(crate) work: Work,
    pub(crate) precision: Precision,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Precision {
    F32,
    /// Autocast over F32 variables.
    Bf16,
    /// BF16 variables with F32 masters.
    Bf16Masters,
    /// Autocast over F32 variables, and a dynamic loss scale.
    F16,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Work {
    /// A training step of a residual network for CIFAR-10.
    Resnet { width: usize, depth: usize, batch: usize },
    /// The same on candle's own operators.
    CandleResnet { width: usize, depth: usize, batch: usize },
    /// Forward and backward of linear layers with ReLU.
    Mlp { layers: usize, width: usize, batch: usize },
    /// Forward and backward of a transformer block.
    GptBlock { width: usize, heads: usize, context: usize, batch: usize },
    /// `(m, k) × (k, n)`, or its weight gradient, `(m, k)ᵀ × (m, n)`.
    Gemm { m: usize, k: usize, n: usize, weight_gradient: bool },
    /// Forward and backward of one convolution, `kernel / 2` padded.
    Conv { batch: usize, from: usize, to: usize, size: usize, kernel: usize, stride: usize },
    /// Forward and backward of batch norm and ReLU.
    BatchNormRelu { batch: usize, channels: usize, size: usize },
    /// One read and one write of all gradients, by a plain loop.
    Pass { tensors: usize, length: usize },
    /// Unscaling all gradients, and looking for infinities.
    Unscale { tensors: usize, length: usize },
    /// Clipping all gradients by their norm.
    Clip { tensors: usize, length: usize },
    /// A step of SGD with momentum and weight decay.
    Sgd { tensors: usize, length: usize },
    /// A step of AdamW.
    Adamw { tensors: usize, length: usize },
    /// Backward of a chain of products by constants.
    ChainBackward { links: usize, length: usize },
    /// The kernels in that, each called by itself.
    ChainKernels { links: usize, length: usize },
    /// Backward of linear layers, without bias, with ReLU.
    MlpBackward { layers: usize, width: usize, batch: usize },
    /// The kernels in that, each called by itself.
    MlpKernels { layers: usize, width: usize, batch: usize },
    /// An operator on one element, outside of any scope.
    TinyOperator,
    /// What a scope that casts nothing adds to that operator.
    InScope { enabled: bool },
    /// Entering a scope and leaving it.
    EnterScope,
}

impl Precision {
    /// The dtype of activations.
    pub(crate) fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 | Self::Bf16Masters => DType::BF16,
            Self::F16 => DType::F16,
        }
    }

    /// The dtype of the variables.
    pub(crate) fn storage(self) -> DType {
        if self == Self::Bf16Masters { DType::BF16 } else { DType::F32 }
    }

    pub(crate) fn autocast(self) -> Autocast {
        match self {
            Self::F32 => Autocast::disabled(),
            half => Autocast::new(half.dtype()),
        }
    }

    pub(crate) fn scaler(self) -> GradScaler {
        if self == Self::F16 { GradScaler::default() } else { GradScaler::disabled() }
    }
}

impl Work {
    pub(crate) const fn at(self, precision: Precision) -> Spec {
        Spec { work: self, precision }
    }
}

impl Spec {
    pub(crate) fn runner(self) -> Result<Runner> {
        match self.work {
            Work::Resnet { width, depth, batch } => {
                networks::resnet(width, depth, batch, self.precision)
            }
            Work::CandleResnet { width, depth, batch } => candle::resnet(width, depth, batch),
            Work::Mlp { layers, width, batch } => {
                networks::mlp(layers, width, batch, self.precision)
            }
            Work::GptBlock { width, heads, context, batch } => {
                networks::gpt_block(width, heads, [batch, context], self.precision)
            }
            Work::Gemm { m, k, n, weight_gradient } => {
                products::gemm([m, k, n], weight_gradient, self.precision.dtype())
            }
            Work::Conv { batch, from, to, size, kernel, stride } => {
                layers::conv([batch, from, size, size], to, kernel, stride, self.precision)
            }
            Work::BatchNormRelu { batch, channels, size } => {
                layers::batch_norm_relu([batch, channels, size, size], self.precision)
            }
            Work::Pass { tensors, length } => updates::pass(tensors * length),
            Work::Unscale { tensors, length } => updates::unscale(tensors, length),
            Work::Clip { tensors, length } => updates::clip(tensors, length),
            Work::Sgd { tensors, length } => updates::sgd(tensors, length),
            Work::Adamw { tensors, length } => updates::adamw(tensors, length),
            Work::ChainBackward { links, length } => backward::chain(links, length),
            Work::ChainKernels { links, length } => backward::chain_kernels(links, length),
            Work::MlpBackward { layers, width, batch } => backward::mlp(layers, width, batch),
            Work::MlpKernels { layers, width, batch } => {
                backward::mlp_kernels(layers, width, batch)
            }
            Work::TinyOperator => scopes::operator(),
            Work::InScope { enabled } => scopes::in_scope(enabled),
            Work::EnterScope => scopes::enter(),
        }
    }

    /// Whether once is all there is time for.
    pub(crate) fn is_slow(self) -> bool {
        matches!(self.work, Work::CandleResnet { .. })
    }

    /// Bytes read and written, where memory is what the time goes to.
    pub(crate) fn bytes(self) -> Option<usize> {
        match self.work {
            Work::Pass { tensors, length } | Work::Unscale { tensors, length } => {
                Some(2 * size_of::<f32>() * tensors * length)
            }
            _ => None,
        }
    }

    /// The same in small, for a machine that has no time.
    pub(crate) fn shrink(&mut self) {
        match &mut self.work {
            Work::Resnet { width, depth, batch } | Work::CandleResnet { width, depth, batch } => {
                (*width, *depth, *batch) = (8, 1, 2);
            }
            Work::Mlp { width, batch, .. }
            | Work::MlpBackward { width, batch, .. }
            | Work::MlpKernels { width, batch, .. } => (*width, *batch) = (32, 4),
            Work::GptBlock { width, context, batch, .. } => {
                (*width, *context, *batch) = (32, 16, 2);
            }
            Work::Gemm { m, k, n, .. } => [m, k, n].into_iter().for_each(|side| *side /= 16),
            Work::Conv { batch, .. } | Work::BatchNormRelu { batch, .. } => *batch = 2,
            Work::Pass { length, .. }
            | Work::Unscale { length, .. }
            | Work::Clip { length, .. }
            | Work::Sgd { length, .. }
            | Work::Adamw { length, .. }
            | Work::ChainBackward { length, .. }
            | Work::ChainKernels { length, .. } => *length = 1024,
            Work::TinyOperator | Work::InScope { .. } | Work::EnterScope => {}
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Bf16Masters => "bf16 masters",
            Self::F16 => "f16",
        })
    }
}
