//! DenseNet-BC-40: every layer sees what all layers before it returned. `pytorch/densenet.py` is the original.
//!
//! Look at the one sequence: it takes pools, norms and functions alike, and `len` numbers its parameters as PyTorch does.

use candle_amp::nn::{self, Activation::Relu, AvgPool2d, ModuleT, SequentialT, VarBuilder};
use candle_amp::ops;
use candle_amp::optim::{Sgd, SgdConfig};
use candle_core::Result;

use crate::run::Run;

const DEPTH: usize = 40;
const GROWTH: usize = 12;

fn conv(from: usize, to: usize, kernel: usize, vb: VarBuilder) -> Result<nn::Conv2d> {
    let config = nn::Conv2dConfig { padding: kernel / 2, ..Default::default() };
    nn::conv2d_no_bias(from, to, kernel, config, vb)
}

fn layer(from: usize, to: usize, kernel: usize, vb: VarBuilder) -> Result<SequentialT> {
    let norm = nn::batch_norm(from, 1e-5, vb.pp(0))?;
    Ok(nn::seq_t().add(norm).add(Relu).add(conv(from, to, kernel, vb.pp(2))?))
}

fn dense(from: usize, vb: VarBuilder) -> Result<nn::FuncT<'static>> {
    let layers = nn::seq_t().add(layer(from, 4 * GROWTH, 1, vb.pp("layers.0"))?).add(layer(
        4 * GROWTH,
        GROWTH,
        3,
        vb.pp("layers.1"),
    )?);
    Ok(nn::func_t(move |x, train| ops::cat(&[x, &layers.forward_t(x, train)?], 1)))
}

fn densenet(classes: usize, vb: VarBuilder) -> Result<SequentialT> {
    let mut channels = 2 * GROWTH;
    let mut layers = nn::seq_t().add(conv(3, channels, 3, vb.pp(0))?);
    for stage in 0..3 {
        for _ in 0..(DEPTH - 4) / 6 {
            let i = layers.len();
            layers = layers.add(dense(channels, vb.pp(i))?);
            channels += GROWTH;
        }
        if stage < 2 {
            let i = layers.len();
            layers = layers.add(layer(channels, channels / 2, 1, vb.pp(i))?).add(AvgPool2d::new(2));
            channels /= 2;
        }
    }
    let i = layers.len();
    layers = layers.add(nn::batch_norm(channels, 1e-5, vb.pp(i))?).add(Relu);
    layers = layers.add(nn::AdaptiveAvgPool2d::new(1)).add(nn::Flatten::new());
    Ok(layers.add(nn::linear(channels, classes, vb.pp(i + 4))?))
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
