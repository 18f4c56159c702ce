//! The gradient by the weight: strips of input rows times transposed strips of the output's
//! gradient, summed over positions.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::layout::{Cut, Part, Strips, Taps};
use super::rows::Stored;
use super::{Shape, Source, with_stored};
use crate::kernels::element::{Elements, tensor};
use crate::kernels::panel::{Panel, Unit, transpose, with_cells};

/// Runs of images whose sums are kept apart, then added in order: enough for the threads of most
/// processors, and few enough that the sums stay small beside the images.
const RUNS: usize = 16;

/// See [`super::super::weight_gradient`]; contiguous operands, no F64; in F32.
pub(in crate::kernels::conv2d) fn weight_gradient(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    unit: Unit,
) -> Result<Tensor> {
    let taps = Taps::forward(shape);
    let run = shape.batch.div_ceil(RUNS).max(1);
    let sums: Vec<Vec<f32>> = with_stored!(x, x => with_stored!(grad, grad => {
        let (x, grad): (&[_], &[_]) = (&x, &grad);
        let runs = (0..shape.batch.div_ceil(run)).into_par_iter();
        runs.map(|i| {
            let images = i * run..shape.batch.min((i + 1) * run);
            Correlation { shape, taps: &taps, unit }.run(x, grad, images)
        })
        .collect()
    }));
    let mut total = vec![0f32; shape.c_out * shape.taps()];
    let (height, width) = (shape.kernel_height, shape.kernel_width);
    let (ins, outs) = (shape.group_in(), shape.group_out());
    for sum in &sums {
        // `(group, kernel row, kernel column, channel, output channel)`
        for (line, sums) in sum.chunks_exact(outs).enumerate() {
            let (channel, tap, group) =
                (line % ins, line / ins % (height * width), line / ins / (height * width));
            let start = group * outs * shape.taps() + channel * height * width + tap;
            for (out, sum) in sums.iter().enumerate() {
                total[start + out * shape.taps()] += sum;
            }
        }
    }
    Ok(tensor(total, &shape.weight_dims()))
}

struct Correlation<'a> {
    shape: &'a Shape,
    taps: &'a Taps,
    unit: Unit,
}

impl Correlation<'_> {
    /// The sum over some images.
    fn run<S: Stored + 'static, G: Stored + 'static>(
        &self,
        x: &[S],
        grad: &[G],
        images: Range<usize>,
    ) -> Vec<f32> {
        let shape = self.shape;
        let mut sums = vec![0f32; shape.c_out * shape.taps()];
        let cells = (shape.group_in() * shape.kernel_width * shape.geometry.stride
            + shape.group_out())
        .div_ceil(self.unit.per_cell());
        let cut = Cut::new(self.taps.grid, images.len(), cells);
        for first in images.clone().step_by(cut.images) {
            let count = cut.images.min(images.end - first);
            let x = &x[first * shape.image()..][..count * shape.image()];
            let grad = &grad[first * shape.out_image()..][..count * shape.out_image()];
            for part in cut.parts(self.taps.grid, count) {
                for (group, sums) in
                    sums.chunks_exact_mut(shape.group_out() * shape.taps()).enumerate()
                {
                    self.part(x, grad, &part, group, sums);
                }
            }
        }
        sums
    }

    fn part<S: Stored + 'static, G: Stored + 'static>(
        &self,
        x: &[S],
        grad: &[G],
        part: &Part,
        group: usize,
        sums: &mut [f32],
    ) {
        let (shape, unit) = (self.shape, self.unit);
        let (ins, outs) = (shape.group_in(), shape.group_out());
        let per_cell = unit.per_cell();
        // A kernel row starts at a cell, and for tile registers on a cache line if it can.
        let multiple = if unit == Unit::Tiles { 32 } else { per_cell };
        let of_x = Strips::long(self.taps, part, multiple);
        let of_grad = Strips::long(&Taps::identity(self.taps.grid), part, multiple);
        let x = Source {
            x,
            size: (shape.height, shape.width),
            channels: group * ins..(group + 1) * ins,
            image: shape.image(),
        };
        let grad = Source {
            x: grad,
            size: (shape.out_height, shape.out_width),
            channels: group * outs..(group + 1) * outs,
            image: shape.out_image(),
        };
        let rows = shape.kernel_width * ins;
        let depth = (part.rows.len() * of_grad.line).div_ceil(per_cell);
        let (x_step, grad_step) = (of_x.strip / per_cell, of_grad.strip / per_cell);
        let columns = depth.next_multiple_of(16);
        let (x_rows, grad_rows) = (rows.next_multiple_of(16), outs.next_multiple_of(16));
        let sizes = [x_rows * x_step + 16, grad_rows * grad_step + 16, grad_rows * columns];
        with_cells(sizes, |[left, straight, right]| {
            x.copy(self.taps, part, &of_x, unit.pairs(), left);
            grad.copy(&Taps::identity(self.taps.grid), part, &of_grad, unit.pairs(), straight);
            transpose(straight, outs, grad_step, depth, right);
            for (row, start) in of_x.starts.iter().enumerate() {
                let sums = &mut sums[row * rows * outs..];
                let panel = Panel {
                    left: &left[start / per_cell..],
                    left_block: unit.rows() * x_step,
                    left_row: x_step,
                    left_step: 1,
                    left_segment: 0,
                    right,
                    right_block: 16 * columns,
                    right_step: 16,
                    right_starts: &[0],
                    rows,
                    columns: outs,
                    depth,
                };
                panel.multiply(unit, |tile| {
                    for (i, line) in tile.sums.iter().enumerate().take(tile.rows) {
                        let start = (tile.row + i) * outs + tile.column;
                        let places = &mut sums[start..start + tile.columns];
                        places.iter_mut().zip(line).for_each(|(place, sum)| *place += sum);
                    }
                });
            }
        });
    }
}
