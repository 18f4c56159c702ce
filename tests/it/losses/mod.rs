//! Losses with PyTorch's settings, against candle's operators and autograd in F64, and PyTorch's numbers.

mod class;
mod embedding;
mod pair;

use candle_amp::GradScaler;
use candle_amp::nn::Reduction;
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::util::{assert_absolute, random};

const REDUCTIONS: [Reduction; 3] = [Reduction::Mean, Reduction::Sum, Reduction::None];

fn double(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(DType::F64)
}

/// The gradient of the sum of `loss`, each element times a factor of its own, by the crate.
fn gradient(loss: &Tensor, of: &Var) -> candle_amp::Result<Tensor> {
    let mut scaler = GradScaler::disabled();
    scaler.scale(&weighted(loss)?)?.retain_graph().backward()?;
    Ok(scaler.grad(of)?.expect("a gradient"))
}

fn weighted(loss: &Tensor) -> Result<Tensor> {
    let factors = random(99, loss.shape(), loss.dtype());
    (loss * factors)?.sum_all()
}

/// Of PyTorch's numbers, in F64.
fn near(what: &str, got: &Tensor, expected: &[f64]) {
    let expected = Tensor::new(expected, &Device::Cpu).unwrap();
    assert_absolute(what, &got.flatten_all().unwrap(), &expected, 1e-9);
}
