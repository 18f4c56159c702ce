//! Dual path networks: of a block's output, some channels are added to the input's as in a ResNet, and the rest
//! are put beside them as in a DenseNet. The first path uses features again, the second finds new ones. Chen
//! et al. 2017, <https://arxiv.org/abs/1707.01629>, with the grouped convolutions of a ResNeXt.

use candle_amp::nn::{ModuleT, SequentialT, seq_t};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::net::{ConvNorm, Net, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1707.01629";

/// Width inside a block, channels that are added, channels that each block puts beside them.
const STAGES: [(usize, usize, usize); 4] =
    [(96, 256, 16), (192, 512, 32), (384, 1024, 24), (768, 2048, 128)];

/// Of so many blocks a stage.
pub(super) fn dpn(net: &Net, blocks: &[usize; 4]) -> Result<SequentialT> {
    let mut from = 64;
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, from, kernel(3))?);
    for (stage, (&(inner, added, grown), &count)) in STAGES.iter().zip(blocks).enumerate() {
        for i in 0..count {
            let stride = if stage > 0 && i == 0 { 2 } else { 1 };
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            let to = added + grown;
            let grouped = kernel(3).stride(stride).groups(32);
            let path = seq_t()
                .add(net.pp(1).conv_norm_relu(from, inner, kernel(1))?)
                .add(net.pp(2).conv_norm_relu(inner, inner, grouped)?)
                .add(net.pp(3).conv_norm(inner, to, kernel(1))?);
            let project = || net.pp("projection").conv_norm(from, to, kernel(1).stride(stride));
            let projection = (i == 0).then(project).transpose()?;
            layers = layers.add(DualPath { path, projection, added, channels: net.channels() });
            from = added + (i + 2) * grown;
        }
    }
    Ok(layers.add(net.head(from)?))
}

#[derive(Debug)]
struct DualPath {
    path: SequentialT,
    /// Of a stage's first block.
    projection: Option<ConvNorm>,
    added: usize,
    channels: usize,
}

impl ModuleT for DualPath {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let around = match &self.projection {
            Some(projection) => projection.forward_t(x, train)?,
            None => x.clone(),
        };
        let y = self.path.forward_t(x, train)?;
        let split = |x: &Tensor| {
            let rest = x.dims()[self.channels] - self.added;
            let added = x.narrow(self.channels, 0, self.added)?;
            Ok::<_, candle_core::Error>((added, x.narrow(self.channels, self.added, rest)?))
        };
        let ((a, old), (b, new)) = (split(&around)?, split(&y)?);
        ops::relu(&ops::cat(&[&ops::add(&a, &b)?, &old, &new], self.channels)?)
    }
}
