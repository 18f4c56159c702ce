//! MobileNetV2 for images of CIFAR-10's size.

use candle_amp::nn::{self, Activation, Conv2dConfig, ModuleT, SequentialT};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::run::Run;

/// Of each stage: the factor by which its blocks are wider inside, channels, blocks, stride.
const STAGES: [[usize; 4]; 7] = [
    [1, 16, 1, 1],
    [6, 24, 2, 1],
    [6, 32, 3, 2],
    [6, 64, 4, 2],
    [6, 96, 3, 1],
    [6, 160, 3, 2],
    [6, 320, 1, 1],
];

type Sizes = [usize; 5];

/// Channels in and out, kernel, stride, groups.
fn conv([from, to, kernel, stride, groups]: Sizes, vb: VarBuilder) -> Result<SequentialT> {
    let config = Conv2dConfig { padding: kernel / 2, stride, groups, ..Default::default() };
    let conv = nn::conv2d_no_bias(from, to, kernel, config, vb.pp(0))?;
    Ok(nn::seq_t().add(conv).add(nn::batch_norm(to, 1e-5, vb.pp(1))?))
}

struct Inverted {
    layers: SequentialT,
    residual: bool,
}

impl Inverted {
    fn new([from, to, expansion, stride]: [usize; 4], vb: VarBuilder) -> Result<Self> {
        let (wide, mut layers) = (expansion * from, nn::seq_t());
        if expansion > 1 {
            let expand = conv([from, wide, 1, 1, 1], vb.pp("expand"))?;
            layers = layers.add(expand).add(Activation::Relu6);
        }
        layers = layers.add(conv([wide, wide, 3, stride, wide], vb.pp("depthwise"))?);
        layers = layers.add(Activation::Relu6).add(conv([wide, to, 1, 1, 1], vb.pp("project"))?);
        Ok(Self { layers, residual: stride == 1 && from == to })
    }
}

impl ModuleT for Inverted {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.layers.forward_t(x, train)?;
        if self.residual { ops::add(x, &y) } else { Ok(y) }
    }
}

fn mobilenet(classes: usize, vb: VarBuilder) -> Result<SequentialT> {
    let stem = conv([3, 32, 3, 1, 1], vb.pp("stem"))?;
    let (mut layers, mut from, mut i) = (nn::seq_t().add(stem).add(Activation::Relu6), 32, 0);
    for [expansion, to, count, stride] in STAGES {
        for block in 0..count {
            let stride = if block == 0 { stride } else { 1 };
            layers = layers.add(Inverted::new([from, to, expansion, stride], vb.pp("blocks").pp(i))?);
            (from, i) = (to, i + 1);
        }
    }
    let last = conv([320, 1280, 1, 1, 1], vb.pp("last"))?;
    let head = nn::linear(1280, classes, vb.pp("head"))?;
    Ok(layers.add(last).add(Activation::Relu6).add(nn::GlobalAvgPool2d::new()).add(head))
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = mobilenet(10, run.vb())?;
    let config = SgdConfig { lr: 0.01, momentum: 0.9, weight_decay: 4e-5, ..Default::default() };
    let mut sgd = Sgd::new(run.initialised()?, config)?;
    for (x, y) in run.images(8)? {
        let loss = run.amp.scope(|| ops::cross_entropy(&model.forward_t(&x, true)?, &y))?;
        run.scaler.scale(&loss)?.backward()?;
        let _ = run.scaler.step(&mut sgd)?;
        run.scaler.update()?;
        run.report(&loss)?;
    }
    Ok(())
}
