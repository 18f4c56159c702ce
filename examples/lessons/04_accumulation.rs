//! Lesson 4, accumulation and clipping: four micro-batches have the gradient of one batch, and its norm can be limited.

use candle_amp::nn::{self, Module, VarMap};
use candle_amp::optim::{Accumulation, Sgd, SgdConfig};
use candle_amp::{Autocast, GradScaler, Parameters, ops, random};
use candle_core::{DType, Device};

pub(crate) fn main() -> candle_amp::Result<()> {
    let x = random::randn(0.0, 1.0, (64, 8), DType::F32, &Device::Cpu)?;
    let y = x.sum_keepdim(1)?;
    let (amp, mut norms) = (Autocast::new(DType::F16), Vec::new());
    for micro_batches in [1, 4] {
        random::manual_seed(1);
        let varmap = VarMap::new();
        let model = nn::linear(8, 1, nn::var_builder(&varmap, DType::F32, &Device::Cpu))?;
        let config = SgdConfig { lr: 0.2, ..Default::default() };
        let mut sgd = Sgd::new(Parameters::from_varmap(&varmap), config)?;
        let (mut scaler, mut parts) = (GradScaler::default(), Accumulation::new(micro_batches)?);
        for _ in 0..3 {
            let mut total = 0.0;
            for (x, y) in x.chunk(micro_batches, 0)?.iter().zip(y.chunk(micro_batches, 0)?) {
                let loss = parts.divide(&amp.scope(|| ops::mse(&model.forward(x)?, &y))?)?;
                scaler.scale(&loss)?.backward()?; // adds to the gradients, in F32
                total += loss.to_scalar::<f32>()?;
                if parts.is_step(false) {
                    let norm: f32 = scaler.clip_grad_norm(2.0)?.to_scalar()?; // unscales first
                    let clipped: f32 = scaler.clip_grad_norm(f64::INFINITY)?.to_scalar()?;
                    println!("in {micro_batches}: loss {total:.3}, norm {norm:.3} to {clipped:.3}");
                    norms.push(norm);
                    assert!(clipped < 2.001); // without a limit, clipping only measures
                    let _ = scaler.step(&mut sgd)?;
                    scaler.update()?; // once: the scale must not move between the parts
                }
            }
        }
    }
    assert!((0..3).all(|step| (norms[step] / norms[step + 3] - 1.0).abs() < 0.01), "{norms:?}");
    Ok(())
}
