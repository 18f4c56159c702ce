//! The AVX2 micro-kernel: 4 rows by up to 24 columns of sums, in registers.
//!
//! 12 of the 16 vector registers hold sums, 3 hold columns of the right matrix, one an element of the left matrix in
//! every lane. Each step along the depth loads the columns once and uses them for 4 rows. A tile is 8 rows by 64
//! columns: for each part of its columns, its upper rows and then its lower ones, which find the columns in the cache.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use super::{PackedGemm, Tile, WIDTH};

/// Rows of a tile, and of what registers hold of it.
const ROWS: usize = 8;
const TALL: usize = 4;
/// Words added up in a register, before their sum is added to those of earlier ones: the error of a sum
/// grows with the terms added one after the other.
const LONGEST: usize = 256;

/// See [`PackedGemm::multiply`], which checks what this relies on.
pub(super) fn multiply(gemm: &PackedGemm<'_>, mut f: impl FnMut(Tile<'_>)) {
    let mut sums = [[0f32; WIDTH]; ROWS];
    for column in (0..gemm.columns).step_by(WIDTH) {
        let columns = WIDTH.min(gemm.columns - column);
        for row in (0..gemm.rows).step_by(ROWS) {
            let rows = ROWS.min(gemm.rows - row);
            for part in parts(columns.div_ceil(8)) {
                for upper in (0..rows).step_by(TALL) {
                    let run = match (part.len(), gemm.left_row == 1) {
                        (1, true) => tile::<1, 2, true>,
                        (1, false) => tile::<1, 2, false>,
                        (2, true) => tile::<2, 1, true>,
                        (2, false) => tile::<2, 1, false>,
                        (_, true) => tile::<3, 1, true>,
                        (_, false) => tile::<3, 1, false>,
                    };
                    let at = (row / ROWS, upper, column / 8 + part.start);
                    // SAFETY: `PackedGemm::multiply` has seen that the processor has the instructions,
                    // and that whole blocks of rows and columns of the product lie in its slices.
                    unsafe { run(gemm, at, &mut sums[upper..upper + TALL], 8 * part.start) };
                }
            }
            f(Tile { row, column, rows, columns, sums: &sums });
        }
    }
}

/// So many vectors in parts of at most three, as equal as can be.
fn parts(vectors: usize) -> impl Iterator<Item = Range<usize>> {
    let count = vectors.div_ceil(3);
    let bound = move |part: usize| part * vectors / count;
    (0..count).map(move |part| bound(part)..bound(part + 1))
}

/// Writes the sums of four rows, from row `upper` of `block` on, and of `VECTORS` vectors of columns to `out`, from
/// column `to` on.
///
/// # Safety
/// AVX2 and FMA; the rows and the columns in the slices.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const VECTORS: usize, const WORDS: usize, const CLOSE: bool>(
    gemm: &PackedGemm<'_>,
    (block, upper, vector): (usize, usize, usize),
    out: &mut [[f32; WIDTH]],
    to: usize,
) {
    // With one vector, two sums a row: an addition takes four cycles, and the next one needs its result.
    let mut sums = [[[_mm256_setzero_ps(); VECTORS]; TALL]; WORDS];
    let (mut count, mut before) = (0, false);
    macro_rules! put {
        () => {
            for (i, out) in out.iter_mut().enumerate().take(TALL) {
                let places = out[to..][..8 * VECTORS].as_chunks_mut::<8>().0.iter_mut();
                for (v, place) in places.enumerate() {
                    let mut sum = sums[0][i][v];
                    if WORDS > 1 {
                        sum = _mm256_add_ps(sum, sums[WORDS - 1][i][v]);
                    }
                    // SAFETY: a place has 8 elements.
                    unsafe {
                        if before {
                            sum = _mm256_add_ps(_mm256_loadu_ps(place.as_ptr()), sum);
                        }
                        _mm256_storeu_ps(place.as_mut_ptr(), sum);
                    }
                }
            }
        };
    }
    let row = if CLOSE { 1 } else { gemm.left_row };
    let (step, down) = (gemm.left_step, gemm.right_step);
    let mut across = [0; VECTORS];
    for (v, across) in across.iter_mut().enumerate() {
        *across = (vector + v) / 2 * gemm.right_block + (vector + v) % 2 * 8;
    }
    for (left, &right) in gemm.left_starts.iter().zip(gemm.right_starts) {
        let left = block * gemm.left_block + upper * row + left;
        let mut left = gemm.left.as_ptr().wrapping_add(left).cast::<f32>();
        let mut right = gemm.right.as_ptr().wrapping_add(right).cast::<f32>();
        macro_rules! word {
            ($sums:expr, $word:expr) => {
                let mut columns = [_mm256_setzero_ps(); VECTORS];
                for (column, across) in columns.iter_mut().zip(across) {
                    // SAFETY: these 8 words are columns of the product.
                    *column = unsafe { _mm256_loadu_ps(right.wrapping_add(across + $word * down)) };
                }
                for (i, sums) in $sums.iter_mut().enumerate() {
                    let at = left.wrapping_add(i * row + $word * step);
                    // SAFETY: this word is a row of the block.
                    let element = unsafe { _mm256_broadcast_ss(&*at) };
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = _mm256_fmadd_ps(element, column, *sum);
                    }
                }
            };
        }
        let mut depth = gemm.depth;
        while depth > 0 {
            let run = depth.min(LONGEST - count);
            for _ in 0..run / WORDS {
                word!(sums[0], 0);
                if WORDS > 1 {
                    word!(sums[WORDS - 1], 1);
                }
                left = left.wrapping_add(WORDS * step);
                right = right.wrapping_add(WORDS * down);
            }
            if !run.is_multiple_of(WORDS) {
                word!(sums[0], 0);
                left = left.wrapping_add(step);
                right = right.wrapping_add(down);
            }
            depth -= run;
            count += run;
            if count == LONGEST {
                put!();
                sums = [[[_mm256_setzero_ps(); VECTORS]; TALL]; WORDS];
                (count, before) = (0, true);
            }
        }
    }
    put!();
}
