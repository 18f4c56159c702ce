//! What backward costs beyond the kernels in it: the walk over the graph, and sums, copies and
//! allocations on the way.
//!
//! The kernels have no public name, so those of other operators' forward passes stand for them,
//! called without a graph: the gradient of a product by a constant is that same product, those of a
//! linear layer are two matrix products, and the gradient of ReLU reads two tensors and writes one,
//! as a product does. A ResNet has kernels that nothing public stands for.

use anyhow::Result;
use candle_amp::{GradScaler, no_grad, ops};
use candle_amp_benches::measure::{Runner, seconds};
use candle_amp_benches::{loss_with, normal, tracked};
use candle_core::{DType, Tensor, Var};

/// Times backward alone, from a given gradient of what `forward` returns.
fn backward_of(
    gradient: Tensor,
    forward: impl Fn() -> candle_core::Result<Tensor> + 'static,
) -> Runner {
    let mut scaler = GradScaler::disabled();
    Box::new(move || {
        let loss = loss_with(&[&forward()?], vec![gradient.clone()])?;
        let seconds = seconds(|| Ok(scaler.scale(&loss)?.backward()?))?;
        scaler.zero_grad();
        Ok(seconds)
    })
}

fn normals(count: usize, shape: &[usize]) -> candle_core::Result<Vec<Tensor>> {
    (0..count).map(|_| normal(shape, DType::F32)).collect()
}

pub(crate) fn chain(links: usize, length: usize) -> Result<Runner> {
    let x = tracked(&normal(length, DType::F32)?)?;
    let factors = normals(links, &[length])?;
    Ok(backward_of(normal(length, DType::F32)?, move || {
        factors.iter().try_fold(x.clone(), |x, factor| ops::mul(&x, factor))
    }))
}

pub(crate) fn chain_kernels(links: usize, length: usize) -> Result<Runner> {
    let factors = normals(links, &[length])?;
    let gradient = normal(length, DType::F32)?;
    Ok(Box::new(move || {
        let multiply = |x, factor| ops::mul(&x, factor);
        seconds(|| {
            no_grad(|| factors.iter().try_fold(gradient.clone(), multiply))?;
            Ok(())
        })
    }))
}

/// Without bias: nothing public sums columns.
pub(crate) fn mlp(layers: usize, width: usize, batch: usize) -> Result<Runner> {
    let x = normal((batch, width), DType::F32)?;
    let weights = normals(layers, &[width, width])?;
    let weights = weights.iter().map(|weight| Var::from_tensor(&(weight * 0.05)?));
    let weights = weights.collect::<candle_core::Result<Vec<_>>>()?;
    Ok(backward_of(normal((batch, width), DType::F32)?, move || {
        let layer = |x: Tensor, weight| ops::relu(&ops::linear(&x, weight, None)?);
        weights.iter().map(Var::as_tensor).try_fold(x.clone(), layer)
    }))
}

pub(crate) fn mlp_kernels(layers: usize, width: usize, batch: usize) -> Result<Runner> {
    let inputs = normals(layers, &[batch, width])?;
    let weights = normals(layers, &[width, width])?;
    let gradient = normal((batch, width), DType::F32)?;
    Ok(Box::new(move || {
        let layer = |i: usize| -> candle_core::Result<()> {
            let gradient = ops::mul(&gradient, &inputs[i])?; // of ReLU
            ops::matmul(&gradient.t()?, &inputs[i])?; // of the weight
            if i > 0 {
                ops::matmul(&gradient, &weights[i])?; // of the input, if that is a layer's
            }
            Ok(())
        };
        seconds(|| Ok(no_grad(|| (0..layers).try_for_each(layer))?))
    }))
}
