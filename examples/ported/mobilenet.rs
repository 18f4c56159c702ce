//! MobileNetV2 for images of CIFAR-10's size: inverted residuals around depthwise convolutions. `pytorch/mobilenet.py`
//! is the original.
//!
//! Look at `inverted`: a block with a residual is a function of a sequence, and goes into a sequence itself. And at
//! `channels_last`: the images have another shape, the weights have not.

use candle_amp::nn::{self, Activation::Relu6, Conv2dConfig, ModuleT, SequentialT, VarBuilder};
use candle_amp::ops;
use candle_amp::optim::{Sgd, SgdConfig};
use candle_core::Result;

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

/// Channels in and out, kernel, stride, groups.
fn conv(sizes: [usize; 5], vb: VarBuilder) -> Result<SequentialT> {
    let [from, to, kernel, stride, groups] = sizes;
    let config = Conv2dConfig { padding: kernel / 2, stride, groups, ..Default::default() };
    let conv = nn::conv2d_no_bias(from, to, kernel, config, vb.pp(0))?.channels_last();
    Ok(nn::seq_t().add(conv).add(nn::batch_norm(to, 1e-5, vb.pp(1))?.channels_last()))
}

/// Channels in and out, expansion, stride.
fn inverted(sizes: [usize; 4], vb: VarBuilder) -> Result<SequentialT> {
    let [from, to, expansion, stride] = sizes;
    let (wide, mut layers) = (expansion * from, nn::seq_t());
    if expansion > 1 {
        layers = layers.add(conv([from, wide, 1, 1, 1], vb.pp("expand"))?).add(Relu6);
    }
    layers = layers.add(conv([wide, wide, 3, stride, wide], vb.pp("depthwise"))?).add(Relu6);
    layers = layers.add(conv([wide, to, 1, 1, 1], vb.pp("project"))?);
    if stride != 1 || from != to {
        return Ok(layers);
    }
    Ok(nn::seq_t().add_fn_t(move |x, train| ops::add(x, &layers.forward_t(x, train)?)))
}

fn mobilenet(classes: usize, vb: VarBuilder) -> Result<SequentialT> {
    let (mut blocks, mut from) = (nn::seq_t(), 32);
    for [expansion, to, count, stride] in STAGES {
        for i in 0..count {
            let sizes = [from, to, expansion, if i == 0 { stride } else { 1 }];
            let block = inverted(sizes, vb.pp("blocks").pp(blocks.len()))?;
            (blocks, from) = (blocks.add(block), to);
        }
    }
    let stem = nn::seq_t().add(conv([3, 32, 3, 2, 1], vb.pp("stem"))?).add(Relu6);
    let last = stem.add(blocks).add(conv([320, 1280, 1, 1, 1], vb.pp("last"))?).add(Relu6);
    let head = nn::linear(1280, classes, vb.pp("head"))?;
    Ok(last.add(nn::GlobalAvgPool2d::new().channels_last()).add(head))
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = mobilenet(10, run.vb())?;
    let config = SgdConfig { lr: 0.001, momentum: 0.9, weight_decay: 4e-5, ..Default::default() };
    let mut sgd = Sgd::new(run.initialised()?, config)?;
    for (x, y) in run.images(8)? {
        let x = x.permute((0, 2, 3, 1))?;
        let loss = run.amp.scope(|| ops::cross_entropy(&model.forward_t(&x, true)?, &y))?;
        run.scaler.scale(&loss)?.backward()?;
        let _ = run.scaler.step(&mut sgd)?;
        run.scaler.update()?;
        run.report(&loss)?;
    }
    Ok(())
}
