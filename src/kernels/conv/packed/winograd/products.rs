//! The products of tiles: their sizes, the weights that are transformed for them, the loop over blocks of tiles, and sums over
//! tiles.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::weights::Order;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::prefetch::prefetch_at;
use crate::kernels::cpu::vector::{Vector, first_lanes};
use crate::kernels::gemm::micro::with_words;

/// Output channels of a product.
pub(super) const ROWS: usize = 8;
/// Vectors of columns of a product.
pub(super) const VECTORS: usize = 3;

/// The kernels of a channel and sixteen output channels from `first` on, a lane each, tap by tap: of `taps` taps, at most
/// sixteen; zeros for output channels beyond the last.
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn taps<V: Vector>(
    weight: &[f32],
    taps: usize,
    (ins, outs): (usize, usize),
    order: Order,
    channel: usize,
    first: usize,
) -> [V; 16] {
    if order == Order::Backward {
        // A channel's kernels lie together, but far from the next one's.
        let ahead = ((channel + 2) * outs + first) * taps;
        prefetch_at(weight.as_ptr().wrapping_add(ahead), 16 * taps);
    }
    // SAFETY: the features.
    let mut kernels = unsafe { [V::zero(); 16] };
    for (kernel, out) in kernels.iter_mut().zip(first..outs) {
        let from = match order {
            Order::Forward => out * ins + channel,
            Order::Backward => channel * outs + out,
        };
        let taps = &weight[from * taps..][..taps];
        // SAFETY: the features, and so many elements.
        *kernel = unsafe { V::load_masked(taps.as_ptr(), first_lanes(taps.len())) };
    }
    // SAFETY: the features.
    unsafe { V::transpose(kernels) }
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

/// Adds a product over `depth` tiles to `(channel, output channel)`: of tiles as far apart as the left matrix comes with, by
/// output channels of whole vectors.
///
/// # Safety
/// The features of `V`; matrices of these sizes, with room for channels in whole [`ROWS`].
#[inline(always)]
pub(super) unsafe fn add_product<V: Vector>(
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
            let left = (left.wrapping_add(row), left_step);
            let right = (right.wrapping_add(column), outs);
            let sums = (products.wrapping_add(row * outs + column), outs);
            let vectors = (outs - column) / 16;
            // SAFETY: rows and vectors are left.
            column += 16
                * unsafe {
                    match vectors {
                        1 if tall => V::multiply::<16, 1, 1, true>(left, right, depth, sums),
                        1 => V::multiply::<ROWS, 1, 1, true>(left, right, depth, sums),
                        3 => V::multiply::<ROWS, 3, 1, true>(left, right, depth, sums),
                        _ => V::multiply::<ROWS, 2, 1, true>(left, right, depth, sums),
                    }
                    // As many as were multiplied: five are two and three.
                    if matches!(vectors, 1 | 3) { vectors } else { 2 }
                };
        }
        row += if tall { 2 * ROWS } else { ROWS };
    }
}
