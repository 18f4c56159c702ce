//! Weights, packed once a pass.

use candle_core::{DType, Result, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::layout::Taps;
use crate::kernels::conv2d::shape::Shape;
use crate::kernels::elementwise::lane::Lane;
use crate::kernels::panel::{Cells, Unit};

/// Which channels are summed over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// The input's.
    Forward,
    /// The output's: for the gradient by the input.
    Backward,
}

/// A small tensor's elements in F32.
pub(super) fn widened(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.detach().flatten_all()?.to_dtype(DType::F32)?.to_vec1()
}

/// `(group, block of rows, …)` as [`Panel`](crate::kernels::panel::Panel) reads the left matrix: a row
/// a channel that is not summed over, a segment a kernel row, a cell `(kernel column, channel)`.
pub(super) fn pack(weight: &[f32], shape: &Shape, taps: &Taps, order: Order, unit: Unit) -> Cells {
    arrange(weight, shape, taps, order, unit.pairs(), (unit.rows(), unit == Unit::Tiles))
}

/// The same as the right matrix: `(group, channel / 16, kernel row, kernel column, cell, channel % 16)`.
pub(super) fn pack_blocks(
    weight: &[f32],
    shape: &Shape,
    taps: &Taps,
    order: Order,
    unit: Unit,
) -> Cells {
    arrange(weight, shape, taps, order, unit.pairs(), (16, false))
}

/// In blocks of `rows` channels, each by itself where `lines`, else side by side.
fn arrange(
    weight: &[f32],
    shape: &Shape,
    taps: &Taps,
    order: Order,
    pairs: bool,
    (rows, lines): (usize, bool),
) -> Cells {
    let (ins, outs) = match order {
        Order::Forward => (shape.group_in(), shape.group_out()),
        Order::Backward => (shape.group_out(), shape.group_in()),
    };
    let kernel = shape.kernel_height * shape.kernel_width;
    let cells = if pairs { ins.div_ceil(2) } else { ins };
    let segment = cells * taps.columns.len();
    let sum = segment * taps.rows.len();
    let blocks = outs.div_ceil(rows);
    let mut packed = Cells::new(shape.geometry.groups * blocks * rows * sum);
    let chunks = packed.as_mut_slice()[..shape.geometry.groups * blocks * rows * sum]
        .par_chunks_mut((rows * sum).max(1));
    chunks.enumerate().for_each(|(block, places)| {
        let (group, first) = (block / blocks, block % blocks * rows);
        for row in 0..rows.min(outs - first) {
            let element = |tap: usize, channel: usize| {
                let (out, input) = match order {
                    Order::Forward => (first + row, channel),
                    Order::Backward => (channel, first + row),
                };
                let out = group * shape.group_out() + out;
                weight[(out * shape.group_in() + input) * kernel + tap]
            };
            let half = |tap, channel| match channel < ins {
                true => u32::from(bf16::lower(element(tap, channel)).to_bits()),
                false => 0,
            };
            let taps = taps.rows.iter().flat_map(|&(_, tap)| {
                taps.columns.iter().map(move |&(_, column)| tap * shape.kernel_width + column)
            });
            for (index, tap) in taps.enumerate() {
                for cell in 0..cells {
                    let place = index * cells + cell;
                    let place = if lines { row * sum + place } else { place * rows + row };
                    places[place] = match pairs {
                        false => element(tap, cell).to_bits(),
                        true => half(tap, 2 * cell + 1) << 16 | half(tap, 2 * cell),
                    };
                }
            }
        }
    });
    packed
}
