//! Pooling out of candle's operators, on devices that this crate has no kernels for.
//!
//! candle's own pooling has neither padding nor the indices that backward needs. Here a window is taken apart into its
//! taps. For each tap, `index_select` gathers the pixel that it meets in every window, and an element-wise maximum or
//! sum joins that with the taps before. Backward scatters: `scatter_add` to the maxima, `index_add` for each tap of an
//! average. Index lists come from the host, and each tap is several launches and passes over tensors as large as the
//! result. That is slow, but works wherever candle does.
//!
//! Planes are NCHW; callers move NHWC there and back. Arithmetic is F32 (F64 for F64), and results are rounded once.
//! Padding is masked: minus infinity for a maximum, zero for an average. NaN wins over every maximum, as in PyTorch.

use candle_core::{DType, Result, Tensor};

use super::window::{Dims4, Window};
use crate::error::bail;
use crate::kernels::elementwise::portable::upcast;

pub(super) fn max_forward(x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
    let (_, _, h, w) = x.dims4()?;
    let planes = upcast(x)?.flatten_from(2)?;
    let lowest = Tensor::new(f64::NEG_INFINITY, x.device())?.to_dtype(planes.dtype())?;
    let mut best: Option<(Tensor, Tensor)> = None;
    for tap in Tap::all((h, w), window) {
        let index = tap.index(x)?;
        let value = planes.index_select(&index, 2)?;
        let lowest = lowest.broadcast_as(value.shape())?;
        let value = tap.inside(x)?.broadcast_as(value.shape())?.where_cond(&value, &lowest)?;
        let index = index.broadcast_as(value.shape())?;
        best = Some(match best {
            None => {
                // Padding may come first, but the first index must lie inside.
                let first = Tensor::from_vec(first((h, w), window), value.dim(2)?, x.device())?;
                let first = first.broadcast_as(value.shape())?.contiguous()?;
                (value, first)
            }
            Some((top, at)) => {
                let wins = value.gt(&top)?.broadcast_maximum(&value.ne(&value)?)?; // only NaN differs from itself
                (wins.where_cond(&value, &top)?, wins.where_cond(&index, &at)?)
            }
        });
    }
    let Some((y, index)) = best else { bail!("a window of no elements") };
    let (n, c, _, _) = x.dims4()?;
    let (oh, ow) = window.out_size((h, w));
    Ok((y.to_dtype(x.dtype())?.reshape((n, c, oh, ow))?, index.reshape((n, c, oh, ow))?))
}

pub(super) fn max_backward(
    grad: &Tensor,
    index: &Tensor,
    (n, c, h, w): Dims4,
    out: DType,
) -> Result<Tensor> {
    let grad = upcast(grad)?.flatten_from(2)?;
    let dx = Tensor::zeros((n, c, h * w), grad.dtype(), grad.device())?;
    let dx = dx.scatter_add(&index.flatten_from(2)?, &grad, 2)?;
    dx.reshape((n, c, h, w))?.to_dtype(out)
}

pub(super) fn avg_forward(x: &Tensor, window: Window) -> Result<Tensor> {
    let (n, c, h, w) = x.dims4()?;
    let planes = upcast(x)?.flatten_from(2)?;
    let (oh, ow) = window.out_size((h, w));
    let mut sum = Tensor::zeros((n, c, oh * ow), planes.dtype(), x.device())?;
    for tap in Tap::all((h, w), window) {
        let value = planes.index_select(&tap.index(x)?, 2)?;
        let inside = tap.inside(x)?.broadcast_as(sum.shape())?;
        sum = (inside.where_cond(&value, &value.zeros_like()?)? + sum)?;
    }
    (sum / window.area() as f64)?.to_dtype(x.dtype())?.reshape((n, c, oh, ow))
}

pub(super) fn avg_backward(
    grad: &Tensor,
    (n, c, h, w): Dims4,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    let share = (upcast(grad)?.flatten_from(2)? / window.area() as f64)?;
    let mut dx = Tensor::zeros((n, c, h * w), share.dtype(), grad.device())?;
    for tap in Tap::all((h, w), window) {
        let inside = tap.inside(grad)?.broadcast_as(share.shape())?;
        let inside = inside.where_cond(&share, &share.zeros_like()?)?;
        dx = dx.index_add(&tap.index(grad)?, &inside, 2)?;
    }
    dx.reshape((n, c, h, w))?.to_dtype(out)
}

pub(super) fn global_avg_forward(x: &Tensor) -> Result<Tensor> {
    upcast(x)?.flatten_from(2)?.mean(2)?.to_dtype(x.dtype())
}

pub(super) fn global_avg_backward(
    grad: &Tensor,
    (n, c, h, w): Dims4,
    out: DType,
) -> Result<Tensor> {
    let share = (upcast(grad)? / (h * w) as f64)?.to_dtype(out)?;
    share.reshape((n, c, 1, 1))?.broadcast_as((n, c, h, w))?.contiguous()
}

/// One element of the kernel: where it falls in every window.
struct Tap {
    /// Positions in the plane; those in the padding are moved to its edge.
    index: Vec<u32>,
    inside: Vec<u8>,
}

impl Tap {
    fn all((h, w): (usize, usize), window: Window) -> impl Iterator<Item = Tap> {
        let (oh, ow) = window.out_size((h, w));
        (0..window.area()).map(move |tap| {
            let (ky, kx) = (tap / window.kernel.1, tap % window.kernel.1);
            let (mut index, mut inside) = (Vec::new(), Vec::new());
            for oy in 0..oh {
                let (y, y_inside) = position(oy * window.stride.0 + ky, window.padding.0, h);
                for ox in 0..ow {
                    let (x, x_inside) = position(ox * window.stride.1 + kx, window.padding.1, w);
                    index.push((y * w + x) as u32);
                    inside.push(u8::from(y_inside && x_inside));
                }
            }
            Tap { index, inside }
        })
    }

    fn index(&self, like: &Tensor) -> Result<Tensor> {
        Tensor::from_slice(&self.index, self.index.len(), like.device())
    }

    fn inside(&self, like: &Tensor) -> Result<Tensor> {
        Tensor::from_slice(&self.inside, self.inside.len(), like.device())
    }
}

/// A padded position as one of `0..size`, and whether it was.
fn position(padded: usize, padding: usize, size: usize) -> (usize, bool) {
    let inside = (padding..padding + size).contains(&padded);
    (padded.saturating_sub(padding).min(size - 1), inside)
}

/// The first position of every window.
fn first((h, w): (usize, usize), window: Window) -> Vec<u32> {
    let (oh, ow) = window.out_size((h, w));
    let y = |o: usize| (o * window.stride.0).saturating_sub(window.padding.0);
    let x = |o: usize| (o * window.stride.1).saturating_sub(window.padding.1);
    (0..oh * ow).map(|o| (y(o / ow) * w + x(o % ow)) as u32).collect()
}
