//! Resampling of the last two dimensions of `(n, c, h, w)`: nearest pixel, or bilinear.
//!
//! Forward results have `x`'s dtype. Gradients have the dtype asked for; where several output
//! pixels are made of one input pixel, they accumulate in F32 (F64 for F64), in one order.

mod cpu;
mod cuda;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// The sizes of an input: `(n, c, h, w)`.
type Dims4 = (usize, usize, usize, usize);

/// Which input pixels an output pixel is made of, row by row and column by column.
#[derive(Clone, Debug)]
pub(crate) enum SamplingGrid {
    /// The pixel at that row and column.
    Nearest { rows: Vec<usize>, columns: Vec<usize>, rule: Rule },
    /// The average of four pixels.
    Linear { rows: Vec<Between>, columns: Vec<Between>, rule: Rule },
}

/// What rows and columns were made by: output pixel `i` is at `(i + centre) * step - centre`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    /// Vertical and horizontal.
    steps: (f64, f64),
    centre: f64,
}

impl Rule {
    fn place(self, i: usize, step: f64) -> f64 {
        ((i as f64 + self.centre) * step - self.centre).max(0.0)
    }
}

/// A place between two rows or columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Between {
    low: usize,
    high: usize,
    /// How much `high` counts; `low` counts the rest.
    weight: f64,
}

impl SamplingGrid {
    /// From `(height, width)` to `(height, width)`, as candle and PyTorch place the pixels.
    pub(crate) fn nearest(from: (usize, usize), to: (usize, usize)) -> Self {
        let steps = (from.0 as f64 / to.0 as f64, from.1 as f64 / to.1 as f64);
        let rule = Rule { steps, centre: 0.0 };
        let axis = |from: usize, to: usize, step: f64| {
            (0..to).map(|i| (rule.place(i, step) as usize).min(from - 1)).collect()
        };
        let (rows, columns) = (axis(from.0, to.0, steps.0), axis(from.1, to.1, steps.1));
        Self::Nearest { rows, columns, rule }
    }

    /// As [`nearest`](Self::nearest); `scales`, vertical and horizontal, where the output's size
    /// was made of them by rounding. An axis that keeps its size is copied, whatever its scale, as in PyTorch's kernels of
    /// the CPU.
    pub(crate) fn linear(
        from: (usize, usize),
        to: (usize, usize),
        align_corners: bool,
        scales: Option<(f64, f64)>,
    ) -> Self {
        let step = |from: usize, to: usize, scale: Option<f64>| match scale {
            _ if from == to => 1.0,
            _ if align_corners && to == 1 => 0.0,
            _ if align_corners => (from - 1) as f64 / (to - 1) as f64,
            Some(scale) => 1.0 / scale,
            None => from as f64 / to as f64,
        };
        let (vertical, horizontal) = scales.unzip();
        let steps = (step(from.0, to.0, vertical), step(from.1, to.1, horizontal));
        let rule = Rule { steps, centre: if align_corners { 0.0 } else { 0.5 } };
        let axis = |from: usize, to: usize, step: f64| {
            let between = |i: usize| {
                if from == to {
                    return Between { low: i, high: i, weight: 0.0 };
                }
                let place = rule.place(i, step);
                let low = (place as usize).min(from - 1);
                let weight = (place - low as f64).clamp(0.0, 1.0);
                Between { low, high: (low + 1).min(from - 1), weight }
            };
            (0..to).map(between).collect()
        };
        let (rows, columns) = (axis(from.0, to.0, steps.0), axis(from.1, to.1, steps.1));
        Self::Linear { rows, columns, rule }
    }

    /// Height and width of the output.
    fn size(&self) -> (usize, usize) {
        match self {
            Self::Nearest { rows, columns, .. } => (rows.len(), columns.len()),
            Self::Linear { rows, columns, .. } => (rows.len(), columns.len()),
        }
    }
}

/// `x` at the places of `grid`.
pub(crate) fn forward(x: &Tensor, grid: &SamplingGrid) -> Result<Tensor> {
    let x = plain(x)?;
    match Gpu::of(x.device()) {
        _ if x.device().is_cpu() => cpu::forward(&x, grid),
        Some(gpu) if x.elem_count() > 0 => cuda::forward(gpu, &x, grid),
        _ => portable::forward(&x, grid),
    }
}

/// The gradient of [`forward`], of dimensions `input_dims`.
pub(crate) fn backward(
    grad: &Tensor,
    input_dims: Dims4,
    grid: &SamplingGrid,
    out: DType,
) -> Result<Tensor> {
    let grad = plain(grad)?;
    match Gpu::of(grad.device()) {
        _ if grad.device().is_cpu() => cpu::backward(&grad, input_dims, grid, out),
        Some(gpu) if grad.elem_count() > 0 => cuda::backward(gpu, &grad, input_dims, grid, out),
        _ => portable::backward(&grad, input_dims, grid, out),
    }
}
