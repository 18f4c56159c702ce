//! Lesson 8, checkpoint and resume: a run that was stopped goes on bit for bit.

use candle_amp::checkpoints::{Checkpoint, Checkpointer, Stateful};
use candle_amp::nn::{self, Module, VarMap};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::{Autocast, GradScaler, Parameters, Result, ops};
use candle_core::{DType, Device, Tensor};

/// Eight steps, or those that are left after the last checkpoint. Returns their losses.
fn train(x: &Tensor, folder: &Checkpointer) -> Result<Vec<f32>> {
    let varmap = VarMap::new();
    let model = nn::linear(8, 1, nn::var_builder(&varmap, DType::F32, &Device::Cpu))?;
    let mut all = Parameters::from_varmap(&varmap);
    let mut adamw = AdamW::new(&all, AdamWConfig { lr: 0.1, ..Default::default() })?;
    let (mut scaler, amp, mut losses) =
        (GradScaler::disabled(), Autocast::new(DType::BF16), vec![]);
    let parts = &mut [("model", &mut all as &mut dyn Stateful), ("adamw", &mut adamw)];
    let taken = folder.resume(parts)?.map_or(0, |resumed| resumed.step());
    for step in taken + 1..=8 {
        let loss = amp.scope(|| ops::mse(&model.forward(x)?, &x.sum_keepdim(1)?))?;
        scaler.scale(&loss)?.backward()?;
        let _ = scaler.step(&mut adamw)?;
        scaler.update()?;
        losses.push(loss.to_scalar()?);
        if step % 4 == 0 {
            folder.save(&Checkpoint::new(step).with("model", &all)?.with("adamw", &adamw)?)?;
        }
    }
    Ok(losses)
}

pub(crate) fn main() -> Result<()> {
    let x = Tensor::randn(0f32, 1.0, (64, 8), &Device::Cpu)?;
    let path = std::env::temp_dir().join(format!("lesson-8-{}", std::process::id()));
    let folder = Checkpointer::new(&path)?;
    println!("steps 1 to 8:         {:?}", train(&x, &folder)?);
    folder.discard_after(4)?; // as if the run had been stopped before it saved step 8
    println!("steps 5 to 8, again:  {:?}", train(&x, &folder)?);
    Ok(std::fs::remove_dir_all(&path).map_err(candle_core::Error::from)?)
}
