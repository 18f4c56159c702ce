//! Networks of convolutions that classify images.

use candle_amp::nn::{BatchNorm, Conv2d, Conv2dConfig, Linear, batch_norm, conv2d_no_bias, linear};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::{Module, ModuleT, VarBuilder};

/// A convolution, `kernel / 2` padded, without bias.
fn conv(
    [from, to]: [usize; 2],
    kernel: usize,
    stride: usize,
    groups: usize,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let config = Conv2dConfig { padding: kernel / 2, stride, groups, ..Default::default() };
    conv2d_no_bias(from, to, kernel, config, vb)
}

pub(super) fn norm(channels: usize, vb: VarBuilder) -> Result<BatchNorm> {
    batch_norm(channels, 1e-5, vb)
}

/// A convolution and its batch norm.
pub(super) struct ConvNorm {
    conv: Conv2d,
    norm: BatchNorm,
}

impl ConvNorm {
    pub(super) fn new(
        sides: [usize; 2],
        kernel: usize,
        stride: usize,
        groups: usize,
        vb: VarBuilder,
    ) -> Result<Self> {
        let conv = conv(sides, kernel, stride, groups, vb.pp("conv"))?;
        Ok(Self { conv, norm: norm(sides[1], vb.pp("norm"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.norm.forward_t(&self.conv.forward(x)?, true)
    }

    pub(super) fn relu(&self, x: &Tensor) -> Result<Tensor> {
        self.norm.forward_relu_t(&self.conv.forward(x)?, None, true)
    }

    fn relu6(&self, x: &Tensor) -> Result<Tensor> {
        self.norm.forward_relu6_t(&self.conv.forward(x)?, true)
    }
}

/// An inverted residual of MobileNetV2.
struct Inverted {
    expand: Option<ConvNorm>,
    depthwise: ConvNorm,
    project: ConvNorm,
    residual: bool,
}

impl Inverted {
    fn new(
        [from, to]: [usize; 2],
        expansion: usize,
        stride: usize,
        vb: VarBuilder,
    ) -> Result<Self> {
        let wide = expansion * from;
        let expand = (expansion > 1).then(|| ConvNorm::new([from, wide], 1, 1, 1, vb.pp("expand")));
        Ok(Self {
            expand: expand.transpose()?,
            depthwise: ConvNorm::new([wide, wide], 3, stride, wide, vb.pp("depthwise"))?,
            project: ConvNorm::new([wide, to], 1, 1, 1, vb.pp("project"))?,
            residual: stride == 1 && from == to,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let wide = match &self.expand {
            Some(expand) => &expand.relu6(x)?,
            None => x,
        };
        let y = self.project.forward(&self.depthwise.relu6(wide)?)?;
        if self.residual { ops::add(x, &y) } else { Ok(y) }
    }
}

/// MobileNetV2, which keeps images of CIFAR-10's size large for longer than those of ImageNet.
pub(super) struct MobileNet {
    stem: ConvNorm,
    blocks: Vec<Inverted>,
    last: ConvNorm,
    head: Linear,
}

impl MobileNet {
    /// Of each stage: how many times wider its blocks are inside, channels, blocks, stride.
    const STAGES: [[usize; 4]; 7] = [
        [1, 16, 1, 1],
        [6, 24, 2, 1],
        [6, 32, 3, 2],
        [6, 64, 4, 2],
        [6, 96, 3, 1],
        [6, 160, 3, 2],
        [6, 320, 1, 1],
    ];

    pub(super) fn new(width: usize, vb: VarBuilder) -> Result<Self> {
        let channels = |original| original * width / 32;
        let (mut blocks, mut from, last) = (Vec::new(), width, channels(1280));
        for [expansion, to, count, stride] in Self::STAGES {
            let to = channels(to);
            for i in 0..count {
                let vb = vb.pp("blocks").pp(blocks.len());
                let stride = if i == 0 { stride } else { 1 };
                blocks.push(Inverted::new([from, to], expansion, stride, vb)?);
                from = to;
            }
        }
        Ok(Self {
            stem: ConvNorm::new([3, width], 3, 1, 1, vb.pp("stem"))?,
            blocks,
            last: ConvNorm::new([from, last], 1, 1, 1, vb.pp("last"))?,
            head: linear(last, 10, vb.pp("head"))?,
        })
    }
}

impl Module for MobileNet {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.stem.relu6(x)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        self.head.forward(&ops::global_avg_pool2d(&self.last.relu6(&x)?)?)
    }
}

/// A batch norm, relu and a convolution.
struct NormConv {
    norm: BatchNorm,
    conv: Conv2d,
}

impl NormConv {
    fn new([from, to]: [usize; 2], kernel: usize, vb: VarBuilder) -> Result<Self> {
        let norm = norm(from, vb.pp("norm"))?;
        Ok(Self { norm, conv: conv([from, to], kernel, 1, 1, vb.pp("conv"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.conv.forward(&self.norm.forward_relu_t(x, None, true)?)
    }
}

/// The layers that see the same size of image: each sees what all before it gave.
struct DenseStage {
    layers: Vec<[NormConv; 2]>,
    /// To half the channels, and half the size.
    transition: Option<NormConv>,
}

/// DenseNet-BC: with bottlenecks, and compressed between stages.
pub(super) struct DenseNet {
    stem: Conv2d,
    stages: Vec<DenseStage>,
    norm: BatchNorm,
    head: Linear,
}

impl DenseNet {
    const STAGES: usize = 3;

    pub(super) fn new(depth: usize, growth: usize, vb: VarBuilder) -> Result<Self> {
        let count = (depth - 4) / (2 * Self::STAGES);
        let (mut stages, mut width) = (Vec::new(), 2 * growth);
        for i in 0..Self::STAGES {
            let vb = vb.pp("stages").pp(i);
            let layer = |i: usize| {
                let (vb, from) = (vb.pp("layers").pp(i), width + i * growth);
                let narrow = NormConv::new([from, 4 * growth], 1, vb.pp("narrow"))?;
                Ok([narrow, NormConv::new([4 * growth, growth], 3, vb.pp("grow"))?])
            };
            let layers = (0..count).map(layer).collect::<Result<_>>()?;
            width += count * growth;
            let mut transition = None;
            if i + 1 < Self::STAGES {
                transition = Some(NormConv::new([width, width / 2], 1, vb.pp("transition"))?);
                width /= 2;
            }
            stages.push(DenseStage { layers, transition });
        }
        Ok(Self {
            stem: conv([3, 2 * growth], 3, 1, 1, vb.pp("stem"))?,
            stages,
            norm: norm(width, vb.pp("norm"))?,
            head: linear(width, 10, vb.pp("head"))?,
        })
    }
}

impl Module for DenseNet {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = self.stem.forward(x)?;
        for DenseStage { layers, transition } in &self.stages {
            for [narrow, grow] in layers {
                x = ops::cat(&[&x, &grow.forward(&narrow.forward(&x)?)?], 1)?;
            }
            if let Some(transition) = transition {
                x = ops::avg_pool2d(&transition.forward(&x)?, 2, 2, 0)?;
            }
        }
        self.head.forward(&ops::global_avg_pool2d(&self.norm.forward_relu_t(&x, None, true)?)?)
    }
}
