//! ShuffleNets: convolutions of 1x1 in groups cost less, and a shuffle of channels between two of them lets the
//! groups see each other. Version 2 has no groups there: a block leaves half of the channels as they are, works
//! on the others, and shuffles both, which moves fewer numbers through memory. Zhang et al. 2017,
//! <https://arxiv.org/abs/1707.01083>; Ma et al. 2018, <https://arxiv.org/abs/1807.11164>.

use candle_amp::nn::{AvgPool2d, Module, ModuleT, SequentialT, seq_t};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::net::{Net, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1707.01083";
pub(super) const PAPER_V2: &str = "https://arxiv.org/abs/1807.11164";

/// Of these widths a stage, in so many groups.
pub(super) fn shufflenet(net: &Net, widths: &[usize; 3], groups: usize) -> Result<SequentialT> {
    let mut from = 24;
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, from, kernel(1))?);
    for (stage, (&width, count)) in widths.iter().zip([4, 8, 4]).enumerate() {
        for i in 0..count {
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            let (stride, to) = if i == 0 { (2, width - from) } else { (1, width) };
            // The stem is too narrow for groups.
            let first = if from == 24 { 1 } else { groups };
            let (inner, depthwise) = (to / 4, kernel(3).stride(stride).groups(to / 4));
            let path = seq_t()
                .add(net.pp(1).conv_norm_relu(from, inner, kernel(1).groups(first))?)
                .add_fn(net.shuffle(first))
                .add(net.pp(2).conv_norm_relu(inner, inner, depthwise)?)
                .add(net.pp(3).conv_norm(inner, to, kernel(1).groups(groups))?);
            let pool = (i == 0).then(|| net.avg_pool(3, 2));
            layers = layers.add(Unit { path, pool, channels: net.channels() });
            from = width;
        }
    }
    Ok(layers.add(net.head(from)?))
}

/// Adds its input or, where it halves the image, puts the input's means beside.
#[derive(Debug)]
struct Unit {
    path: SequentialT,
    pool: Option<AvgPool2d>,
    channels: usize,
}

impl ModuleT for Unit {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.path.forward_t(x, train)?;
        match &self.pool {
            Some(pool) => ops::relu(&ops::cat(&[&y, &pool.forward(x)?], self.channels)?),
            None => ops::add_relu(&y, x),
        }
    }
}

/// Of these widths a stage, and of the last convolution.
pub(super) fn shufflenet_v2(net: &Net, widths: &[usize; 4]) -> Result<SequentialT> {
    let mut from = 24;
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, from, kernel(3))?);
    for (stage, (&width, count)) in widths.iter().zip([4, 8, 4]).enumerate() {
        for i in 0..count {
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            let half = width / 2;
            let (width_in, stride) = if i == 0 { (from, 2) } else { (half, 1) };
            let depthwise = |width| kernel(3).stride(stride).groups(width);
            let path = seq_t()
                .add(net.pp(1).conv_norm_relu(width_in, half, kernel(1))?)
                .add(net.pp(2).conv_norm(half, half, depthwise(half))?)
                .add(net.pp(3).conv_norm_relu(half, half, kernel(1))?);
            layers = match i {
                0 => {
                    let other = net.pp("other");
                    let other = seq_t()
                        .add(other.pp(1).conv_norm(from, from, depthwise(from))?)
                        .add(other.pp(2).conv_norm_relu(from, half, kernel(1))?);
                    layers.add(net.branches(vec![other, path]))
                }
                _ => layers.add(HalfPath { path, channels: net.channels() }),
            };
            layers = layers.add_fn(net.shuffle(2));
        }
        from = width;
    }
    let last = net.pp("last").conv_norm_relu(from, widths[3], kernel(1))?;
    Ok(layers.add(last).add(net.head(widths[3])?))
}

/// The first half of the channels as they are, the second through layers.
#[derive(Debug)]
struct HalfPath {
    path: SequentialT,
    channels: usize,
}

impl ModuleT for HalfPath {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let half = x.dims()[self.channels] / 2;
        let y = self.path.forward_t(&x.narrow(self.channels, half, half)?, train)?;
        ops::cat(&[&x.narrow(self.channels, 0, half)?, &y], self.channels)
    }
}
