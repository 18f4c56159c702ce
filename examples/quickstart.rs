//! Learns which points lie inside a circle: products in F16, weights in F32, a dynamic scale.

use candle_amp::{Autocast, GradScaler, MasterWeights, Parameters, nn, no_grad, ops};
use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Module, ParamsAdamW, VarMap};

fn main() -> candle_amp::Result<()> {
    let at = |i: usize| i as f32 / 7.5 - 1.0; // 16 x 16 points of a square
    let points: Vec<_> = (0..256).map(|i| vec![at(i % 16), at(i / 16)]).collect();
    let inside: Vec<u32> = points.iter().map(|p| u32::from(p[0].hypot(p[1]) < 0.8)).collect();
    let (x, y) = (Tensor::new(points, &Device::Cpu)?, Tensor::new(inside, &Device::Cpu)?);

    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let (hidden, out) = (nn::linear(2, 32, vb.pp("hidden"))?, nn::linear(32, 2, vb.pp("out"))?);
    let model = nn::seq().add(hidden).add_fn(ops::relu).add(out);

    let vars = Parameters::from_varmap(&varmap).vars();
    let config = ParamsAdamW { lr: 0.02, ..Default::default() };
    let mut adamw = MasterWeights::<AdamW>::new(vars, config)?;
    let mut scaler = GradScaler::default();
    let amp = Autocast::new(DType::F16);
    for step in 0..=200 {
        let loss = amp.scope(|| ops::cross_entropy(&model.forward(&x)?, &y))?;
        scaler.scale(&loss)?.backward()?;
        let outcome = scaler.step(&mut adamw)?;
        scaler.update()?;
        if step % 50 == 0 {
            let (loss, scale) = (loss.to_scalar::<f32>()?, outcome.scale());
            println!("{step:3}: loss {loss:.4}, scale {scale}, skipped: {}", outcome.skipped()?);
        }
    }
    let logits = no_grad(|| amp.scope(|| model.forward(&x)))?;
    let right = logits.argmax(1)?.eq(&y)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
    println!("{right} of 256 points right, from logits in {:?}", logits.dtype());
    assert!(right >= 250.0);
    Ok(())
}
