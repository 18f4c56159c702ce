//! The products of tiles: their sizes, the weights that are transformed for them, the loop over blocks of tiles, and sums over
//! tiles.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::weights::Order;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::vector::Vector;
use crate::kernels::gemm::micro::with_words;

/// Output channels of a product.
pub(super) const ROWS: usize = 8;
/// Vectors of tiles of a product, and those tiles.
pub(super) const VECTORS: usize = 3;
pub(super) const TILES: usize = 16 * VECTORS;
/// Products for a tile, channel and output channel.
pub(super) const TILE_ELEMENTS: usize = 16;

/// The weights of a channel and `N` output channels from `first` on; zeros for those beyond the last.
#[inline(always)]
pub(super) fn taps<const N: usize>(
    weight: &[f32],
    (ins, outs): (usize, usize),
    order: Order,
    channel: usize,
    first: usize,
) -> [[f32; N]; 9] {
    let mut g = [[0f32; N]; 9];
    for (row, out) in (first..outs).take(N).enumerate() {
        // The gradient's are turned by half a turn, and channels exchanged.
        let (from, turned) = match order {
            Order::Forward => (out * ins + channel, false),
            Order::Backward => (channel * outs + out, true),
        };
        for (tap, weight) in weight[from * 9..][..9].iter().enumerate() {
            g[if turned { 8 - tap } else { tap }][row] = *weight;
        }
    }
    g
}

/// Calls `convolve` with every `block` of `count`, on all threads, and with scratch of these sizes, until a result is
/// not finite. Whether all are finite.
pub(super) fn for_each_block<const N: usize>(
    count: usize,
    block: usize,
    sizes: [usize; N],
    convolve: impl Fn(Range<usize>, [*mut f32; N]) -> bool + Sync,
) -> bool {
    let finite = AtomicBool::new(true);
    // Enough for all threads to end together, in whole products.
    let task = count.div_ceil(4 * parallel::threads());
    let task = task.next_multiple_of(block).clamp(block, 16 * block);
    parallel::for_each(count.div_ceil(task), |index| {
        let last = count.min((index + 1) * task);
        with_words(sizes, |scratch| {
            let scratch = scratch.map(|words| words.as_mut_ptr().cast());
            for first in (index * task..last).step_by(block) {
                if !finite.load(Ordering::Relaxed) {
                    return;
                }
                if !convolve(first..last.min(first + block), scratch) {
                    finite.store(false, Ordering::Relaxed);
                }
            }
        });
    });
    finite.into_inner()
}

/// Adds a product over `depth` tiles to `(channel, output channel)`: of channels `LEFT` elements apart and tiles as the left
/// matrix comes with, by output channels of whole vectors.
///
/// # Safety
/// The features of `V`; matrices of these sizes, with room for channels in whole [`ROWS`].
#[inline(always)]
pub(super) unsafe fn add_product<V: Vector, const LEFT: usize>(
    (left, left_step): (*const f32, usize),
    right: *const f32,
    (ins, outs): (usize, usize),
    depth: usize,
    products: *mut f32,
) {
    let mut row = 0;
    while row < ins {
        // Sixteen sums at a time, as one waits four cycles for the one before.
        let tall = outs == 16 && row + ROWS < ins;
        let mut column = 0;
        while column < outs {
            let left = (left.wrapping_add(row * LEFT), left_step);
            let right = (right.wrapping_add(column), outs);
            let sums = (products.wrapping_add(row * outs + column), outs);
            let vectors = (outs - column) / 16;
            // SAFETY: rows and vectors are left.
            column += 16
                * unsafe {
                    match vectors {
                        1 if tall => V::multiply::<16, 1, LEFT, true>(left, right, depth, sums),
                        1 => V::multiply::<ROWS, 1, LEFT, true>(left, right, depth, sums),
                        3 => V::multiply::<ROWS, 3, LEFT, true>(left, right, depth, sums),
                        _ => V::multiply::<ROWS, 2, LEFT, true>(left, right, depth, sums),
                    }
                    if vectors % 2 == 1 { vectors } else { 2 }
                };
        }
        row += if tall { 2 * ROWS } else { ROWS };
    }
}
