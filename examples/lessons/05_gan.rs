//! Lesson 5, two optimizers: a GAN learns the mean of a distribution. One scaler serves both sides.

use candle_amp::nn::{self, Activation, Module, VarMap};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::{Autocast, GradScaler, Parameters, ops, random};
use candle_core::{DType, Device, Tensor};

pub(crate) fn main() -> candle_amp::Result<()> {
    random::manual_seed(1);
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let generator = nn::linear(1, 1, vb.pp("generator"))?;
    let (one, two) = (nn::linear(1, 16, vb.pp("critic.1"))?, nn::linear(16, 1, vb.pp("critic.2"))?);
    let critic = nn::seq().add(one).add(Activation::LeakyRelu(0.2)).add(two);
    let all = Parameters::from_varmap(&varmap);
    let config = AdamWConfig { lr: 0.02, beta1: 0.0, ..Default::default() };
    let mut of_generator = AdamW::new(all.filter(|n| n.starts_with("generator.")), config)?;
    let mut of_critic = AdamW::new(all.filter(|n| n.starts_with("critic.")), config)?;
    let (mut scaler, amp) = (GradScaler::default(), Autocast::new(DType::F16));
    let normal = |mean, std| random::randn(mean, std, (64, 1), DType::F32, &Device::Cpu);
    let mse = |x: &Tensor, wanted: f64| ops::mse(&critic.forward(x)?, &(x.zeros_like()? + wanted)?);
    for step in 0..=1000 {
        let (real, noise) = (normal(3.0, 0.5)?, normal(0.0, 1.0)?);
        let fake = amp.scope(|| generator.forward(&noise))?;
        let loss = amp.scope(|| ops::add(&mse(&real, 1.0)?, &mse(&fake.detach(), 0.0)?))?;
        scaler.scale(&loss)?.backward()?;
        let _ = scaler.step(&mut of_critic)?; // its own variables only
        let loss = amp.scope(|| mse(&fake, 1.0))?;
        scaler.scale(&loss)?.backward()?; // adds nothing to the critic, which was stepped
        let _ = scaler.step(&mut of_generator)?;
        scaler.update()?; // once, at the end
        if step % 200 == 0 {
            let mean = fake.to_dtype(DType::F32)?.mean_all()?.to_scalar::<f32>()?;
            println!("step {step:4}: generated numbers have a mean of {mean:.2}, real ones of 3");
            assert!(step < 1000 || (mean - 3.0).abs() < 1.0);
        }
    }
    Ok(())
}
