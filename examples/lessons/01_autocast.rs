//! Lesson 1, autocast: products run in BF16, the loss in F32, and the variables stay F32.

use candle_amp::nn::{self, Activation, Module, VarMap};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{Autocast, GradScaler, Parameters, ops, random};
use candle_core::{DType, Device};

pub(crate) fn main() -> candle_amp::Result<()> {
    let x = random::randn(0.0, 1.0, (128, 8), DType::F32, &Device::Cpu)?;
    let y = x.sum(1)?.ge(0f32)?; // which of two classes
    for amp in [Autocast::disabled(), Autocast::new(DType::BF16)] {
        random::manual_seed(1); // the same initial values both times
        let varmap = VarMap::new();
        let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
        let (hidden, out) = (nn::linear(8, 32, vb.pp("hidden"))?, nn::linear(32, 2, vb.pp("out"))?);
        let model = nn::seq().add(hidden).add(Activation::Relu).add(out);

        // What ran in which dtype: one row for each operator of this crate.
        let (loss, trace) = amp.trace(|| ops::cross_entropy(&model.forward(&x)?, &y));
        print!("{trace}");
        println!("loss before: {:.4}", loss?.to_scalar::<f32>()?);

        let config = SgdConfig { lr: 0.2, ..Default::default() };
        let mut sgd = Sgd::new(Parameters::from_varmap(&varmap), config)?;
        let mut scaler = GradScaler::disabled(); // BF16 has the range of F32: nothing to scale
        for _ in 0..100 {
            let loss = amp.scope(|| ops::cross_entropy(&model.forward(&x)?, &y))?;
            scaler.scale(&loss)?.backward()?;
            let _ = scaler.step(&mut sgd)?;
            scaler.update()?; // drops the gradients
        }
        let loss = ops::cross_entropy(&model.forward(&x)?, &y)?.to_scalar::<f32>()?;
        println!("loss after 100 steps: {loss:.4}\n");
        assert!(loss < 0.3);
    }
    Ok(())
}
