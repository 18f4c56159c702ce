//! DenseNet: a layer adds a few channels to those it was given, so that every later layer of its stage sees
//! them as they are. Layers can be narrow then, and few weights do much, at the price of memory. Huang et
//! al. 2016, <https://arxiv.org/abs/1608.06993>: DenseNet-BC, whose layers have a convolution of 1x1 before
//! that of 3x3, and whose transitions halve the width.

use candle_amp::nn::{SequentialT, seq_t};
use candle_core::Result;

use super::net::{Net, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1608.06993";

/// Of so many layers a stage, each of which adds `growth` channels.
pub(super) fn densenet(net: &Net, layers: &[usize; 4], growth: usize) -> Result<SequentialT> {
    let mut width = 2 * growth;
    let mut all = seq_t().add(net.pp("stem").conv(3, width, kernel(3))?);
    for (stage, &count) in layers.iter().enumerate() {
        let net = net.pp(format!("stage{}", stage + 1));
        if stage > 0 {
            all = all.add(norm_conv(&net.pp("transition"), width, width / 2, 1)?);
            all = all.add(net.avg_pool(2, 2));
            width /= 2;
        }
        for i in 0..count {
            let inner = 4 * growth;
            let new = seq_t().add(norm_conv(&net.pp(i).pp("1"), width, inner, 1)?).add(norm_conv(
                &net.pp(i).pp("2"),
                inner,
                growth,
                3,
            )?);
            all = all.add(net.branches(vec![new, seq_t()]));
            width += growth;
        }
    }
    Ok(all.add(net.pp("last.norm").norm_relu(width)?).add(net.head(width)?))
}

/// Norm, relu, convolution: in the order of a pre-activation ResNet.
fn norm_conv(net: &Net, from: usize, to: usize, size: usize) -> Result<SequentialT> {
    let conv = net.pp("conv").conv(from, to, kernel(size))?;
    Ok(seq_t().add(net.pp("norm").norm_relu(from)?).add(conv))
}
