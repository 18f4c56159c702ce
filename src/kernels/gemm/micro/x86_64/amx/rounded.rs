//! Rounds the sums of one block into the output while AMX multiplies the next block.
//!
//! AMX runs beside the vector units. Rounding a whole block at once is as many instructions as the processor's
//! reorder window holds. So the tile registers would stand idle, a third of the time at a depth of 256. So the
//! loop along the depth rounds four rows of the block before at each step, between two tile instructions.

use std::arch::asm;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::blocks::{NEAR, parts};
use super::instructions::TileRegisters;
use super::registers::{Configuration, ROWS, WORDS};
use crate::kernels::cpu::vector::{Avx512, Vector};
use crate::kernels::gemm::micro::buffer::with_words;
use crate::kernels::gemm::micro::epilogue::Rounded;
use crate::kernels::gemm::micro::product::PackedGemm;

/// Rows and columns of a block.
pub(in crate::kernels::gemm::micro) const BLOCK: usize = 2 * ROWS;

/// Sums of a block.
#[repr(C, align(64))]
struct Sums([[f32; BLOCK]; BLOCK]);

/// Words of a part of a sum: 32 rows of them are two thirds of a cache of 48 KiB.
const PART: usize = 256;

/// Rows of a block that are rounded at each step along the sum.
const EACH: usize = 4;

/// Writes sums, plus the bias of each column, to `out`, whose rows are `stride` elements apart. Subnormals
/// may become zero.
///
/// # Safety
/// The processor has tiles and AVX-512 BF16. A product of rows, one segment and one term, its depth whole
/// registers, in whole blocks of [`BLOCK`]; places for all, and numbers in the bias.
pub(super) unsafe fn rounded<I: TileRegisters, O: Rounded>(
    gemm: &PackedGemm<'_>,
    bias: Option<&[f32]>,
    out: *mut MaybeUninit<O>,
    stride: usize,
) {
    let configuration = Configuration::new(0);
    // SAFETY: the caller's.
    unsafe { I::configure(&configuration) };
    // Rows that share few lines of the nearest cache stay there if they are short.
    let far = gemm.left_row.is_multiple_of(512) && gemm.depth > PART;
    let part = if far { PART } else { gemm.depth };
    let near = (NEAR / gemm.right_block.max(1)).next_multiple_of(2).max(2);
    let kept = if far { near.div_ceil(2) } else { 2 };
    with_words([kept * size_of::<Sums>() / 4], |[sums]| {
        let sums: *mut Sums = sums.as_mut_ptr().cast();
        let mut last: Option<(*const Sums, Epilogue<O>)> = None;
        for near in parts(0..gemm.columns / WORDS, near) {
            for row in (0..gemm.rows / ROWS).step_by(2) {
                for part in parts(0..gemm.depth, part) {
                    for (n, column) in near.clone().step_by(2).enumerate() {
                        let sums = sums.wrapping_add(n % kept);
                        // SAFETY: the caller's, and as many sums as blocks of a row, or two.
                        unsafe { block::<I, O>(gemm, [row, column], &part, sums, last.take()) };
                        if part.end == gemm.depth {
                            let out = out.wrapping_add(row * ROWS * stride + column * WORDS);
                            let bias = bias.map(|bias| bias[column * WORDS..].as_ptr());
                            last = Some((sums, Epilogue { bias, out: out.cast(), stride }));
                        }
                    }
                }
            }
        }
        if let Some((sums, epilogue)) = last {
            // SAFETY: the caller's.
            unsafe { epilogue.round_from(0, sums) };
        }
    });
    // SAFETY: configured above.
    unsafe { I::release() };
}

/// Where a block goes.
#[derive(Clone, Copy)]
struct Epilogue<O> {
    bias: Option<*const f32>,
    out: *mut O,
    stride: usize,
}

