//! What is measured. PyTorch's side gets the same descriptions, as JSON, so that shapes cannot
//! differ between the two.

use anyhow::Result;
use candle_amp_benches::measure::{Runner, Workload};
use candle_amp_benches::networks::ResNetSize;
use candle_amp_benches::precision::Precision;
use candle_amp_benches::zoo::Network;
use candle_core::Device;
use serde::{Deserialize, Serialize};

use crate::operators::{self, Operator};
use crate::{backward, layers, networks, products, scopes, updates, zoo};

/// A workload in a precision.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Spec {
    #[serde(flatten)]
    pub(crate) work: Work,
    pub(crate) precision: Precision,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Work {
    /// A training step of a residual network for CIFAR-10. PyTorch's is in the better of its layouts.
    Resnet { size: ResNetSize, batch: usize, channels_last: bool },
    /// The same on candle's own operators.
    CandleResnet { size: ResNetSize, batch: usize },
    /// Forward and backward of linear layers with ReLU.
    Mlp { layers: usize, width: usize, batch: usize },
    /// Forward and backward of a transformer block.
    GptBlock { width: usize, heads: usize, context: usize, batch: usize },
    /// A training step of a network that nobody tuned the crate for.
    ZooNetwork { network: Network },
    /// Forward and backward of an operator of such networks.
    ZooOperator { operator: Operator, batch: usize },
    /// `(m, k) × (k, n)`, or its weight gradient, `(m, k)ᵀ × (m, n)`.
    Gemm { m: usize, k: usize, n: usize, weight_gradient: bool },
    /// Forward and backward of one convolution, `kernel / 2` padded.
    Conv { batch: usize, from: usize, to: usize, size: usize, kernel: usize, stride: usize },
    /// Forward and backward of batch norm and ReLU.
    BatchNormRelu { batch: usize, channels: usize, size: usize },
    /// One read and one write of all gradients, by a plain loop.
    Pass { tensors: usize, length: usize },
    /// Unscaling all gradients, and looking for infinities. PyTorch multiplies them there and then, the
    /// crate in the step.
    Unscale { tensors: usize, length: usize },
    /// Clipping all gradients by their norm; the same goes for it.
    Clip { tensors: usize, length: usize },
    /// What follows backward under a scaler: unscaling, perhaps clipping, and a step of AdamW.
    Update { tensors: usize, length: usize, clip: bool },
    /// A step of SGD with momentum and weight decay.
    Sgd { tensors: usize, length: usize },
    /// A step of AdamW.
    Adamw { tensors: usize, length: usize },
    /// The memory that an optimizer of one state or two goes through, by a plain loop.
    SameBytes { tensors: usize, length: usize, states: usize },
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

impl Work {
    pub(crate) const fn at(self, precision: Precision) -> Spec {
        Spec { work: self, precision }
    }
}

impl Workload for Spec {
    /// All of this runs on the CPU.
    fn runner(&self, _: &Device) -> Result<Runner> {
        match self.work {
            Work::Resnet { size, batch, channels_last } => {
                networks::resnet(size, batch, channels_last, self.precision)
            }
            Work::CandleResnet { size, batch } => networks::candle_resnet(size, batch),
            Work::Mlp { layers, width, batch } => {
                networks::mlp(layers, width, batch, self.precision)
            }
            Work::GptBlock { width, heads, context, batch } => {
                networks::gpt_block(width, heads, [batch, context], self.precision)
            }
            Work::ZooNetwork { network } => zoo::network(network, self.precision),
            Work::ZooOperator { operator, batch } => {
                operators::runner(operator, batch, self.precision)
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
            Work::Update { tensors, length, clip } => updates::update(tensors, length, clip),
            Work::Sgd { tensors, length } => updates::sgd(tensors, length),
            Work::Adamw { tensors, length } => updates::adamw(tensors, length),
            Work::SameBytes { tensors, length, states } => {
                updates::same_bytes(tensors * length, states)
            }
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

    fn is_slow(&self) -> bool {
        matches!(self.work, Work::CandleResnet { .. })
    }

    /// Bytes read and written, where memory is what the time goes to.
    fn amount(&self) -> Option<(f64, &'static str)> {
        match self.work {
            Work::Pass { tensors, length } => {
                Some(((2 * size_of::<f32>() * tensors * length) as f64 / 1e9, "GB/s"))
            }
            _ => None,
        }
    }

    fn shrink(&mut self) {
        match &mut self.work {
            Work::Resnet { size, batch, .. } | Work::CandleResnet { size, batch } => {
                (*size, *batch) = (ResNetSize::cifar(8, 1), 2);
            }
            Work::Mlp { width, batch, .. }
            | Work::MlpBackward { width, batch, .. }
            | Work::MlpKernels { width, batch, .. } => (*width, *batch) = (32, 4),
            Work::GptBlock { width, context, batch, .. } => {
                (*width, *context, *batch) = (32, 16, 2);
            }
            Work::ZooNetwork { network } => network.shrink(),
            Work::Gemm { m, k, n, .. } => [m, k, n].into_iter().for_each(|side| *side /= 16),
            Work::Conv { batch, .. }
            | Work::BatchNormRelu { batch, .. }
            | Work::ZooOperator { batch, .. } => *batch = 2,
            Work::Pass { length, .. }
            | Work::Unscale { length, .. }
            | Work::Clip { length, .. }
            | Work::Update { length, .. }
            | Work::Sgd { length, .. }
            | Work::Adamw { length, .. }
            | Work::SameBytes { length, .. }
            | Work::ChainBackward { length, .. }
            | Work::ChainKernels { length, .. } => *length = 1024,
            Work::TinyOperator | Work::InScope { .. } | Work::EnterScope => {}
        }
    }
}
