//! Lesson 9, reading an overflow report: which variables were not finite, and when the scale fits.

use candle_amp::nn::{self, Activation, Module, VarMap};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{Autocast, GradScaler, Parameters, ScaleConfig, ops, random};
use candle_core::{DType, Device};

pub(crate) fn main() -> candle_amp::Result<()> {
    random::manual_seed(1);
    let x = random::randn(0.0, 1.0, (64, 8), DType::F32, &Device::Cpu)?;
    let y = (x.sum_keepdim(1)? * 20.0)?; // large targets, so large gradients
    let varmap = VarMap::new();
    let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
    let (hidden, out) = (nn::linear(8, 32, vb.pp("hidden"))?, nn::linear(32, 1, vb.pp("out"))?);
    let model = nn::seq().add(hidden).add(Activation::Relu).add(out);
    let all = Parameters::from_varmap(&varmap);
    let mut sgd = Sgd::new(&all, SgdConfig { lr: 1e-4, ..Default::default() })?;

    let config = ScaleConfig { growth_interval: 20, ..Default::default() }; // grows soon, to show it
    let (mut scaler, amp) = (GradScaler::new(config)?, Autocast::new(DType::F16));
    for step in 0..60 {
        let loss = amp.scope(|| ops::mse(&model.forward(&x)?, &y))?;
        scaler.scale(&loss)?.backward()?;
        if step == 59 {
            println!("{}", scaler.histogram(&all)?); // before `update`, which drops the gradients
        }
        let outcome = scaler.step(&mut sgd)?;
        if outcome.skipped()? {
            let report = outcome.report(&all)?;
            println!("step {step}, {report}\n");
            assert!(report.iter().count() >= if step == 0 { 4 } else { 1 }); // at step 0, all
        }
        scaler.update()?;
    }
    let history = scaler.history();
    println!("{history}");
    assert!(history.iter().any(|step| step.skipped) && history.total_skipped() < 20);
    Ok(())
}
