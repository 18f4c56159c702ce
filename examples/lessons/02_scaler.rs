//! Lesson 2, the scaler: gradients below 6e-8 are 0 in F16, unless the loss is multiplied by a scale first.

use candle_amp::nn::{Linear, Module};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{Autocast, GradScaler, ScaleConfig, ops, random};
use candle_core::{DType, Device, Var};

pub(crate) fn main() -> candle_amp::Result<()> {
    let x = random::randn(0.0, 1.0, (512, 16), DType::F32, &Device::Cpu)?;
    let y = x.matmul(&random::randn(0.0, 1e-3, (16, 2048), DType::F32, &Device::Cpu)?)?;
    let amp = Autocast::new(DType::F16);
    for init_scale in [1.0, 65536.0] {
        let weight = Var::zeros((2048, 16), DType::F32, &Device::Cpu)?;
        let model = Linear::new(weight.as_tensor().clone(), None);
        let mut sgd =
            Sgd::new(vec![weight.clone()], SgdConfig { lr: 400.0, ..Default::default() })?;
        let mut scaler = GradScaler::new(ScaleConfig { init_scale, ..Default::default() })?;
        println!("scale {init_scale}");
        for step in 0..=10 {
            // A mean over a million small errors: the gradient of each is near 1e-8.
            let loss = amp.scope(|| ops::mse(&model.forward(&x)?, &y))?;
            scaler.scale(&loss)?.backward()?;
            if step % 5 == 0 {
                let gradient = scaler.grad(&weight)?.expect("the loss reaches the weight"); // unscaled
                let zeros = gradient.eq(0f32)?.to_dtype(DType::F32)?.mean_all()?;
                let (loss, zeros) = (loss.to_scalar::<f32>()?, 100.0 * zeros.to_scalar::<f32>()?);
                println!("  step {step:2}: loss {loss:.1e}, {zeros:.0} % of the gradient is 0");
                assert_eq!(zeros > 50.0, init_scale == 1.0);
            }
            let _ = scaler.step(&mut sgd)?; // unscales: a step is as large at every scale
            scaler.update()?;
        }
    }
    Ok(())
}
