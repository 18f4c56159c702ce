//! Products in AMX's tile registers: 16 rows by up to 64 columns of sums at a time.
//!
//! A thread must ask Linux for the registers once ([`enable`]), configure them before use, and release them after,
//! because the system saves configured registers at every switch of threads. [`multiply`] chooses the order of
//! tiles so that what several tiles read stays in the nearest caches. `tile.rs` has the loop along the depth; that
//! in `rounded.rs` also rounds the sums of one block while the next one is multiplied.
//!
//! The standard library has no stable AMX intrinsics, so [`instructions`] has the instructions themselves. Tests
//! without AMX run the same code on a stand-in for the registers.
#![allow(unsafe_code)]

mod blocks;
#[cfg(test)]
mod emulated;
mod instructions;
mod registers;
mod rounded;
mod tile;

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::LazyLock;

use crate::kernels::gemm::micro::epilogue::Rounded;
use crate::kernels::gemm::micro::product::{PackedGemm, Tile, WIDTH};
use blocks::{NEAR, parts};
use instructions::{Amx, TileRegisters};
use registers::{Configuration, ROWS, WORDS};
pub(in crate::kernels::gemm::micro) use rounded::BLOCK;
use tile::{Accumulators, kernel};

/// Whether the processor has tiles of BF16, allowed or not.
pub(super) fn exists() -> bool {
    // Asked once: a virtual machine takes some 10 µs to answer.
    static EXISTS: LazyLock<bool> = LazyLock::new(|| {
        const BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
        __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & BF16_AND_TILE == BF16_AND_TILE
    });
    *EXISTS
}

/// Asks the system to let this process use the tiles. Threads inherit the answer.
pub(super) fn enable() -> bool {
    exists() && saved_by_system() && request()
}

/// Whether the system keeps the tile registers when it switches threads.
fn saved_by_system() -> bool {
    #[target_feature(enable = "xsave")]
    fn saved() -> bool {
        const TILE_STATE: u64 = 1 << 17 | 1 << 18;
        // SAFETY: register 0 is there wherever the instruction is.
        unsafe { _xgetbv(0) & TILE_STATE == TILE_STATE }
    }
    const OSXSAVE: u32 = 1 << 27;
    // SAFETY: `is_x86_feature_detected` and the bit say that the instruction is enabled.
    __cpuid(1).ecx & OSXSAVE != 0 && is_x86_feature_detected!("xsave") && unsafe { saved() }
}

#[cfg(target_os = "linux")]
fn request() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let answer: i64;
    // SAFETY: this call writes no memory; the kernel overwrites `rcx` and `r11`.
    unsafe {
        asm!(
            "syscall",
            inout("rax") ARCH_PRCTL => answer,
            in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    answer == 0
}

#[cfg(not(target_os = "linux"))]
fn request() -> bool {
    false
}

/// Words that stay in the first-level cache of 48 KiB.
const NEAREST: usize = 10 << 10;

/// Blocks of rows at most, where a tile has one block of columns.
const TALL: usize = 4;

/// What happens to the sums.
pub(super) enum Output<'a> {
    /// Called with every tile.
    Tiles(&'a mut dyn FnMut(Tile<'_>)),
    /// Sums that it is added to, and how many a row of them has.
    Sums(&'a mut [f32], usize),
}

/// Multiplies in the processor's registers, or in tests where it has none in the stand-in.
pub(super) fn multiply(gemm: &PackedGemm<'_>, to: Output<'_>) {
    #[cfg(test)]
    if !crate::kernels::gemm::micro::isa::InstructionSet::AmxBf16.is_available() {
        return multiply_on::<emulated::Emulated>(gemm, to);
    }
    multiply_on::<Amx>(gemm, to);
}

/// See [`rounded::rounded`]; in tests in the stand-in where there is no AMX.
///
/// # Safety
/// As there, and the processor has tiles unless this is a test.
pub(super) unsafe fn rounded<O: Rounded>(
    gemm: &PackedGemm<'_>,
    bias: Option<&[f32]>,
    out: *mut MaybeUninit<O>,
    stride: usize,
) {
    #[cfg(test)]
    if !crate::kernels::gemm::micro::isa::InstructionSet::AmxBf16.is_available() {
        // SAFETY: the caller's.
        return unsafe { rounded::rounded::<emulated::Emulated, O>(gemm, bias, out, stride) };
    }
    // SAFETY: the caller's.
    unsafe { rounded::rounded::<Amx, O>(gemm, bias, out, stride) };
}

