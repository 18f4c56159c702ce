//! MobileNets: a convolution of 3x3 on each channel alone (depthwise), then one of 1x1 that mixes channels, for
//! an eighth of the arithmetic of one that does both. Version 2 mixes first, into six times the width, and
//! adds its input to a narrow output that no relu follows, as that would lose too much of it.
//! Howard et al. 2017, <https://arxiv.org/abs/1704.04861>; Sandler et al. 2018,
//! <https://arxiv.org/abs/1801.04381>.
//!
//! Strides are those for small images. Version 2 has a projection where the width changes without a
//! stride, and relu instead of relu6.

use candle_amp::nn::{ModuleT, SequentialT, seq_t};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::net::{ConvNorm, Net, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1704.04861";
pub(super) const PAPER_V2: &str = "https://arxiv.org/abs/1801.04381";

/// The width and stride of each block.
const V1: [(usize, usize); 13] = [
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (512, 1),
    (1024, 2),
    (1024, 1),
];

/// How many times wider inside, the width, the number of blocks, the stride of the first.
const V2: [(usize, usize, usize, usize); 7] = [
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
];

pub(super) fn mobilenet(net: &Net) -> Result<SequentialT> {
    let mut from = 32;
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, from, kernel(3))?);
    for (i, &(width, stride)) in V1.iter().enumerate() {
        let (net, depthwise) = (net.pp(i), kernel(3).stride(stride).groups(from));
        layers = layers
            .add(net.pp("depthwise").conv_norm_relu(from, from, depthwise)?)
            .add(net.pp("pointwise").conv_norm_relu(from, width, kernel(1))?);
        from = width;
    }
    Ok(layers.add(net.head(from)?))
}

pub(super) fn mobilenet_v2(net: &Net) -> Result<SequentialT> {
    let mut from = 32;
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, from, kernel(3))?);
    for (stage, &(times, width, count, stride)) in V2.iter().enumerate() {
        for i in 0..count {
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            let (inner, stride) = (times * from, if i == 0 { stride } else { 1 });
            let path = seq_t()
                .add(net.pp("expand").conv_norm_relu(from, inner, kernel(1))?)
                .add(net.pp("depthwise").conv_norm_relu(
                    inner,
                    inner,
                    kernel(3).stride(stride).groups(inner),
                )?)
                .add(net.pp("project").conv_norm(inner, width, kernel(1))?);
            let project = || net.pp("projection").conv_norm(from, width, kernel(1));
            let projection = (stride == 1 && from != width).then(project).transpose()?;
            layers = match stride {
                1 => layers.add(InvertedResidual { path, projection }),
                _ => layers.add(path),
            };
            from = width;
        }
    }
    let last = net.pp("last").conv_norm_relu(from, 1280, kernel(1))?;
    Ok(layers.add(last).add(net.head(1280)?))
}

#[derive(Debug)]
struct InvertedResidual {
    path: SequentialT,
    projection: Option<ConvNorm>,
}

impl ModuleT for InvertedResidual {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.path.forward_t(x, train)?;
        match &self.projection {
            Some(projection) => ops::add(&y, &projection.forward_t(x, train)?),
            None => ops::add(&y, x),
        }
    }
}
