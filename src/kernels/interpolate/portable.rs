//! Interpolation out of candle's operators, for devices without kernels and as what the tests compare with.
//!
//! It goes one dimension at a time, because a pixel's weight is the product of its row's and its column's. Forward
//! picks pixels by `index_select`; bilinear adds the two neighbours of each position by their weights. Backward is the
//! transpose: `index_add` of each weighted gradient to these pixels. The host makes the indices and weights.
//!
//! Arithmetic is F32 (F64 for F64), and results are rounded once; nearest forward only copies. Bilinear leaves out a
//! dimension that keeps its size: an infinity times a weight of 0 would be NaN.

use candle_core::{DType, Result, Tensor};

use super::sampling_grid::{Between, Dims4, SamplingGrid};
use crate::kernels::elementwise::portable::upcast;

/// A neighbour of a place: which one, and its weight.
type Neighbour = (fn(&Between) -> usize, fn(&Between) -> f64);
const NEIGHBOURS: [Neighbour; 2] = [(|b| b.low, |b| 1.0 - b.weight), (|b| b.high, |b| b.weight)];

pub(super) fn forward(x: &Tensor, grid: &SamplingGrid) -> Result<Tensor> {
    match grid {
        SamplingGrid::Nearest { rows, columns, .. } => {
            x.index_select(&index(rows, x)?, 2)?.index_select(&index(columns, x)?, 3)
        }
        SamplingGrid::Linear { rows, columns, .. } => {
            let across = blend(&upcast(x)?, columns, 3)?;
            blend(&across, rows, 2)?.to_dtype(x.dtype())
        }
    }
}

pub(super) fn backward(
    grad: &Tensor,
    (_, _, h, w): Dims4,
    grid: &SamplingGrid,
    out: DType,
) -> Result<Tensor> {
    let grad = upcast(grad)?;
    let dx = match grid {
        SamplingGrid::Nearest { rows, columns, .. } => {
            let (rows, columns) = (index(rows, &grad)?, index(columns, &grad)?);
            let tall = resized(&grad, 3, w)?.index_add(&columns, &grad, 3)?;
            resized(&tall, 2, h)?.index_add(&rows, &tall, 2)?
        }
        SamplingGrid::Linear { rows, columns, .. } => {
            spread(&spread(&grad, columns, 3, w)?, rows, 2, h)?
        }
    };
    dx.to_dtype(out)
}

/// The averages of neighbours in one dimension.
fn blend(x: &Tensor, places: &[Between], dim: usize) -> Result<Tensor> {
    if x.dim(dim)? == places.len() {
        return Ok(x.clone());
    }
    let part = |(at, count): Neighbour| {
        let picked = x.index_select(&index(&places.iter().map(at).collect::<Vec<_>>(), x)?, dim)?;
        picked.broadcast_mul(&weights(places, count, dim, x)?)
    };
    part(NEIGHBOURS[0])? + part(NEIGHBOURS[1])?
}

/// The gradient of [`blend`], over `size` neighbours.
fn spread(grad: &Tensor, places: &[Between], dim: usize, size: usize) -> Result<Tensor> {
    if size == places.len() {
        return Ok(grad.clone());
    }
    let mut sum = resized(grad, dim, size)?;
    for (at, count) in NEIGHBOURS {
        let index = index(&places.iter().map(at).collect::<Vec<_>>(), grad)?;
        let part = grad.broadcast_mul(&weights(places, count, dim, grad)?)?;
        sum = sum.index_add(&index, &part, dim)?;
    }
    Ok(sum)
}

/// Zeros in the shape of `x`, but for `size` in one dimension.
fn resized(x: &Tensor, dim: usize, size: usize) -> Result<Tensor> {
    let mut dims = x.dims().to_vec();
    dims[dim] = size;
    Tensor::zeros(dims, x.dtype(), x.device())
}

fn index(places: &[usize], like: &Tensor) -> Result<Tensor> {
    let places: Vec<u32> = places.iter().map(|&at| at as u32).collect();
    Tensor::from_slice(&places, places.len(), like.device())
}

fn weights(
    places: &[Between],
    count: fn(&Between) -> f64,
    dim: usize,
    like: &Tensor,
) -> Result<Tensor> {
    let weights: Vec<f64> = places.iter().map(count).collect();
    let mut dims = [1; 4];
    dims[dim] = weights.len();
    Tensor::from_slice(&weights, &dims, like.device())?.to_dtype(like.dtype())
}
