//! The AMX micro-kernel: one to four tiles of sums, kept in registers over the whole depth.
//!
//! AMX has eight tile registers of 16 rows by 64 bytes. Four hold sums, so that an instruction does not wait for
//! the one before it. The other four hold operands. Two by two tiles read each operand for two products:
//!
//! ```text
//!                      tmm6          tmm7         right: 16 words of depth, 16 columns each
//!                  +------------+------------+
//!     left   tmm4  | tmm0  sums | tmm1  sums |    one tdpbf16ps: 16 x 16 sums in F32 +=
//!                  +------------+------------+    16 rows x 32 BF16  times  32 BF16 x 16 columns
//!            tmm5  | tmm2  sums | tmm3  sums |
//!                  +------------+------------+
//!     16 rows each, 16 words of depth
//! ```
//!
//! One by four and four by one tiles use the same four registers of sums. They reload an operand's register for
//! each product. A rest of the depth takes registers 5 and 7, which [`super::registers::Configuration`] makes that
//! much smaller.
//!
//! An F32 operand is a sum of three BF16 terms. The kernel multiplies six of the nine pairs of terms. They are
//! ordered so that each pair shares an operand with the one before, and the largest product comes last.

use super::instructions::TileRegisters;
use super::registers::{ROWS, WORDS};
use crate::kernels::gemm::micro::product::PackedGemm;

/// The pairs of BF16 terms, left and right, that are multiplied. The three of nine that are left out add up to at
/// most 2^-23 of a product.
const fn pairs<const TERMS: usize>() -> &'static [(usize, usize)] {
    match TERMS {
        1 => &[(0, 0)],
        2 => &[(1, 0), (1, 1), (0, 1), (0, 0)],
        _ => &[(2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)],
    }
}

/// Memory of the sums, in rows `stride` elements apart. With `add`, the kernel adds to what is there.
#[derive(Clone, Copy)]
pub(super) struct Accumulators {
    pub(super) sums: *mut f32,
    pub(super) stride: usize,
    pub(super) add: bool,
}