impl Tile<'_> {
    /// Writes it over sums of the whole product, whose rows have `columns` elements.
    fn copy_to(&self, sums: &mut [f32], columns: usize) {
        for (row, line) in self.sums.iter().enumerate().take(self.rows) {
            let start = (self.row + row) * columns + self.column;
            sums[start..start + self.columns].copy_from_slice(&line[..self.columns]);
        }
    }
}

fn multiply_on<I: TileRegisters>(gemm: &PackedGemm<'_>, mut to: Output<'_>) {
    #[repr(C, align(64))]
    struct Sums([[[f32; WIDTH]; ROWS]; TALL]);
    let mut sums = Sums([[[0.0; WIDTH]; ROWS]; TALL]);
    let configuration = Configuration::new(gemm.depth % WORDS);
    let whole = gemm.depth.is_multiple_of(WORDS);
    let kernel = match gemm.terms {
        1 => kernel::<I, 1>,
        2 => kernel::<I, 2>,
        _ => kernel::<I, 3>,
    };
    // SAFETY: the processor has tiles and the system allows them, as `PackedGemm::multiply` has seen.
    unsafe { I::configure(&configuration) };
    let (row_blocks, blocks) = (gemm.rows.div_ceil(ROWS), gemm.columns.div_ceil(WORDS));
    let mut run = |rows: Range<usize>, columns: Range<usize>| {
        let run = kernel(rows.len(), columns.len(), whole);
        let first_block = columns.start;
        let (row, column) = (rows.start * ROWS, first_block * WORDS);
        let size = [ROWS * rows.len(), WORDS * columns.len()];
        if let Output::Sums(sums, stride) = &mut to
            && row + size[0] <= gemm.rows
            && column + size[1] <= gemm.columns
        {
            let first = row * *stride + column;
            assert!(size[1] <= *stride && first + (size[0] - 1) * *stride + size[1] <= sums.len());
            let sums = sums.as_mut_ptr().wrapping_add(first);
            let place = Accumulators { sums, stride: *stride, add: true };
            // SAFETY: configured above; whole blocks lie in the slices, and in the sums as asserted.
            unsafe { run(gemm, rows.start, first_block, place) };
            return;
        }
        let columns = size[1].min(gemm.columns - column);
        // To sums of before, as the whole blocks above: a row's bits do not depend on the rows beside it.
        let add = matches!(to, Output::Sums(..));
        if let Output::Sums(earlier, stride) = &to {
            let kept = sums.0.as_flattened_mut().iter_mut();
            for (kept, row) in kept.zip(row..gemm.rows.min(row + size[0])) {
                kept[..columns].copy_from_slice(&earlier[row * *stride + column..][..columns]);
            }
        }
        let place = Accumulators { sums: sums.0.as_mut_ptr().cast(), stride: WIDTH, add };
        // SAFETY: configured above; whole blocks of rows and columns lie in the slices, four in `sums`.
        unsafe { run(gemm, rows.start, first_block, place) };
        for (sums, row) in sums.0.iter().zip(rows) {
            let row = row * ROWS;
            let tile = Tile { row, column, rows: ROWS.min(gemm.rows - row), columns, sums };
            match &mut to {
                Output::Tiles(f) => f(tile),
                Output::Sums(sums, stride) => tile.copy_to(sums, *stride),
            }
        }
    };
    // Rows of matrices: as tall as wide reads the fewest words, and results are written along rows.
    let matrices = !gemm.row_panels && gemm.left_row >= gemm.depth * gemm.left_starts.len();
    if matrices && row_blocks.min(blocks) > 1 {
        let near = (NEAR / gemm.right_block.max(1)).next_multiple_of(2).max(2);
        for near in parts(0..blocks, near) {
            for rows in parts(0..row_blocks, 2) {
                parts(near.clone(), 2).for_each(|columns| run(rows.clone(), columns));
            }
        }
    } else {
        // Rows share words, so that they are near whatever comes between: as wide as columns go, unless
        // those of one tile are too many to stay near.
        let far = !gemm.row_panels && blocks * gemm.right_block > NEAREST && row_blocks > 1;
        let most = if far { 2 } else { 4 };
        let wide = blocks.div_ceil(blocks.div_ceil(most));
        for columns in parts(0..blocks, wide) {
            // Four registers of sums: what columns leave goes to more rows.
            let tall = 4 / wide.next_power_of_two();
            parts(0..row_blocks, tall).for_each(|rows| run(rows, columns.clone()));
        }
    }
    // SAFETY: configured above.
    unsafe { I::release() };
}
