//! The AVX2 micro-kernel: 4 rows by up to 24 columns of sums, in registers.
//!
//! 12 of the 16 vector registers hold sums, 3 hold columns of the right matrix, one an element of the left matrix in
//! every lane. Each step along the depth loads the columns once and uses them for 4 rows.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use crate::kernels::cpu::vector::add_products;
use crate::kernels::gemm::micro::product::{PackedGemm, Tile, WIDTH};
use crate::kernels::gemm::micro::tiles::{self, Add, ROWS};

/// Rows whose sums registers hold.
const TALL: usize = 4;

/// See [`PackedGemm::multiply`], which checks what this relies on.
pub(super) fn multiply(gemm: &PackedGemm<'_>, f: &mut dyn FnMut(Tile<'_>)) {
    // One vector of four rows would wait: an addition takes four cycles, and two start in each.
    let kernel = |vectors, close| -> (Add, usize) {
        match (vectors, close) {
            (1, true) => (add::<1, ROWS, true>, ROWS),
            (1, false) => (add::<1, ROWS, false>, ROWS),
            (2, true) => (add::<2, TALL, true>, TALL),
            (2, false) => (add::<2, TALL, false>, TALL),
            (_, true) => (add::<3, TALL, true>, TALL),
            (_, false) => (add::<3, TALL, false>, TALL),
        }
    };
    // SAFETY: `PackedGemm::multiply` has seen that the processor has the instructions.
    unsafe { tiles::multiply(gemm, 8, kernel, f) }
}

/// Adds a stretch of sums to `out`, from column `to` on, or writes the `first` one. They are of `TALL` rows, from
/// `row` on, and of `VECTORS` vectors of columns, from `vector` on.
///
/// # Safety
/// AVX2 and FMA; the rows and the columns in the slices.
#[target_feature(enable = "avx2,fma")]
unsafe fn add<const VECTORS: usize, const TALL: usize, const CLOSE: bool>(
    gemm: &PackedGemm<'_>,
    (segments, words): (Range<usize>, Range<usize>),
    (row, vector): (usize, usize),
    out: &mut [[f32; WIDTH]],
    (to, first): (usize, bool),
) {
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; TALL];
    let across = if CLOSE { 1 } else { gemm.left_row };
    let (step, down) = (gemm.left_step, gemm.right_step);
    let mut columns_at = [0; VECTORS];
    for (v, at) in columns_at.iter_mut().enumerate() {
        *at = (vector + v) / 2 * gemm.right_block + (vector + v) % 2 * 8;
    }
    let left_at = row / ROWS * gemm.left_block + row % ROWS * across + words.start * step;
    let right_at = words.start * down;
    for segment in segments {
        let (left, right) = (gemm.left_starts[segment], gemm.right_starts[segment]);
        let mut left = gemm.left.as_ptr().wrapping_add(left_at + left).cast::<f32>();
        let mut right = gemm.right.as_ptr().wrapping_add(right_at + right).cast::<f32>();
        let mut steps = words.len();
        // More than the compiler finds registers for.
        if VECTORS == 3 && TALL == 4 {
            let (own, next) =
                (columns_at[0], [1, 2].map(|v| columns_at[v % VECTORS] - columns_at[0]));
            let mut all = [[_mm256_setzero_ps(); 3]; 4];
            for (all, sums) in all.iter_mut().zip(&sums) {
                all[..VECTORS].copy_from_slice(sums);
            }
            let (left, right) = ((left, across, step), (right.wrapping_add(own), next, down));
            // SAFETY: these words are columns and rows of the product.
            unsafe { add_products(&mut all, left, right, steps) };
            for (sums, all) in sums.iter_mut().zip(all) {
                sums.copy_from_slice(&all[..VECTORS]);
            }
            steps = 0;
        }
        for _ in 0..steps {
            let mut columns = [_mm256_setzero_ps(); VECTORS];
            for (column, at) in columns.iter_mut().zip(columns_at) {
                // SAFETY: these 8 words are columns of the product.
                *column = unsafe { _mm256_loadu_ps(right.wrapping_add(at)) };
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                // SAFETY: this word is a row of the block.
                let element = unsafe { _mm256_broadcast_ss(&*left.wrapping_add(i * across)) };
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = _mm256_fmadd_ps(element, column, *sum);
                }
            }
            left = left.wrapping_add(step);
            right = right.wrapping_add(down);
        }
    }
    for (i, out) in out.iter_mut().enumerate().take(TALL) {
        let places = out[to..][..8 * VECTORS].as_chunks_mut::<8>().0.iter_mut();
        for (v, place) in places.enumerate() {
            let mut sum = sums[i][v];
            // SAFETY: a place has 8 elements.
            unsafe {
                if !first {
                    sum = _mm256_add_ps(_mm256_loadu_ps(place.as_ptr()), sum);
                }
                _mm256_storeu_ps(place.as_mut_ptr(), sum);
            }
        }
    }
}
