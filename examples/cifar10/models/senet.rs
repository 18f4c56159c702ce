//! Squeeze and excitation: each block looks at the mean of every channel, and decides by two small linear
//! layers how much of each channel to let through. A channel's weight so depends on the whole image, which
//! a convolution does not see. Hu et al. 2017, <https://arxiv.org/abs/1709.01507>, on the blocks of a
//! pre-activation ResNet-18.

use candle_amp::nn::{Activation, GlobalAvgPool2d, Linear, Module, SequentialT, seq_t};
use candle_amp::ops;
use candle_core::{Result, Tensor};

use super::net::{Net, kernel};
use super::preact_resnet::{PreAct, stages};

pub(super) const PAPER: &str = "https://arxiv.org/abs/1709.01507";

/// Of so many blocks a stage.
pub(super) fn senet(net: &Net, blocks: &[usize; 4]) -> Result<SequentialT> {
    let stem = seq_t().add(net.pp("stem").conv_norm_relu(3, 64, kernel(3))?);
    stages(net, stem, blocks, |net, from, width, stride| {
        let convs = [(width, kernel(3).stride(stride)), (width, kernel(3))];
        let gate = SqueezeExcite::new(&net.pp("gate"), width, width / 16, Activation::Relu)?;
        PreAct::new(net, from, &convs, seq_t().add(gate))
    })
}

/// `x` times one number a channel, from 0 to 1.
#[derive(Debug)]
pub(super) struct SqueezeExcite {
    pool: GlobalAvgPool2d,
    squeeze: Linear,
    activation: Activation,
    excite: Linear,
    channels: usize,
}

impl SqueezeExcite {
    pub(super) fn new(
        net: &Net,
        width: usize,
        inner: usize,
        activation: Activation,
    ) -> Result<Self> {
        let squeeze = net.pp("squeeze").linear(width, inner)?;
        let excite = net.pp("excite").linear(inner, width)?;
        let (pool, channels) = (net.global_pool(), net.channels());
        Ok(Self { pool, squeeze, activation, excite, channels })
    }
}

impl Module for SqueezeExcite {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = self.activation.forward(&self.squeeze.forward(&self.pool.forward(x)?)?)?;
        let gate = ops::sigmoid(&self.excite.forward(&inner)?)?;
        let mut dims = [gate.dims()[0], 1, 1, 1];
        dims[self.channels] = gate.dims()[1];
        ops::mul(x, &gate.reshape(&dims)?)
    }
}
