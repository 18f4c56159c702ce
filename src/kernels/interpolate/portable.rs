use candle_core::{DType, Result, Tensor};

use super::{Between, Grid};
use crate::kernels::elementwise::portable::upcast;

/// The two sides of a place: which neighbour, and what it counts.
type Side = (fn(&Between) -> usize, fn(&Between) -> f64);
const SIDES: [Side; 2] = [(|b| b.low, |b| 1.0 - b.weight), (|b| b.high, |b| b.weight)];

pub(super) fn forward(x: &Tensor, grid: &Grid) -> Result<Tensor> {
    match grid {
        Grid::Nearest { rows, columns, .. } => {
            x.index_select(&index(rows, x)?, 2)?.index_select(&index(columns, x)?, 3)
        }
        Grid::Linear { rows, columns, .. } => {
            let across = blend(&upcast(x)?, columns, 3)?;
            blend(&across, rows, 2)?.to_dtype(x.dtype())
        }
    }
}

pub(super) fn backward(
    grad: &Tensor,
    (_, _, h, w): (usize, usize, usize, usize),
    grid: &Grid,
    out: DType,
) -> Result<Tensor> {
    let grad = upcast(grad)?;
    let dx = match grid {
        Grid::Nearest { rows, columns, .. } => {
            let (rows, columns) = (index(rows, &grad)?, index(columns, &grad)?);
            let tall = resized(&grad, 3, w)?.index_add(&columns, &grad, 3)?;
            resized(&tall, 2, h)?.index_add(&rows, &tall, 2)?
        }
        Grid::Linear { rows, columns, .. } => spread(&spread(&grad, columns, 3, w)?, rows, 2, h)?,
    };
    dx.to_dtype(out)
}

/// The averages of neighbours in one dimension.
fn blend(x: &Tensor, places: &[Between], dim: usize) -> Result<Tensor> {
    if x.dim(dim)? == places.len() {
        return Ok(x.clone());
    }
    let part = |(at, count): Side| {
        let picked = x.index_select(&index(&places.iter().map(at).collect::<Vec<_>>(), x)?, dim)?;
        picked.broadcast_mul(&weights(places, count, dim, x)?)
    };
    part(SIDES[0])? + part(SIDES[1])?
}

/// The gradient of [`blend`], over `size` neighbours.
fn spread(grad: &Tensor, places: &[Between], dim: usize, size: usize) -> Result<Tensor> {
    if size == places.len() {
        return Ok(grad.clone());
    }
    let mut sum = resized(grad, dim, size)?;
    for (at, count) in SIDES {
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
