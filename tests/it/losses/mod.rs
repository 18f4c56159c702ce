//! Losses with PyTorch's settings, against candle's operators and autograd in F64, and PyTorch's numbers.

mod class;

use candle_amp::GradScaler;
use candle_amp::nn::Reduction;
use candle_core::{DType, Result, Tensor, Var};

use crate::util::random;

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
