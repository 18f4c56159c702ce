//! Resampling of the last two dimensions of `(n, c, h, w)`: nearest pixel, or bilinear.
//!
//! Forward results have `x`'s dtype. Gradients have the dtype asked for; where several output
//! pixels are made of one input pixel, they accumulate in F32 (F64 for F64), in one order.

mod cpu;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::elementwise::plain;

/// Which input pixels an output pixel is made of, row by row and column by column.
#[derive(Clone, Debug)]
pub(crate) enum Grid {
    /// The pixel at that row and column.
    Nearest { rows: Vec<usize>, columns: Vec<usize> },
    /// The average of four pixels.
    Linear { rows: Vec<Between>, columns: Vec<Between> },
}

/// A place between two rows or columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Between {
    low: usize,
    high: usize,
    /// How much `high` counts; `low` counts the rest.
    weight: f64,
}

impl Grid {
    /// From `(height, width)` to `(height, width)`, as candle and PyTorch place the pixels.
    pub(crate) fn nearest(from: (usize, usize), to: (usize, usize)) -> Self {
        let axis = |from: usize, to: usize| {
            let scale = from as f64 / to as f64;
            (0..to).map(|i| ((i as f64 * scale) as usize).min(from - 1)).collect()
        };
        Self::Nearest { rows: axis(from.0, to.0), columns: axis(from.1, to.1) }
    }

    /// As [`nearest`](Self::nearest); `scales`, vertical and horizontal, where the output's size
    /// was made of them by rounding.
    pub(crate) fn linear(
        from: (usize, usize),
        to: (usize, usize),
        align_corners: bool,
        scales: Option<(f64, f64)>,
    ) -> Self {
        let axis = |from: usize, to: usize, scale: Option<f64>| {
            let step = match scale {
                _ if align_corners && to == 1 => 0.0,
                _ if align_corners => (from - 1) as f64 / (to - 1) as f64,
                Some(scale) => 1.0 / scale,
                None => from as f64 / to as f64,
            };
            let place = |i: usize| {
                let centre = if align_corners { 0.0 } else { 0.5 };
                let place = ((i as f64 + centre) * step - centre).max(0.0);
                let low = (place as usize).min(from - 1);
                let weight = (place - low as f64).clamp(0.0, 1.0);
                Between { low, high: (low + 1).min(from - 1), weight }
            };
            (0..to).map(place).collect()
        };
        let (vertical, horizontal) = scales.unzip();
        Self::Linear { rows: axis(from.0, to.0, vertical), columns: axis(from.1, to.1, horizontal) }
    }

    /// Height and width of the output.
    fn size(&self) -> (usize, usize) {
        match self {
            Self::Nearest { rows, columns } => (rows.len(), columns.len()),
            Self::Linear { rows, columns } => (rows.len(), columns.len()),
        }
    }
}

/// `x` at the places of `grid`.
pub(crate) fn forward(x: &Tensor, grid: &Grid) -> Result<Tensor> {
    let x = plain(x)?;
    if x.device().is_cpu() { cpu::forward(&x, grid) } else { portable::forward(&x, grid) }
}

/// The gradient of [`forward`], of dimensions `input_dims`.
pub(crate) fn backward(
    grad: &Tensor,
    input_dims: (usize, usize, usize, usize),
    grid: &Grid,
    out: DType,
) -> Result<Tensor> {
    let grad = plain(grad)?;
    if grad.device().is_cpu() {
        cpu::backward(&grad, input_dims, grid, out)
    } else {
        portable::backward(&grad, input_dims, grid, out)
    }
}
