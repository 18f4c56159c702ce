//! Lesson 6, an unmodified candle model: it gets F16 copies of F32 masters, and knows nothing of this crate.

use candle_amp::{GradScaler, MasterVars, ops, random};
use candle_core::{DType, Device, Tensor};
use candle_nn::{AdamW, Module, VarBuilder};

/// Somebody else's model. candle's layer norm has no backward.
fn model(norm: bool, vb: VarBuilder) -> candle_core::Result<candle_nn::Sequential> {
    let hidden = candle_nn::linear(8, 32, vb.pp("hidden"))?;
    let mut layers = candle_nn::seq().add(hidden).add_fn(Tensor::relu);
    if norm {
        layers = layers.add(candle_nn::layer_norm(32, 1e-5, vb.pp("norm"))?);
    }
    Ok(layers.add(candle_nn::linear(32, 2, vb.pp("out"))?))
}

pub(crate) fn main() -> candle_amp::Result<()> {
    let x = random::randn(0.0, 1.0, (64, 8), DType::F32, &Device::Cpu)?;
    let (y, x) = (x.sum(1)?.ge(0f32)?, x.to_dtype(DType::F16)?);
    for norm in [true, false] {
        let masters = MasterVars::new(DType::F16, &Device::Cpu);
        let model = model(norm, masters.var_builder())?;
        let mut adamw = AdamW::new_lr(masters.parameters().vars(), 0.01)?;
        let (mut scaler, mut losses) = (GradScaler::default(), Vec::new());
        let missing = masters.missing(&model.forward(&x)?);
        println!("norm: {norm}. {missing}");
        assert_eq!(missing.is_empty(), !norm);
        for _ in 0..=60 {
            let loss = ops::cross_entropy(&model.forward(&x)?, &y)?; // in F32
            scaler.scale(&loss)?.backward()?;
            let _ = scaler.step(&mut masters.bind(&mut adamw))?; // rewrites the F16 copies
            scaler.update()?;
            losses.push(loss.to_scalar::<f32>()?);
        }
        println!("  loss {:.3} at first, {:.3} after 60 steps", losses[0], losses[60]);
        assert!(norm || losses[60] < losses[0] / 2.0);
    }
    Ok(())
}