/// # Safety
/// Of all methods: AVX-512 F, BW, VL and BF16, places and bias as [`rounded`] has them, `row < BLOCK`.
impl<O: Rounded> Epilogue<O> {
    #[inline(always)]
    unsafe fn round(&self, row: usize, sums: *const Sums) {
        let sums = sums.cast::<f32>().wrapping_add(row * BLOCK);
        // SAFETY: the caller's; a row has two vectors of sums.
        unsafe {
            let mut pair = [Avx512::load(sums), Avx512::load(sums.add(16))];
            if let Some(bias) = self.bias {
                pair[0] = pair[0].add(Avx512::load(bias));
                pair[1] = pair[1].add(Avx512::load(bias.add(16)));
            }
            O::store_ftz_pair(self.out.add(row * self.stride), pair);
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn round_from(&self, first: usize, sums: *const Sums) {
        for row in first..BLOCK {
            // SAFETY: the caller's.
            unsafe { self.round(row, sums) };
        }
    }

    /// Most often the next block's: the line comes, to be written, while that is computed. The standard
    /// library's function gives the instruction for reading.
    #[inline(always)]
    unsafe fn prefetch_next(&self, row: usize) {
        let next = self.out.wrapping_add(row * self.stride + BLOCK);
        // SAFETY: a hint, of any address; every processor with AVX-512 has it.
        unsafe {
            asm!("prefetchw [{}]", in(reg) next, options(nostack, readonly, preserves_flags))
        };
    }
}

/// Sums of two by two blocks of 16 from `row` and `column` on, while those `before` are rounded.
///
/// # Safety
/// As [`rounded`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn block<I: TileRegisters, O: Rounded>(
    gemm: &PackedGemm<'_>,
    [row, column]: [usize; 2],
    part: &Range<usize>,
    sums: *mut Sums,
    before: Option<(*const Sums, Epilogue<O>)>,
) {
    let (across, down) = (gemm.left_row * 4, gemm.right_step * 4);
    let mut left = gemm.left.as_ptr();
    let mut right = gemm.right.as_ptr();
    left = left.wrapping_add(row * gemm.left_block + gemm.left_starts[0] + part.start);
    let start = gemm.right_starts[0] + part.start * gemm.right_step;
    right = right.wrapping_add(column * gemm.right_block + start);
    let (first, width) = (sums.cast::<f32>(), BLOCK * 4);
    let last = first.wrapping_add(ROWS * BLOCK);
    // SAFETY: the caller's, of all below.
    unsafe {
        if part.start == 0 {
            I::zero();
        } else {
            I::load::<_, 0>(first, width);
            I::load::<_, 1>(first.add(WORDS), width);
            I::load::<_, 2>(last, width);
            I::load::<_, 3>(last.add(WORDS), width);
        }
    }
    let mut done = 0;
    for _ in 0..part.len() / WORDS {
        let before = before.filter(|_| done < BLOCK);
        // SAFETY: see above.
        unsafe {
            I::load::<_, 4>(left, across);
            I::load::<_, 6>(right, down);
            I::multiply::<0, 4, 6>();
            if let Some((sums, epilogue)) = before {
                for row in done..done + EACH / 2 {
                    epilogue.round(row, sums);
                }
            }
            I::load::<_, 7>(right.wrapping_add(gemm.right_block), down);
            I::multiply::<1, 4, 7>();
            if let Some((sums, epilogue)) = before {
                for row in done + EACH / 2..done + EACH {
                    epilogue.round(row, sums);
                }
            }
            I::load::<_, 5>(left.wrapping_add(gemm.left_block), across);
            I::multiply::<2, 5, 6>();
            if let Some((_, epilogue)) = before {
                for row in done..done + EACH {
                    epilogue.prefetch_next(row);
                }
            }
            I::multiply::<3, 5, 7>();
        }
        done += EACH;
        left = left.wrapping_add(WORDS * gemm.left_step);
        right = right.wrapping_add(WORDS * gemm.right_step);
    }
    // SAFETY: see above.
    unsafe {
        if let Some((sums, epilogue)) = before {
            epilogue.round_from(done.min(BLOCK), sums);
        }
        I::store::<0>(first, width);
        I::store::<1>(first.add(WORDS), width);
        I::store::<2>(last, width);
        I::store::<3>(last.add(WORDS), width);
    }
}