/// Multiplies some blocks of rows and columns, from the given row block and column block on. See [`tile`].
pub(super) type Kernel = unsafe fn(&PackedGemm<'_>, usize, usize, Accumulators);

pub(super) fn kernel<I: TileRegisters, const TERMS: usize>(
    down: usize,
    across: usize,
    whole: bool,
) -> Kernel {
    match (down, across) {
        (1, 1) => tile::<I, TERMS, 1, 1, false>,
        (1, 2) => tile::<I, TERMS, 1, 2, false>,
        (1, 3) => tile::<I, TERMS, 1, 3, false>,
        (1, _) => tile::<I, TERMS, 1, 4, false>,
        (2, 1) => tile::<I, TERMS, 2, 1, false>,
        (2, _) if whole => tile::<I, TERMS, 2, 2, true>,
        (2, _) => tile::<I, TERMS, 2, 2, false>,
        (3, _) => tile::<I, TERMS, 3, 1, false>,
        (_, _) => tile::<I, TERMS, 4, 1, false>,
    }
}

/// Computes `DOWN` by `ACROSS` blocks of sums, at most four. With `WHOLE`, the depth is a multiple of a register,
/// and two by two blocks keep operands in registers from one pair of terms to the next.
///
/// # Safety
/// Tiles configured for the product's depth; blocks of rows from `block` on, and of columns from `first`
/// on, in the slices; a place for each sum.
unsafe fn tile<
    I: TileRegisters,
    const TERMS: usize,
    const DOWN: usize,
    const ACROSS: usize,
    const WHOLE: bool,
>(
    gemm: &PackedGemm<'_>,
    block: usize,
    first: usize,
    to: Accumulators,
) {
    let (row, down) = (gemm.left_row * 4, gemm.right_step * 4);
    let place = |n: usize| to.sums.wrapping_add(n / ACROSS * ROWS * to.stride + n % ACROSS * WORDS);
    let stride = to.stride * 4;
    // SAFETY: of this block and all below: configured by the caller; addresses are those of words of the
    // product, or of sums.
    unsafe {
        if to.add {
            I::load::<_, 0>(place(0), stride);
            if DOWN * ACROSS > 1 {
                I::load::<_, 1>(place(1), stride);
            }
            if DOWN * ACROSS > 2 {
                I::load::<_, 2>(place(2), stride);
            }
            if DOWN * ACROSS > 3 {
                I::load::<_, 3>(place(3), stride);
            }
        } else {
            I::zero();
        }
    }
    // The registers for rows, for the first columns and for later ones, and where to load them from.
    macro_rules! multiply {
        ($rows:literal, $columns:literal, $last:literal, $left:ident, $right:ident) => {
            // SAFETY: see above.
            unsafe {
                let left_block = |n: usize| $left.wrapping_add(n * gemm.left_block);
                let right_block = |n: usize| $right.wrapping_add(n * gemm.right_block);
                I::load::<_, $rows>(left_block(0), row);
                I::load::<_, $columns>(right_block(0), down);
                I::multiply::<0, $rows, $columns>();
                if ACROSS > 1 {
                    I::load::<_, $last>(right_block(1), down);
                    I::multiply::<1, $rows, $last>();
                }
                if ACROSS > 2 {
                    I::load::<_, $last>(right_block(2), down);
                    I::multiply::<2, $rows, $last>();
                }
                if ACROSS > 3 {
                    I::load::<_, $last>(right_block(3), down);
                    I::multiply::<3, $rows, $last>();
                }
                if DOWN > 1 {
                    I::load::<_, $rows>(left_block(1), row);
                    if ACROSS > 1 {
                        I::multiply::<3, $rows, $last>();
                        I::load::<_, $columns>(right_block(0), down);
                        I::multiply::<2, $rows, $columns>();
                    } else {
                        I::multiply::<1, $rows, $columns>();
                    }
                }
                if DOWN > 2 {
                    I::load::<_, $rows>(left_block(2), row);
                    I::multiply::<2, $rows, $columns>();
                }
                if DOWN > 3 {
                    I::load::<_, $rows>(left_block(3), row);
                    I::multiply::<3, $rows, $columns>();
                }
            }
        };
    }
    for (left, right) in gemm.left_starts.iter().zip(gemm.right_starts) {
        let left = block * gemm.left_block + left;
        let right = first * gemm.right_block + right;
        let mut left = gemm.left.as_ptr().wrapping_add(left);
        let mut right = gemm.right.as_ptr().wrapping_add(right);
        for _ in 0..gemm.depth / (TERMS * WORDS) {
            let mut loaded = (TERMS, TERMS);
            for &(l, r) in pairs::<TERMS>() {
                let left = left.wrapping_add(l * WORDS * gemm.left_step);
                let right = right.wrapping_add(r * WORDS * gemm.right_step);
                if !WHOLE {
                    multiply!(4, 6, 6, left, right);
                    continue;
                }
                // SAFETY: see above.
                unsafe {
                    if l != loaded.0 {
                        I::load::<_, 4>(left, row);
                        I::load::<_, 5>(left.wrapping_add(gemm.left_block), row);
                    }
                    if r != loaded.1 {
                        I::load::<_, 6>(right, down);
                        I::load::<_, 7>(right.wrapping_add(gemm.right_block), down);
                    }
                    I::multiply::<0, 4, 6>();
                    I::multiply::<1, 4, 7>();
                    I::multiply::<2, 5, 6>();
                    I::multiply::<3, 5, 7>();
                }
                loaded = (l, r);
            }
            left = left.wrapping_add(TERMS * WORDS * gemm.left_step);
            right = right.wrapping_add(TERMS * WORDS * gemm.right_step);
        }
        if !gemm.depth.is_multiple_of(WORDS) {
            // Registers 5 and 7 are configured to hold only what is left of the depth.
            multiply!(5, 7, 7, left, right);
        }
    }
    // SAFETY: see above; 16 rows of 16 sums from each place on.
    unsafe {
        I::store::<0>(place(0), stride);
        if DOWN * ACROSS > 1 {
            I::store::<1>(place(1), stride);
        }
        if DOWN * ACROSS > 2 {
            I::store::<2>(place(2), stride);
        }
        if DOWN * ACROSS > 3 {
            I::store::<3>(place(3), stride);
        }
    }
}
