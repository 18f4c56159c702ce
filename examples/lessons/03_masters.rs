//! Lesson 3, masters: a small update of a 16-bit variable is lost. An F32 copy of the variable, its master, collects them.

use candle_amp::nn::{self, Module, VarMap};
use candle_amp::{MasterWeights, Parameters, ops, random};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Optimizer, SGD};

/// A layer of BF16 variables, and what it should return.
fn start(x: &Tensor) -> candle_core::Result<(nn::Linear, Vec<Var>, Tensor)> {
    random::manual_seed(1);
    let varmap = VarMap::new();
    let layer = nn::linear(8, 8, nn::var_builder(&varmap, DType::BF16, &Device::Cpu))?;
    let y = (layer.forward(x)?.detach().to_dtype(DType::F32)? + 0.01)?; // the bias is too small
    Ok((layer, Parameters::from_varmap(&varmap).vars(), y))
}

pub(crate) fn main() -> candle_amp::Result<()> {
    let x = random::randn(0.0, 1.0, (64, 8), DType::F32, &Device::Cpu)?.to_dtype(DType::BF16)?;
    let loss = |layer: &nn::Linear, y| ops::mse(&layer.forward(&x)?.to_dtype(DType::F32)?, y);
    let (plain, vars, y) = start(&x)?;
    let mut sgd = SGD::new(vars, 0.02)?;
    println!("before:  loss {:.1e}", loss(&plain, &y)?.to_scalar::<f32>()?);
    for _ in 0..500 {
        sgd.backward_step(&loss(&plain, &y)?)?; // rounds the variable to BF16
    }
    let without = loss(&plain, &y)?.to_scalar::<f32>()?;
    println!("without: loss {without:.1e}");

    let (trained, vars, y) = start(&x)?;
    let mut sgd = MasterWeights::<SGD>::new(vars, 0.02)?;
    for _ in 0..500 {
        sgd.backward_step(&loss(&trained, &y)?)?; // rounds a copy of the master to BF16
    }
    let with = loss(&trained, &y)?.to_scalar::<f32>()?;
    println!("with:    loss {with:.1e}");
    assert!(with < 0.5 * without);
    Ok(())
}
