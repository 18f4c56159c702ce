//! Residual networks: a block learns what to add to its input, so that a gradient passes through any
//! number of blocks by the additions. Blocks are two convolutions of 3x3 or, in networks of 50 layers
//! and more, bottlenecks of 1x1, 3x3 and 1x1. He et al. 2015, <https://arxiv.org/abs/1512.03385>: section
//! 4.2 has the narrow ones for CIFAR-10, section 4.1 the wide ones for ImageNet.
//!
//! All begin as those for CIFAR-10 do, with a convolution of 3x3 and no pooling: images are small. All
//! have projections where the width changes; the paper's narrow ones have zeros there, and 2,752
//! parameters less.

use candle_amp::nn::{SequentialT, seq_t};
use candle_core::Result;

use super::net::{Net, Residual, kernel};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1512.03385";

/// What a block has inside, of a width and a stride, and how many times that width comes out.
pub(super) struct Block {
    build: fn(&Net, from: usize, width: usize, stride: usize) -> Result<Residual>,
    times: usize,
}

pub(super) const PLAIN: Block = Block { build: plain, times: 1 };
pub(super) const BOTTLENECK: Block = Block { build: bottleneck, times: 4 };

pub(super) fn plain(net: &Net, from: usize, width: usize, stride: usize) -> Result<Residual> {
    Residual::new(net, from, &[(width, kernel(3).stride(stride)), (width, kernel(3))])
}

pub(super) fn bottleneck(net: &Net, from: usize, width: usize, stride: usize) -> Result<Residual> {
    let inner = kernel(3).stride(stride);
    Residual::new(net, from, &[(width, kernel(1)), (width, inner), (4 * width, kernel(1))])
}

/// For CIFAR-10, of `6 blocks + 2` layers.
pub(super) fn narrow(net: &Net, blocks: usize) -> Result<SequentialT> {
    resnet(net, &[16, 32, 64], &[blocks; 3], PLAIN)
}

/// For ImageNet, of so many blocks a stage.
pub(super) fn wide(net: &Net, blocks: &[usize; 4], block: Block) -> Result<SequentialT> {
    resnet(net, &[64, 128, 256, 512], blocks, block)
}

fn resnet(net: &Net, widths: &[usize], blocks: &[usize], block: Block) -> Result<SequentialT> {
    let mut width = widths[0];
    let mut layers = seq_t().add(net.pp("stem").conv_norm_relu(3, width, kernel(3))?);
    for (stage, (&inner, &count)) in widths.iter().zip(blocks).enumerate() {
        for i in 0..count {
            let stride = if stage > 0 && i == 0 { 2 } else { 1 };
            let net = net.pp(format!("stage{}.{i}", stage + 1));
            layers = layers.add((block.build)(&net, width, inner, stride)?);
            width = inner * block.times;
        }
    }
    Ok(layers.add(net.head(width)?))
}
