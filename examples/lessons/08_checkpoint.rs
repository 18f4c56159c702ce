//! Lesson 8, checkpoint and resume: a run that was stopped goes on bit for bit.

use candle_amp::checkpoints::{Checkpoint, Checkpointer};
use candle_amp::nn::{self, Module, VarMap};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::{Autocast, GradScaler, Parameters, Result, ops, random};
use candle_core::{DType, Device, Tensor};

/// Eight steps, or those that are left after the last checkpoint. Returns their losses.
fn train(x: &Tensor, folder: &Checkpointer) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let model = nn::linear(8, 1, nn::var_builder(&varmap, DType::F32, &Device::Cpu))?;
    let mut all = Parameters::from_varmap(&varmap);
    let mut adamw = AdamW::new(&all, AdamWConfig { lr: 0.1, ..Default::default() })?;
    let (amp, mut losses) = (Autocast::new(DType::BF16), vec![]);
    let mut scaler = GradScaler::disabled(); // of an F16 run, it is a part of the checkpoint too
    let resumed = folder.resume(&mut [("model", &mut all), ("adamw", &mut adamw)])?;
    for step in resumed.map_or(0, |resumed| resumed.step()) + 1..=8 {
        let loss = amp.scope(|| ops::mse(&model.forward(x)?, &x.sum_keepdim(1)?))?;
        scaler.scale(&loss)?.backward()?;
        let _ = scaler.step(&mut adamw)?;
        scaler.update()?;
        losses.push(loss.to_scalar()?);
        folder.save(&Checkpoint::new(step).with("model", &all)?.with("adamw", &adamw)?)?;
    }
    Ok(losses)
}

pub(crate) fn main() -> Result<()> {
    let x = random::randn(0.0, 1.0, (64, 8), DType::F32, &Device::Cpu)?;
    let path = std::env::temp_dir().join(format!("lesson-8-{}", std::process::id()));
    let folder = Checkpointer::new(&path)?; // keeps the last three
    let whole = train(&x, &folder)?;
    folder.discard_after(6)?; // as if the run had been stopped there
    let rest = train(&x, &folder)?;
    println!("steps 1 to 8:  {whole:.4?}\nagain from 7:  {rest:.4?}");
    assert_eq!(whole[6..], rest);
    Ok(std::fs::remove_dir_all(&path).map_err(candle_core::Error::from)?)
}
