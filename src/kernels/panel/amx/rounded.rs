//! Products rounded into rows of results, between the instructions of the next product.
//!
//! Rounding a block by itself is as many instructions as a processor looks ahead, so that its tile
//! registers would wait: a third of the time of a sum of 256 terms.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::instructions::{load, product, store, zero};
use super::{CELLS, Configuration, NEAR, ROWS, parts};
use crate::kernels::panel::{Panel, Rounded};

/// Rows and columns of a block.
pub(in crate::kernels::panel) const SIDE: usize = 2 * ROWS;

/// Sums of a block.
#[repr(C, align(64))]
struct Sums([[f32; SIDE]; SIDE]);

/// Rows of a block that are rounded at each step along the sum.
const EACH: usize = 4;

/// Writes sums, plus the bias of each column, to `out`, whose rows are `stride` elements apart. Subnormals
/// may become zero.
///
/// # Safety
/// The processor has tiles and AVX-512 BF16. A panel of rows, one segment and one plane, its depth whole
/// registers, in whole blocks of [`SIDE`]; places for all, and numbers in the bias.
pub(in crate::kernels::panel) unsafe fn rounded<O: Rounded>(
    panel: &Panel<'_>,
    bias: Option<&[f32]>,
    out: *mut MaybeUninit<O>,
    stride: usize,
) {
    let configuration = Configuration::new(0);
    // SAFETY: the processor has tiles; the configuration is a valid one of 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, readonly)) };
    let mut sums = [const { Sums([[0.0; SIDE]; SIDE]) }; 2];
    let [now, before] = &mut sums;
    let (mut now, mut before) = (now, before);
    let mut last: Option<Places<O>> = None;
    let near = (NEAR / panel.right_block.max(1)).next_multiple_of(2).max(2);
    for near in parts(0..panel.columns / CELLS, near) {
        for row in (0..panel.rows / ROWS).step_by(2) {
            for column in near.clone().step_by(2) {
                // SAFETY: the caller's.
                unsafe { block(panel, [row, column], now, last.map(|last| (&*before, last))) };
                let out = out.wrapping_add(row * ROWS * stride + column * CELLS);
                let bias = bias.map(|bias| bias[column * CELLS..].as_ptr());
                last = Some(Places { bias, out: out.cast(), stride });
                std::mem::swap(&mut now, &mut before);
            }
        }
    }
    if let Some(last) = last {
        // SAFETY: the caller's.
        unsafe { last.round_from(0, before) };
    }
    // SAFETY: as above. Registers in use would be saved at every switch of threads.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
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
    unsafe fn round(&self, row: usize, sums: &Sums) {
        let sums = sums.0[row].as_ptr();
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
    unsafe fn round_from(&self, first: usize, sums: &Sums) {
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
unsafe fn block<O: Rounded>(
    panel: &Panel<'_>,
    [row, column]: [usize; 2],
    sums: &mut Sums,
    before: Option<(&Sums, Places<O>)>,
) {
    let (across, down) = (panel.left_row * 4, panel.right_step * 4);
    let mut left = panel.left.as_ptr();
    let mut right = panel.right.as_ptr();
    left = left.wrapping_add(row * panel.left_block + panel.left_starts[0]);
    right = right.wrapping_add(column * panel.right_block + panel.right_starts[0]);
    // SAFETY: the caller's, of all below.
    unsafe { zero!() };
    let mut done = 0;
    for _ in 0..panel.depth / CELLS {
        let before = before.filter(|_| done < SIDE);
        // SAFETY: see above.
        unsafe {
            load!("tmm4", left, across);
            load!("tmm6", right, down);
            product!("tmm0", "tmm4", "tmm6");
            if let Some((sums, places)) = before {
                places.round(done, sums);
                places.round(done + 1, sums);
            }
            load!("tmm7", right.wrapping_add(panel.right_block), down);
            product!("tmm1", "tmm4", "tmm7");
            if let Some((sums, places)) = before {
                places.round(done + 2, sums);
                places.round(done + 3, sums);
            }
            load!("tmm5", left.wrapping_add(panel.left_block), across);
            product!("tmm2", "tmm5", "tmm6");
            if let Some((_, places)) = before {
                (0..EACH).for_each(|row| places.ask_for_next(done + row));
            }
            product!("tmm3", "tmm5", "tmm7");
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
        let width = SIDE * 4;
        let first = sums.0.as_mut_ptr().cast::<f32>();
        let last = first.add(ROWS * SIDE);
        store!("tmm0", first, width);
        store!("tmm1", first.add(CELLS), width);
        store!("tmm2", last, width);
        store!("tmm3", last.add(CELLS), width);
    }
}
