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
        let resnet = |plan| Ok(Self::ResNet(ResNet::new(plan, vb.clone())?));
        match architecture {
            Architecture::Resnet8 => {
                resnet(Plan { stages: &NARROW, blocks: &[1; 3], kernels: PLAIN })
            }
            Architecture::Resnet20 => {
                resnet(Plan { stages: &NARROW, blocks: &[3; 3], kernels: PLAIN })
            }
            Architecture::Resnet18 => {
                resnet(Plan { stages: &WIDE, blocks: &[2; 4], kernels: PLAIN })
            }
            Architecture::Resnet50 => {
                resnet(Plan { stages: &WIDE, blocks: &[3, 4, 6, 3], kernels: BOTTLENECK })
            }
            Architecture::Mlp => Ok(Self::Mlp(Mlp::new(vb.clone())?)),
        }
    }

    /// With images turned to `(n, 32, 32, 3)` where they enter. A network that sees no neighbourhoods
    /// has no use for it.
    pub(crate) fn channels_last(self) -> Self {
        match self {
            Self::ResNet(resnet) => Self::ResNet(resnet.channels_last()),
            mlp @ Self::Mlp(_) => mlp,
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

/// What a residual network is made of.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// The width of every stage, but for what a bottleneck's last convolution makes of it.
    stages: &'static [usize],
    /// The number of blocks of every stage.
    blocks: &'static [usize],
    /// A block's convolutions: kernel size, and how many times the stage's width.
    kernels: &'static [(usize, usize)],
}

/// The widths of He et al. 2015, <https://arxiv.org/abs/1512.03385>, for CIFAR-10 (section 4.2) and
/// for ImageNet (section 4.1).
const NARROW: [usize; 3] = [16, 32, 64];
const WIDE: [usize; 4] = [64, 128, 256, 512];
/// Their blocks.
const PLAIN: &[(usize, usize)] = &[(3, 1), (3, 1)];
const BOTTLENECK: &[(usize, usize)] = &[(1, 1), (3, 1), (1, 4)];

/// A residual network, with projections where the width changes. All begin as those for CIFAR-10 do,
/// with a convolution of 3x3 and no pooling: images are small.
#[derive(Debug)]
pub(crate) struct ResNet {
    conv: Conv2d,
    norm: BatchNorm,
    blocks: Vec<Block>,
    head: Linear,
    channels_last: bool,
}

impl ResNet {
    fn new(plan: Plan, vb: VarBuilder) -> Result<Self> {
        let mut width = plan.stages[0];
        let (conv, norm) = conv_norm(3, width, 3, 1, vb.pp("stem"))?;
        let mut blocks = Vec::new();
        for (stage, (&inner, &count)) in plan.stages.iter().zip(plan.blocks).enumerate() {
            for i in 0..count {
                let stride = if stage > 0 && i == 0 { 2 } else { 1 };
                let vb = vb.pp(format!("stage{}.{i}", stage + 1));
                let block = Block::new(width, inner, plan.kernels, stride, vb)?;
                width = inner * plan.kernels.last().map_or(1, |&(_, times)| times);
                blocks.push(block);
            }
        }
        let head = linear(width, CLASSES, vb.pp("head"))?;
        Ok(Self { conv, norm, blocks, head, channels_last: false })
    }

    fn channels_last(self) -> Self {
        let (conv, norm) = turn((self.conv, self.norm));
        let blocks = self.blocks.into_iter().map(Block::channels_last).collect();
        Self { conv, norm, blocks, channels_last: true, ..self }
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let x = if self.channels_last { &x.permute((0, 2, 3, 1))? } else { x };
        let mut x = self.norm.forward_relu_t(&self.conv.forward(x)?, None, train)?;
        for block in &self.blocks {
            x = block.forward(&x, train)?;
        }
        let averages = match self.channels_last {
            true => ops::channels_last::global_avg_pool2d(&x)?,
            false => ops::global_avg_pool2d(&x)?,
        };
        self.head.forward(&ops::flatten(&averages)?)
    }
}

/// Convolutions and a way around them.
#[derive(Debug)]
struct Block {
    layers: Vec<(Conv2d, BatchNorm)>,
    /// Where the width changes.
    projection: Option<(Conv2d, BatchNorm)>,
}

impl Block {
    /// The first convolution larger than a pixel has the stride.
    fn new(
        width: usize,
        inner: usize,
        kernels: &[(usize, usize)],
        stride: usize,
        vb: VarBuilder,
    ) -> Result<Self> {
        let mut layers = Vec::new();
        let (mut from, mut left) = (width, stride);
        for (i, &(kernel, times)) in kernels.iter().enumerate() {
            let stride = if kernel > 1 { std::mem::replace(&mut left, 1) } else { 1 };
            layers.push(conv_norm(from, inner * times, kernel, stride, vb.pp(i + 1))?);
            from = inner * times;
        }
        let projection = match width == from {
            true => None,
            false => Some(conv_norm(width, from, 1, stride, vb.pp("projection"))?),
        };
        Ok(Self { layers, projection })
    }

    fn channels_last(self) -> Self {
        let layers = self.layers.into_iter().map(turn).collect();
        Self { layers, projection: self.projection.map(turn) }
    }

    fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let around = match &self.projection {
            Some((conv, norm)) => norm.forward_t(&conv.forward(x)?, train)?,
            None => x.clone(),
        };
        let (mut inner, last) = (x.clone(), self.layers.len() - 1);
        for (i, (conv, norm)) in self.layers.iter().enumerate() {
            let residual = (i == last).then_some(&around);
            inner = norm.forward_relu_t(&conv.forward(&inner)?, residual, train)?;
        }
        Ok(inner)
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

fn turn((conv, norm): (Conv2d, BatchNorm)) -> (Conv2d, BatchNorm) {
    (conv.channels_last(), norm.channels_last())
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

#[cfg(test)]
mod tests {
    use candle_amp::{Parameters, nn};
    use candle_core::{DType, Device};
    use candle_nn::VarMap;

    use super::*;

    #[test]
    fn networks_have_the_parameters_of_their_papers() -> Result<()> {
        for (architecture, expected) in [
            (Architecture::Resnet8, 78_042),
            (Architecture::Resnet20, 272_474),
            (Architecture::Resnet18, 11_173_962),
            (Architecture::Resnet50, 23_520_842),
        ] {
            let varmap = VarMap::new();
            Model::new(architecture, nn::var_builder(&varmap, DType::F32, &Device::Cpu))?;
            let vars = Parameters::from_varmap(&varmap).vars();
            let count: usize = vars.iter().map(|var| var.elem_count()).sum();
            assert_eq!(count, expected, "{architecture}");
        }
        Ok(())
    }

    #[test]
    fn a_bottleneck_halves_the_image_and_widens_it() -> Result<()> {
        let varmap = VarMap::new();
        let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
        let block = Block::new(8, 4, BOTTLENECK, 2, vb)?;
        let x = Tensor::ones((2, 8, 6, 6), DType::F32, &Device::Cpu)?;
        assert_eq!(block.forward(&x, true)?.dims(), [2, 16, 3, 3]);
        assert!(block.projection.is_some());
        Ok(())
    }
}
