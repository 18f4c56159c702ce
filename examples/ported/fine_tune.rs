//! Fine-tuning: a frozen body in evaluation mode, a new head, and a class that counts more. `pytorch/fine_tune.py` is
//! the original.
//!
//! Look at `freeze` and `trainable`: no gradient of the body is computed, clipped or checked. `forward_t(x, false)` is
//! `eval()`.

use candle_amp::nn::{self, Activation::Relu, Module, ModuleT, SequentialT, VarBuilder};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_core::{Result, Tensor};

use crate::run::Run;

fn body(vb: VarBuilder) -> Result<SequentialT> {
    let config = nn::Conv2dConfig { stride: 2, padding: 1, ..Default::default() };
    let mut layers = nn::seq_t();
    for (from, to) in [(3, 16), (16, 32), (32, 64)] {
        let i = layers.len();
        layers = layers.add(nn::conv2d_no_bias(from, to, 3, config, vb.pp(i))?);
        layers = layers.add(nn::batch_norm(to, 1e-5, vb.pp(i + 1))?).add(Relu);
    }
    Ok(layers.add(nn::GlobalAvgPool2d::new()))
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let body = body(run.vb().pp("body"))?;
    let head = nn::linear(64, 10, run.vb().pp("head"))?;
    let parameters = run.initialised()?;
    parameters.filter(|name| name.starts_with("body.")).freeze();
    let config = AdamWConfig { lr: 0.05, ..Default::default() };
    let mut adamw = AdamW::new(parameters.trainable(), config)?;
    let weight = Some(Tensor::new(&[3f32, 1., 1., 1., 1., 1., 1., 1., 1., 1.], &run.device)?);
    let cross_entropy = nn::CrossEntropyLoss { weight, ..Default::default() };
    for (x, y) in run.images(16)? {
        let forward = || cross_entropy.forward(&head.forward(&body.forward_t(&x, false)?)?, &y);
        let loss = run.amp.scope(forward)?;
        run.scaler.scale(&loss)?.backward()?;
        run.scaler.clip_grad_norm(1.0)?;
        let _ = run.scaler.step(&mut adamw)?;
        run.scaler.update()?;
        run.report(&loss)?;
    }
    Ok(())
}
