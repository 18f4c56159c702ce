//! DenseNet-BC-40: every layer sees what all layers before it returned.

use candle_amp::nn::{self, Activation, AvgPool2d, Conv2dConfig, ModuleT, SequentialT};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::run::Run;

const DEPTH: usize = 40;
const GROWTH: usize = 12;

fn conv(from: usize, to: usize, kernel: usize, vb: VarBuilder) -> Result<nn::Conv2d> {
    let config = Conv2dConfig { padding: kernel / 2, ..Default::default() };
    Ok(nn::conv2d_no_bias(from, to, kernel, config, vb)?)
}

fn layer(from: usize, to: usize, kernel: usize, vb: VarBuilder) -> Result<SequentialT> {
    let norm = nn::batch_norm(from, 1e-5, vb.pp(0))?;
    Ok(nn::seq_t().add(norm).add(Activation::Relu).add(conv(from, to, kernel, vb.pp(2))?))
}

struct Dense(SequentialT);

impl Dense {
    fn new(from: usize, vb: VarBuilder) -> Result<Self> {
        let narrow = layer(from, 4 * GROWTH, 1, vb.pp("layers.0"))?;
        let grow = layer(4 * GROWTH, GROWTH, 3, vb.pp("layers.1"))?;
        Ok(Self(nn::seq_t().add(narrow).add(grow)))
    }
}

impl ModuleT for Dense {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        ops::cat(&[x, &self.0.forward_t(x, train)?], 1)
    }
}

fn densenet(classes: usize, vb: VarBuilder) -> Result<SequentialT> {
    let mut channels = 2 * GROWTH;
    let mut layers = nn::seq_t().add(conv(3, channels, 3, vb.pp(0))?);
    for stage in 0..3 {
        for _ in 0..(DEPTH - 4) / 6 {
            let dense = Dense::new(channels, vb.pp(layers.len()))?;
            layers = layers.add(dense);
            channels += GROWTH;
        }
        if stage < 2 {
            let transition = layer(channels, channels / 2, 1, vb.pp(layers.len()))?;
            layers = layers.add(transition).add(AvgPool2d::new(2));
            channels /= 2;
        }
    }
    let norm = nn::batch_norm(channels, 1e-5, vb.pp(layers.len()))?;
    let layers = layers.add(norm).add(Activation::Relu).add(nn::GlobalAvgPool2d::new());
    let head = nn::linear(channels, classes, vb.pp(layers.len() + 1))?;
    Ok(layers.add(head))
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = densenet(10, run.vb())?;
    let config = SgdConfig { lr: 0.02, momentum: 0.9, weight_decay: 1e-4, ..Default::default() };
    let mut sgd = Sgd::new(run.initialised()?, SgdConfig { nesterov: true, ..config })?;
    for (x, y) in run.images(8)? {
        let forward = || ops::cross_entropy_smoothed(&model.forward_t(&x, true)?, &y, 0.1);
        let loss = run.amp.scope(forward)?;
        run.scaler.scale(&loss)?.backward()?;
        let _ = run.scaler.step(&mut sgd)?;
        run.scaler.update()?;
        run.report(&loss)?;
    }
    Ok(())
}
