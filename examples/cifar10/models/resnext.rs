//! ResNeXt: the convolution of 3x3 in a bottleneck is cut into groups that do not see each other. For the same
//! arithmetic it is then much wider, and more groups (the cardinality) help more than more width or depth.
//! Xie et al. 2016, <https://arxiv.org/abs/1611.05431>: 29 layers in three stages, as `29, 2x64d` for
//! 2 groups of 64 channels.

use candle_amp::nn::{SequentialT, seq_t};
use candle_core::Result;

use super::net::{Net, Residual, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1611.05431";

/// `groups` groups of `width` channels in the first stage, and of twice as many in each later one.
pub(super) fn resnext29(net: &Net, groups: usize, width: usize) -> Result<SequentialT> {
    let mut from = 64;
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, from, kernel(1))?);
    for stage in 0..3 {
        let inner = (groups * width) << stage;
        for i in 0..3 {
            let stride = if stage > 0 && i == 0 { 2 } else { 1 };
            let grouped = kernel(3).stride(stride).groups(groups);
            let convs = [(inner, kernel(1)), (inner, grouped), (2 * inner, kernel(1))];
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            layers = layers.add(Residual::new(&net, from, &convs)?);
            from = 2 * inner;
        }
    }
    Ok(layers.add(net.head(from)?))
}
