//! A DCGAN: two networks, two optimizers, one scaler. `pytorch/dcgan.py` is the original.
//!
//! Look at what is missing: `zero_grad` between the two steps. The scaler gives each optimizer the gradients of its own
//! variables only, and `update` drops them all.

use candle_amp::nn::{self, Activation, Conv2dConfig, ConvTranspose2dConfig, ModuleT, SequentialT};
use candle_amp::ops;
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_core::{Result, Tensor};

use crate::run::Run;

const LATENT: usize = 32;
const WIDTH: usize = 16;

fn up(from: usize, to: usize, stride: usize, vb: nn::VarBuilder) -> Result<nn::ConvTranspose2d> {
    let config = ConvTranspose2dConfig { padding: stride - 1, stride, ..Default::default() };
    nn::conv_transpose2d_no_bias(from, to, 4, config, vb)
}

fn new_generator(vb: nn::VarBuilder) -> Result<SequentialT> {
    let (w, mut layers) = (WIDTH, nn::seq_t());
    for (from, to, stride) in [(LATENT, 4 * w, 1), (4 * w, 2 * w, 2), (2 * w, w, 2)] {
        let i = layers.len();
        layers = layers.add(up(from, to, stride, vb.pp(i))?);
        layers = layers.add(nn::batch_norm(to, 1e-5, vb.pp(i + 1))?).add(Activation::Relu);
    }
    let last = up(w, 3, 2, vb.pp(layers.len()))?;
    Ok(layers.add(last).add_fn(ops::tanh))
}

fn new_critic(vb: nn::VarBuilder) -> Result<SequentialT> {
    let config = Conv2dConfig { padding: 1, stride: 2, ..Default::default() };
    let down = |from, to, i| nn::conv2d_no_bias(from, to, 4, config, vb.pp(i));
    let mut layers = nn::seq_t().add(down(3, WIDTH, 0)?).add(Activation::LeakyRelu(0.2));
    for (from, to) in [(WIDTH, 2 * WIDTH), (2 * WIDTH, 4 * WIDTH)] {
        let i = layers.len();
        layers = layers.add(down(from, to, i)?).add(nn::batch_norm(to, 1e-5, vb.pp(i + 1))?);
        layers = layers.add(Activation::LeakyRelu(0.2));
    }
    let last = Conv2dConfig::default();
    let last = nn::conv2d_no_bias(4 * WIDTH, 1, 4, last, vb.pp(layers.len()))?;
    Ok(layers.add(last))
}

fn loss_of(logits: &Tensor, real: bool) -> Result<Tensor> {
    let target = if real { logits.ones_like()? } else { logits.zeros_like()? };
    ops::binary_cross_entropy_with_logit(logits, &target)
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let (generator, critic) = (run.vb().pp("generator"), run.vb().pp("critic"));
    let (generator, critic) = (new_generator(generator)?, new_critic(critic)?);
    let config = AdamWConfig { lr: 2e-4, beta1: 0.5, weight_decay: 0.0, ..Default::default() };
    let all = run.initialised()?;
    let optimizer = |side| AdamW::new(all.filter(|name| name.starts_with(side)), config);
    let (mut generator_adam, mut critic_adam) = (optimizer("generator.")?, optimizer("critic.")?);
    for (step, (real, _)) in run.images(8)?.iter().enumerate() {
        let latent = run.latent((8, LATENT, 1, 1), step)?;
        let fake = run.amp.scope(|| generator.forward_t(&latent, true))?;
        let critic_loss = run.amp.scope(|| {
            let of_fake = loss_of(&critic.forward_t(&fake.detach(), true)?, false)?;
            ops::add(&loss_of(&critic.forward_t(real, true)?, true)?, &of_fake)
        })?;
        run.scaler.scale(&critic_loss)?.backward()?;
        let _ = run.scaler.step(&mut critic_adam)?;
        let generator_loss = run.amp.scope(|| loss_of(&critic.forward_t(&fake, true)?, true))?;
        run.scaler.scale(&generator_loss)?.backward()?;
        let _ = run.scaler.step(&mut generator_adam)?;
        run.scaler.update()?;
        run.report(&(critic_loss + generator_loss)?)?;
    }
    Ok(())
}
