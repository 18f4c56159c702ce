//! The NEON micro-kernel: 8 rows by up to 12 columns of sums, in registers.
//!
//! 24 of the 32 vector registers hold sums, 3 hold columns of the right matrix, one an element of the left matrix. Each step
//! along the depth loads the columns once and uses them for 8 rows.
#![allow(unsafe_code)]

use std::arch::aarch64::*;
use std::ops::Range;

use crate::kernels::gemm::micro::product::{PackedGemm, Tile, WIDTH};
use crate::kernels::gemm::micro::tiles::{self, Add, ROWS};

/// Lanes of a register.
const LANES: usize = 4;

/// See [`PackedGemm::multiply`], which checks what this relies on.
pub(super) fn multiply(gemm: &PackedGemm<'_>, f: &mut dyn FnMut(Tile<'_>)) {
    let kernel = |registers, close| -> (Add, usize) {
        match (registers, close) {
            (1, true) => (add::<1, true>, ROWS),
            (1, false) => (add::<1, false>, ROWS),
            (2, true) => (add::<2, true>, ROWS),
            (2, false) => (add::<2, false>, ROWS),
            (_, true) => (add::<3, true>, ROWS),
            (_, false) => (add::<3, false>, ROWS),
        }
    };
    // SAFETY: `PackedGemm::multiply` has checked the product.
    unsafe { tiles::multiply(gemm, LANES, kernel, f) }
}

/// Adds a stretch of sums to `out`, from column `to` on, or writes the `first` one. They are of a block of rows, from `row`
/// on, and of `COUNT` registers of columns, from `register` on.
///
/// # Safety
/// The rows and the columns in the slices.
#[target_feature(enable = "neon")]
unsafe fn add<const COUNT: usize, const CLOSE: bool>(
    gemm: &PackedGemm<'_>,
    (segments, words): (Range<usize>, Range<usize>),
    (row, register): (usize, usize),
    out: &mut [[f32; WIDTH]],
    (to, first): (usize, bool),
) {
    let mut sums = [[vdupq_n_f32(0.0); COUNT]; ROWS];
    // Where rows are known to be neighbours, no address is computed for each.
    let across = if CLOSE { 1 } else { gemm.left_row };
    let (step, down) = (gemm.left_step, gemm.right_step);
    let mut columns_at = [0; COUNT];
    for (n, at) in columns_at.iter_mut().enumerate() {
        let column = (register + n) * LANES;
        *at = column / 16 * gemm.right_block + column % 16;
    }
    let left_at = row / ROWS * gemm.left_block + words.start * step;
    let right_at = words.start * down;
    for segment in segments {
        let (left, right) = (gemm.left_starts[segment], gemm.right_starts[segment]);
        let mut left = gemm.left.as_ptr().wrapping_add(left_at + left).cast::<f32>();
        let mut right = gemm.right.as_ptr().wrapping_add(right_at + right).cast::<f32>();
        for _ in words.clone() {
            let mut columns = [vdupq_n_f32(0.0); COUNT];
            for (column, at) in columns.iter_mut().zip(columns_at) {
                // SAFETY: these four words are columns of the product.
                *column = unsafe { vld1q_f32(right.wrapping_add(at)) };
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: this word is a row of the block.
                let element = unsafe { *left.wrapping_add(i * across) };
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = vfmaq_n_f32(*sum, column, element);
                }
            }
            left = left.wrapping_add(step);
            right = right.wrapping_add(down);
        }
    }
    for (sums, out) in sums.into_iter().zip(out) {
        let places = out[to..][..LANES * COUNT].as_chunks_mut::<LANES>().0.iter_mut();
        for (mut sum, place) in sums.into_iter().zip(places) {
            // SAFETY: a place has four elements.
            unsafe {
                if !first {
                    sum = vaddq_f32(vld1q_f32(place.as_ptr()), sum);
                }
                vst1q_f32(place.as_mut_ptr(), sum);
            }
        }
    }
}
