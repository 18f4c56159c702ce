//! Rounds the sums of one block into the output while AMX multiplies the next block.
//!
//! AMX runs beside the vector units. Rounding a whole block at once is as many instructions as the processor's
//! reorder window holds, so the tile registers would stand idle: a third of the time at a depth of 256. So the
//! loop along the depth rounds four rows of the block before at each step, between two tile instructions.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::instructions::Tiles;
use super::{CELLS, Configuration, NEAR, ROWS, parts};
use crate::kernels::gemm::micro::{Panel, Rounded, with_cells};

/// Rows and columns of a block.
pub(in crate::kernels::gemm::micro) const SIDE: usize = 2 * ROWS;

/// Sums of a block.
#[repr(C, align(64))]
struct Sums([[f32; SIDE]; SIDE]);

/// Cells of a part of a sum: 32 rows of them are two thirds of a cache of 48 KiB.
const PART: usize = 256;

/// Rows of a block that are rounded at each step along the sum.
const EACH: usize = 4;

/// Writes sums, plus the bias of each column, to `out`, whose rows are `stride` elements apart. Subnormals
/// may become zero.
///
/// # Safety
/// The processor has tiles and AVX-512 BF16. A panel of rows, one segment and one plane, its depth whole
/// registers, in whole blocks of [`SIDE`]; places for all, and numbers in the bias.
pub(super) unsafe fn rounded<I: Tiles, O: Rounded>(
    panel: &Panel<'_>,
    bias: Option<&[f32]>,
    out: *mut MaybeUninit<O>,
    stride: usize,
) {
    let configuration = Configuration::new(0);
    // SAFETY: the caller's.
    unsafe { I::configure(&configuration) };
    // Rows that share few lines of the nearest cache stay there if they are short.
    let far = panel.left_row.is_multiple_of(512) && panel.depth > PART;
    let part = if far { PART } else { panel.depth };
    let near = (NEAR / panel.right_block.max(1)).next_multiple_of(2).max(2);
    let kept = if far { near.div_ceil(2) } else { 2 };
    with_cells([kept * size_of::<Sums>() / 4], |[sums]| {
        let sums: *mut Sums = sums.as_mut_ptr().cast();
        let mut last: Option<(*const Sums, Places<O>)> = None;
        for near in parts(0..panel.columns / CELLS, near) {
            for row in (0..panel.rows / ROWS).step_by(2) {
                for part in parts(0..panel.depth, part) {
                    for (n, column) in near.clone().step_by(2).enumerate() {
                        let sums = sums.wrapping_add(n % kept);
                        // SAFETY: the caller's, and as many sums as blocks of a row, or two.
                        unsafe { block::<I, O>(panel, [row, column], &part, sums, last.take()) };
                        if part.end == panel.depth {
                            let out = out.wrapping_add(row * ROWS * stride + column * CELLS);
                            let bias = bias.map(|bias| bias[column * CELLS..].as_ptr());
                            last = Some((sums, Places { bias, out: out.cast(), stride }));
                        }
                    }
                }
            }
        }
        if let Some((sums, places)) = last {
            // SAFETY: the caller's.
            unsafe { places.round_from(0, sums) };
        }
    });
    // SAFETY: configured above.
    unsafe { I::release() };
}

/// Where a block goes.
#[derive(Clone, Copy)]
struct Places<O> {
    bias: Option<*const f32>,
    out: *mut O,
    stride: usize,
}

/// # Safety
/// Of all methods: AVX-512 F, BW, VL and BF16, places and bias as [`rounded`] has them, `row < SIDE`.
impl<O: Rounded> Places<O> {
    #[inline(always)]
    unsafe fn round(&self, row: usize, sums: *const Sums) {
        let sums = sums.cast::<f32>().wrapping_add(row * SIDE);
        // SAFETY: the caller's; a row has two vectors of sums.
        unsafe {
            let mut pair = [_mm512_loadu_ps(sums), _mm512_loadu_ps(sums.add(16))];
            if let Some(bias) = self.bias {
                pair[0] = _mm512_add_ps(pair[0], _mm512_loadu_ps(bias));
                pair[1] = _mm512_add_ps(pair[1], _mm512_loadu_ps(bias.add(16)));
            }
            O::store_normal_pair(self.out.add(row * self.stride), pair);
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn round_from(&self, first: usize, sums: *const Sums) {
        for row in first..SIDE {
            // SAFETY: the caller's.
            unsafe { self.round(row, sums) };
        }
    }

    /// Most often the next block's: the line comes, to be written, while that is computed. The standard
    /// library's function gives the instruction for reading.
    #[inline(always)]
    unsafe fn ask_for_next(&self, row: usize) {
        let next = self.out.wrapping_add(row * self.stride + SIDE);
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn block<I: Tiles, O: Rounded>(
    panel: &Panel<'_>,
    [row, column]: [usize; 2],
    part: &Range<usize>,
    sums: *mut Sums,
    before: Option<(*const Sums, Places<O>)>,
) {
    let (across, down) = (panel.left_row * 4, panel.right_step * 4);
    let mut left = panel.left.as_ptr();
    let mut right = panel.right.as_ptr();
    left = left.wrapping_add(row * panel.left_block + panel.left_starts[0] + part.start);
    let start = panel.right_starts[0] + part.start * panel.right_step;
    right = right.wrapping_add(column * panel.right_block + start);
    let (first, width) = (sums.cast::<f32>(), SIDE * 4);
    let last = first.wrapping_add(ROWS * SIDE);
    // SAFETY: the caller's, of all below.
    unsafe {
        if part.start == 0 {
            I::zero();
        } else {
            I::load::<_, 0>(first, width);
            I::load::<_, 1>(first.add(CELLS), width);
            I::load::<_, 2>(last, width);
            I::load::<_, 3>(last.add(CELLS), width);
        }
    }
    let mut done = 0;
    for _ in 0..part.len() / CELLS {
        let before = before.filter(|_| done < SIDE);
        // SAFETY: see above.
        unsafe {
            I::load::<_, 4>(left, across);
            I::load::<_, 6>(right, down);
            I::multiply::<0, 4, 6>();
            if let Some((sums, places)) = before {
                for row in done..done + EACH / 2 {
                    places.round(row, sums);
                }
            }
            I::load::<_, 7>(right.wrapping_add(panel.right_block), down);
            I::multiply::<1, 4, 7>();
            if let Some((sums, places)) = before {
                for row in done + EACH / 2..done + EACH {
                    places.round(row, sums);
                }
            }
            I::load::<_, 5>(left.wrapping_add(panel.left_block), across);
            I::multiply::<2, 5, 6>();
            if let Some((_, places)) = before {
                for row in done..done + EACH {
                    places.ask_for_next(row);
                }
            }
            I::multiply::<3, 5, 7>();
        }
        done += EACH;
        left = left.wrapping_add(CELLS * panel.left_step);
        right = right.wrapping_add(CELLS * panel.right_step);
    }
    // SAFETY: see above.
    unsafe {
        if let Some((sums, places)) = before {
            places.round_from(done.min(SIDE), sums);
        }
        I::store::<0>(first, width);
        I::store::<1>(first.add(CELLS), width);
        I::store::<2>(last, width);
        I::store::<3>(last.add(CELLS), width);
    }
}
