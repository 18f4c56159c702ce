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

/// Cells that are packed before another thread is awake.
pub(super) const SHORT: usize = 1 << 14;

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
    // Of every tap in use, where it is in a kernel, and its first cell.
    let used: Vec<(usize, usize)> = taps
        .rows
        .iter()
        .flat_map(|&(_, row)| {
            taps.columns.iter().map(move |&(_, column)| row * shape.kernel_width + column)
        })
        .enumerate()
        .map(|(index, tap)| (tap, index * cells))
        .collect();
    let (across, down) = if lines { (1, sum) } else { (rows, 1) };
    let pack = |(block, places): (usize, &mut [u32])| {
        let (group, first) = (block / blocks, block % blocks * rows);
        for row in 0..rows.min(outs - first) {
            for channel in 0..ins {
                let (out, input) = match order {
                    Order::Forward => (first + row, channel),
                    Order::Backward => (channel, first + row),
                };
                let out = group * shape.group_out() + out;
                let weights = &weight[(out * shape.group_in() + input) * kernel..][..kernel];
                let cell = if pairs { channel / 2 } else { channel };
                for &(tap, start) in &used {
                    let place = &mut places[(start + cell) * across + row * down];
                    *place = match (pairs, channel % 2) {
                        (false, _) => weights[tap].to_bits(),
                        (true, 0) => u32::from(bf16::lower(weights[tap]).to_bits()),
                        (true, _) => *place | u32::from(bf16::lower(weights[tap]).to_bits()) << 16,
                    };
                }
            }
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
