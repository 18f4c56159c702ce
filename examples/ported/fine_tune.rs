//! Fine-tuning: a frozen body in evaluation mode, a new head, and a class that counts more.

use candle_amp::nn::{self, Activation, Conv2dConfig, CrossEntropyLoss, Module, ModuleT};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::run::Run;

struct Classifier {
    body: nn::SequentialT,
    head: nn::Linear,
}

impl Classifier {
    fn new(classes: usize, vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { stride: 2, padding: 1, ..Default::default() };
        let (mut body, of_body) = (nn::seq_t(), vb.pp("body"));
        for (from, to) in [(3, 16), (16, 32), (32, 64)] {
            let i = body.len();
            body = body.add(nn::conv2d_no_bias(from, to, 3, config, of_body.pp(i))?);
            body = body.add(nn::batch_norm(to, 1e-5, of_body.pp(i + 1))?).add(Activation::Relu);
        }
        Ok(Self { body, head: nn::linear(64, classes, vb.pp("head"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.head.forward(&ops::global_avg_pool2d(&self.body.forward_t(x, false)?)?)
    }
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = Classifier::new(10, run.vb())?;
    let parameters = run.initialised()?;
    parameters.filter(|name| name.starts_with("body.")).freeze();
    let config = AdamWConfig { lr: 0.05, ..Default::default() };
    let mut adamw = AdamW::new(parameters.trainable(), config)?;
    let weight = [3f32, 1., 1., 1., 1., 1., 1., 1., 1., 1.];
    let weight = Some(Tensor::new(&weight, &run.device)?);
    let cross_entropy = CrossEntropyLoss { weight, ..Default::default() };
    for (x, y) in run.images(16)? {
        let loss = run.amp.scope(|| cross_entropy.forward(&model.forward(&x)?, &y))?;
        run.scaler.scale(&loss)?.backward()?;
        run.scaler.clip_grad_norm(1.0)?;
        let _ = run.scaler.step(&mut adamw)?;
        run.scaler.update()?;
        run.report(&loss)?;
    }
    Ok(())
}
