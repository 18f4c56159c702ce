//! Splits F32 and F16 into BF16 terms, for AMX: Henry, Tang and Heinecke, arXiv:1904.06376.
//!
//! The first term is the nearest BF16, the next the nearest to the remainder, the third what is left. The subtractions
//! between are exact in F32. Three terms of 8 bits hold the 24 bits of an F32; the 11 bits of an F16 take two.
//!
//! Splitting is part of packing. A tile of 16 lines by 32 elements is loaded, transposed in registers if its memory has
//! the other order, split, and stored: each term where the product reads it.
#![allow(unsafe_code)]

use half::f16;

use super::pack::{Bf16Terms, MatrixView};
use crate::kernels::cpu::vector::Vector;

impl Bf16Terms for f32 {
    const COUNT: usize = 3;

    #[inline(always)]
    unsafe fn pack_tile<V: Vector>(
        view: &MatrixView<'_, Self>,
        from: [usize; 2],
        by_line: bool,
        out: *mut u32,
        stride: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { split_tile::<Self, V>(view, from, by_line, out, stride) }
    }
}

impl Bf16Terms for f16 {
    /// Of 11 bits, nothing is left for a third.
    const COUNT: usize = 2;

    #[inline(always)]
    unsafe fn pack_tile<V: Vector>(
        view: &MatrixView<'_, Self>,
        from: [usize; 2],
        by_line: bool,
        out: *mut u32,
        stride: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { split_tile::<Self, V>(view, from, by_line, out, stride) }
    }
}

/// What is split as F32.
trait SplitAsF32: Bf16Terms {
    /// Zeros for the elements not in `mask`.
    ///
    /// # Safety
    /// The features of `V`; the elements of `mask` from `at` on can be read.
    unsafe fn load<V: Vector>(at: *const Self, mask: u16) -> V;
}

impl SplitAsF32 for f32 {
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self, mask: u16) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_masked(at, mask) }
    }
}

impl SplitAsF32 for f16 {
    #[inline(always)]
    unsafe fn load<V: Vector>(at: *const Self, mask: u16) -> V {
        // SAFETY: the caller's.
        unsafe { V::load_f16(at, mask) }
    }
}

/// See [`Bf16Terms::pack_tile`]. A word has the elements `k` and `k + 16`, not `k` and `k + 1`, so that none has
/// to move: the order of a sum is the same on both sides.
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn split_tile<T: SplitAsF32, V: Vector>(
    view: &MatrixView<'_, T>,
    [line, word]: [usize; 2],
    by_line: bool,
    out: *mut u32,
    stride: usize,
) {
    let along = view.depth_stride == 1;
    let lines = view.lines - line;
    // SAFETY: the caller's.
    let mut halves = [[unsafe { V::zero() }; 16]; 2];
    for (half, tile) in halves.iter_mut().enumerate() {
        let k = 2 * word + 16 * half;
        let elements = view.depth.saturating_sub(k);
        let (rows, columns) = if along { (lines, elements) } else { (elements, lines) };
        let mask = if columns >= 16 { u16::MAX } else { (1 << columns) - 1 };
        let from = line * view.line_stride + k * view.depth_stride;
        let from = view.data.as_ptr().wrapping_add(from);
        let step = if along { view.line_stride } else { view.depth_stride };
        for (i, row) in tile.iter_mut().enumerate().take(rows) {
            // SAFETY: the caller's; only elements of the matrix are in the mask.
            *row = unsafe { T::load(from.wrapping_add(i * step), mask) };
        }
        if along != by_line {
            // SAFETY: the caller's.
            *tile = unsafe { V::transpose(*tile) };
        }
    }
    let next = if by_line { 16 } else { 256 };
    let [first, last] = &halves;
    for (row, (first, last)) in first.iter().zip(last).enumerate() {
        // SAFETY: the caller's.
        let (first, last) = unsafe { (split(*first), split(*last)) };
        for term in 0..T::COUNT {
            // SAFETY: the caller's.
            unsafe {
                let words = first[term].shift_down().or(last[term]);
                words.store(out.add(term * next + row * stride).cast());
            }
        }
    }
}

/// Three BF16 terms, in upper halves, whose sum is the element: its nearest BF16, the nearest to the remainder,
/// and the rest. 24 bits fit into three times 8.
///
/// Lower halves are always zero, because a caller may OR another element into them. Under 2^-110 the third term is
/// subnormal and has bits there; they are cut off. AMX takes subnormals for zero anyway, so each element keeps its
/// value to within 2^-126.
///
/// If an element is infinite, NaN or rounds beyond BF16's range, one of the first two terms is infinite or NaN, so
/// that none of its products is finite.
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(in crate::kernels) unsafe fn split<V: Vector>(x: V) -> [V; 3] {
    // SAFETY: the caller's.
    unsafe {
        let first = x.nearest_bf16();
        let rest = x.sub(first);
        let second = rest.nearest_bf16();
        [first, second, rest.sub(second).upper()]
    }
}
