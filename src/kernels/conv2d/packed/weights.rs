//! Weights, packed once a pass.

use candle_core::{DType, Result, Tensor};
use half::bf16;

use super::layout::Taps;
use crate::kernels::conv2d::shape::Shape;
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
    let (ins, outs) = match order {
        Order::Forward => (shape.group_in(), shape.group_out()),
        Order::Backward => (shape.group_out(), shape.group_in()),
    };
    let kernel = shape.kernel_height * shape.kernel_width;
    let (rows, per_cell) = (unit.rows(), unit.per_cell());
    let cells = ins.div_ceil(per_cell);
    let segment = cells * taps.columns.len();
    let sum = segment * taps.rows.len();
    let blocks = outs.div_ceil(rows);
    let mut packed = Cells::new(shape.geometry.groups * blocks * rows * sum);
    let places = packed.as_mut_slice();
    for group in 0..shape.geometry.groups {
        for row in 0..outs {
            let block = ((group * blocks) + row / rows) * rows * sum;
            for (s, &(_, tap_row)) in taps.rows.iter().enumerate() {
                for (c, &(_, tap_column)) in taps.columns.iter().enumerate() {
                    let tap = tap_row * shape.kernel_width + tap_column;
                    let element = |channel: usize| {
                        let (out, input) = match order {
                            Order::Forward => (row, channel),
                            Order::Backward => (channel, row),
                        };
                        let out = group * shape.group_out() + out;
                        weight[(out * shape.group_in() + input) * kernel + tap]
                    };
                    for cell in 0..cells {
                        let place = s * segment + c * cells + cell;
                        let place = match unit {
                            Unit::Tiles => row % rows * sum + place,
                            _ => place * rows + row % rows,
                        };
                        places[block + place] = match unit.pairs() {
                            false => element(cell).to_bits(),
                            true => {
                                let half = |channel| match channel < ins {
                                    true => bf16::from_f32(element(channel)).to_bits(),
                                    false => 0,
                                };
                                u32::from(half(2 * cell + 1)) << 16 | u32::from(half(2 * cell))
                            }
                        };
                    }
                }
            }
        }
    }
    packed
}
