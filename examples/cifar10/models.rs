//! The networks, built of the crate's layers and operators.

use candle_amp::nn::{BatchNorm, Conv2d, Conv2dConfig, Linear, batch_norm, conv2d_no_bias, linear};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::{Module, ModuleT, VarBuilder};

use crate::{
    choices::Architecture,
    data::{CLASSES, PIXELS},
};

/// A network from normalised images, `(n, 3, 32, 32)`, to logits, `(n, 10)`.
#[derive(Debug)]
pub(crate) enum Model {
    ResNet(ResNet),
    Mlp(Mlp),
}

impl Model {
    pub(crate) fn new(architecture: Architecture, vb: VarBuilder) -> Result<Self> {
        match architecture {
            Architecture::Resnet8 => Ok(Self::ResNet(ResNet::new(1, vb)?)),
            Architecture::Resnet20 => Ok(Self::ResNet(ResNet::new(3, vb)?)),
            Architecture::Mlp => Ok(Self::Mlp(Mlp::new(vb)?)),
        }
    }

    /// `train` is true in training, where batch norm uses the batch's own statistics.
    pub(crate) fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        match self {
            Self::ResNet(resnet) => resnet.forward(x, train),
            Self::Mlp(mlp) => mlp.forward(x),
        }
    }
}

/// The residual network for CIFAR-10 of He et al. 2015, section 4.2, with projections where the
/// width changes. <https://arxiv.org/abs/1512.03385>
#[derive(Debug)]
pub(crate) struct ResNet {
    conv: Conv2d,
    norm: BatchNorm,
    blocks: Vec<Block>,
    head: Linear,
}

impl ResNet {
    /// Three stages of `depth` blocks, `6 * depth + 2` layers in all.
    fn new(depth: usize, vb: VarBuilder) -> Result<Self> {
        let (conv, norm) = conv_norm(3, 16, 3, 1, vb.pp("stem"))?;
        let mut blocks = Vec::with_capacity(3 * depth);
        let mut width = 16;
        for (stage, out) in [16, 32, 64].into_iter().enumerate() {
            for i in 0..depth {
                let stride = if stage > 0 && i == 0 { 2 } else { 1 };
                let vb = vb.pp(format!("stage{}.{i}", stage + 1));
                blocks.push(Block::new(width, out, stride, vb)?);
                width = out;
            }
        }
        Ok(Self { conv, norm, blocks, head: linear(width, CLASSES, vb.pp("head"))? })
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let mut x = self.norm.forward_relu_t(&self.conv.forward(x)?, None, train)?;
        for block in &self.blocks {
            x = block.forward(&x, train)?;
        }
        self.head.forward(&ops::flatten(&ops::global_avg_pool2d(&x)?)?)
    }
}

/// Two convolutions and a way around them.
#[derive(Debug)]
struct Block {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    /// Where the width changes.
    projection: Option<(Conv2d, BatchNorm)>,
}

impl Block {
    fn new(width: usize, out: usize, stride: usize, vb: VarBuilder) -> Result<Self> {
        let (conv1, norm1) = conv_norm(width, out, 3, stride, vb.pp("1"))?;
        let (conv2, norm2) = conv_norm(out, out, 3, 1, vb.pp("2"))?;
        let projection = match width == out {
            true => None,
            false => Some(conv_norm(width, out, 1, stride, vb.pp("projection"))?),
        };
        Ok(Self { conv1, norm1, conv2, norm2, projection })
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let inner = self.norm1.forward_relu_t(&self.conv1.forward(x)?, None, train)?;
        let inner = self.conv2.forward(&inner)?;
        let around = match &self.projection {
            Some((conv, norm)) => norm.forward_t(&conv.forward(x)?, train)?,
            None => x.clone(),
        };
        self.norm2.forward_relu_t(&inner, Some(&around), train)
    }
}

/// A convolution that keeps the size (but for `stride`), and its batch norm.
fn conv_norm(
    width: usize,
    out: usize,
    kernel: usize,
    stride: usize,
    vb: VarBuilder,
) -> Result<(Conv2d, BatchNorm)> {
    let config = Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
    let conv = conv2d_no_bias(width, out, kernel, config, vb.pp("conv"))?;
    Ok((conv, batch_norm(out, 1e-5, vb.pp("norm"))?))
}

/// Two hidden layers, which see no neighbourhoods.
#[derive(Debug)]
pub(crate) struct Mlp {
    hidden: [Linear; 2],
    head: Linear,
}

impl Mlp {
    fn new(vb: VarBuilder) -> Result<Self> {
        const WIDTH: usize = 512;
        let hidden = [linear(PIXELS, WIDTH, vb.pp("1"))?, linear(WIDTH, WIDTH, vb.pp("2"))?];
        Ok(Self { hidden, head: linear(WIDTH, CLASSES, vb.pp("head"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = ops::flatten(x)?;
        for layer in &self.hidden {
            x = ops::relu(&layer.forward(&x)?)?;
        }
        self.head.forward(&x)
    }
}
