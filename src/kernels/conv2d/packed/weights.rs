//! Weights, packed once a pass.

use candle_core::{DType, Result, Tensor};
use half::bf16;
use rayon::prelude::*;

use super::layout::Taps;
use crate::kernels::conv2d::shape::Shape;
use crate::kernels::elementwise::lane::Lane;
use crate::kernels::panel::{Cells, Unit, first_plane, planed, split_one};

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
    arrange(weight, shape, taps, order, unit, (unit.rows(), unit.tiles()))
}

/// The same as the right matrix: `(group, channel / 16, kernel row, kernel column, cell, channel % 16)`,
/// a column's cells in whole registers where they have planes.
pub(super) fn pack_blocks(
    weight: &[f32],
    shape: &Shape,
    taps: &Taps,
    order: Order,
    unit: Unit,
) -> Cells {
    arrange(weight, shape, taps, order, unit, (16, false))
}

/// Cells that are packed before another thread is awake.
pub(super) const SHORT: usize = 1 << 14;

/// In blocks of `rows` channels, each by itself where `lines`, else side by side.
fn arrange(
    weight: &[f32],
    shape: &Shape,
    taps: &Taps,
    order: Order,
    unit: Unit,
    (rows, lines): (usize, bool),
) -> Cells {
    let (pairs, planes) = (unit.pairs(), unit.planes());
    let (ins, outs) = match order {
        Order::Forward => (shape.group_in(), shape.group_out()),
        Order::Backward => (shape.group_out(), shape.group_in()),
    };
    let kernel = shape.kernel_height * shape.kernel_width;
    let cells = if pairs { ins.div_ceil(2) } else { ins };
    let column = planed(cells, planes);
    let segment = column * taps.columns.len();
    let sum = segment * taps.rows.len();
    let blocks = outs.div_ceil(rows);
    let mut packed = Cells::new(shape.geometry.groups * blocks * rows * sum);
    // Of every tap in use, where it is in a kernel, and its first cell.
    let used: Vec<(usize, usize)> = taps
        .rows
        .iter()
        .flat_map(|&(_, row)| {
            taps.columns.iter().map(move |&(_, column)| row * shape.kernel_width + column)
        })
        .enumerate()
        .map(|(index, tap)| (tap, index * column))
        .collect();
    let (across, down) = if lines { (1, sum) } else { (rows, 1) };
    let pack = |(block, places): (usize, &mut [u32])| {
        let (group, first) = (block / blocks, block % blocks * rows);
        let kernel_of = |row: usize, channel: usize| {
            let (out, input) = match order {
                Order::Forward => (first + row, channel),
                Order::Backward => (channel, first + row),
            };
            let out = group * shape.group_out() + out;
            &weight[(out * shape.group_in() + input) * kernel..][..kernel]
        };
        let half = |weight: f32| u32::from(bf16::lower(weight).to_bits());
        let mut write = |row: usize, cell: usize| {
            let low = kernel_of(row, if pairs { 2 * cell } else { cell });
            let high = (pairs && 2 * cell + 1 < ins).then(|| kernel_of(row, 2 * cell + 1));
            for &(tap, start) in &used {
                let at = start + first_plane(cell, planes);
                let high = high.map_or(0.0, |high| high[tap]);
                if planes > 1 {
                    let both = split_one(low[tap]).into_iter().zip(split_one(high));
                    for (plane, (low, high)) in both.enumerate() {
                        places[(at + 16 * plane) * across + row * down] = low >> 16 | high;
                    }
                    continue;
                }
                places[at * across + row * down] = match pairs {
                    false => low[tap].to_bits(),
                    true => half(low[tap]) | half(high) << 16,
                };
            }
        };
        // Neighbours in memory one after the other.
        let count = rows.min(outs - first);
        match lines {
            true => (0..count).for_each(|row| (0..cells).for_each(|cell| write(row, cell))),
            false => (0..cells).for_each(|cell| (0..count).for_each(|row| write(row, cell))),
        }
    };
    let (places, block) = (shape.geometry.groups * blocks * rows * sum, (rows * sum).max(1));
    let places = &mut packed.as_mut_slice()[..places];
    match places.len() > SHORT {
        true => places.par_chunks_mut(block).enumerate().for_each(pack),
        false => places.chunks_mut(block).enumerate().for_each(pack),
    }
    packed
}
