//! The AVX-512 micro-kernels: 8 rows by up to 48 columns of sums, in registers.
//!
//! 24 of the 32 vector registers hold sums, 3 hold columns of the right matrix, one an element of the left matrix
//! in every lane. Each step along the depth loads the columns once and uses them for 8 rows. `vfmadd` multiplies
//! F32, `vdpbf16ps` pairs of BF16; a macro writes both kernels, as only that instruction differs.
//!
//! The order of a sum does not depend on where in a tile it is, so that a product may be cut anywhere.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::mem::transmute;
use std::ops::Range;

use crate::kernels::gemm::micro::product::{PackedGemm, Tile, WIDTH, equal_parts};

const ROWS: usize = 8;
/// Words added up in a register, before their sum is added to those of earlier ones: the error of a sum
/// grows with the terms added one after the other.
const LONGEST: usize = 128;
/// Words of a right matrix that stays in a second-level cache of 1 MiB while rows pass.
const NEAR: usize = 5 << 15;

macro_rules! micro_kernel {
    ($name:ident, $tile:ident, $features:literal, |$sum:ident, $left:ident, $right:ident| $add:expr) => {
        pub(super) fn $name(gemm: &PackedGemm<'_>, f: &mut dyn FnMut(Tile<'_>)) {
            let mut sums = [[0f32; WIDTH]; ROWS];
            let mut tile = |part: Range<usize>, row: usize| {
                let (vector, column) = (part.start, part.start * 16);
                let columns = (part.len() * 16).min(gemm.columns - column);
                let run = match (part.len(), gemm.left_row == 1) {
                    (1, true) => $tile::<1, true>,
                    (1, false) => $tile::<1, false>,
                    (2, true) => $tile::<2, true>,
                    (2, false) => $tile::<2, false>,
                    (_, true) => $tile::<3, true>,
                    (_, false) => $tile::<3, false>,
                };
                // SAFETY: `PackedGemm::multiply` has seen that the processor has the instructions,
                // and that whole blocks of rows and columns of the product lie in its slices.
                unsafe { run(gemm, row / ROWS, vector, &mut sums) };
                let rows = ROWS.min(gemm.rows - row);
                f(Tile { row, column, rows, columns, sums: &sums });
            };
            let parts = || equal_parts(gemm.columns.div_ceil(16), 3);
            let rows = (0..gemm.rows).step_by(ROWS);
            if gemm.row_panels && gemm.right.len() <= NEAR {
                // Results lie along rows, and a block of rows stays in the first-level cache.
                rows.for_each(|row| parts().for_each(|part| tile(part, row)));
            } else {
                parts().for_each(|part| rows.clone().for_each(|row| tile(part.clone(), row)));
            }
        }

        /// # Safety
        /// The features, and row block `block` and `VECTORS` vectors of columns in the slices.
        #[target_feature(enable = $features)]
        unsafe fn $tile<const VECTORS: usize, const CLOSE: bool>(
            gemm: &PackedGemm<'_>,
            block: usize,
            vector: usize,
            out: &mut [[f32; WIDTH]; ROWS],
        ) {
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
            let (mut count, mut before) = (0, false);
            macro_rules! put {
                () => {
                    for (i, out) in out.iter_mut().enumerate() {
                        let places = out.as_chunks_mut::<16>().0.iter_mut();
                        for (v, place) in places.enumerate().take(VECTORS) {
                            let mut sum = sums[i][v];
                            // SAFETY: a place has 16 elements.
                            unsafe {
                                if before {
                                    sum = _mm512_add_ps(_mm512_loadu_ps(place.as_ptr()), sum);
                                }
                                _mm512_storeu_ps(place.as_mut_ptr(), sum);
                            }
                        }
                    }
                };
            }
            // Where rows are known to be neighbours, no address is computed for each.
            let row = if CLOSE { 1 } else { gemm.left_row };
            let step = gemm.left_step;
            let (across, down) = (gemm.right_block, gemm.right_step);
            for (left, right) in gemm.left_starts.iter().zip(gemm.right_starts) {
                let left = block * gemm.left_block + left;
                let right = vector * gemm.right_block + right;
                let mut left = gemm.left.as_ptr().wrapping_add(left).cast::<f32>();
                let mut right = gemm.right.as_ptr().wrapping_add(right).cast::<f32>();
                let mut depth = gemm.depth;
                while depth > 0 {
                    let run = depth.min(LONGEST - count);
                    for _ in 0..run {
                        let mut columns = [_mm512_setzero_ps(); VECTORS];
                        for (v, column) in columns.iter_mut().enumerate() {
                            // SAFETY: these 16 words are columns of the product.
                            *column = unsafe { _mm512_loadu_ps(right.wrapping_add(v * across)) };
                        }
                        for (i, sums) in sums.iter_mut().enumerate() {
                            // SAFETY: this word is a row of the block.
                            let $left = unsafe { _mm512_set1_ps(*left.wrapping_add(i * row)) };
                            for ($sum, $right) in sums.iter_mut().zip(columns) {
                                *$sum = $add;
                            }
                        }
                        left = left.wrapping_add(step);
                        right = right.wrapping_add(down);
                    }
                    depth -= run;
                    count += run;
                    if count == LONGEST {
                        put!();
                        sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
                        (count, before) = (0, true);
                    }
                }
            }
            put!();
        }
    };
}

micro_kernel!(fma, fma_tile, "avx512f", |sum, left, right| _mm512_fmadd_ps(left, right, *sum));
micro_kernel!(dot, dot_tile, "avx512f,avx512bf16", |sum, left, right| _mm512_dpbf16_ps(
    *sum,
    pairs(left),
    pairs(right)
));

#[inline(always)]
fn pairs(words: __m512) -> __m512bh {
    // SAFETY: both are 64 bytes, any of them valid.
    unsafe { transmute(words) }
}
