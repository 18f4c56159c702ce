//! Tiles of 16 rows by up to 64 columns, in AMX's tile registers.
//!
//! The standard library has no stable AMX intrinsics, so these are the instructions themselves.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
use std::ops::Range;
use std::sync::LazyLock;

use super::{Panel, Tile, WIDTH};

const ROWS: usize = 16;
/// Cells of a row of a tile register.
const CELLS: usize = 16;

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

/// What `ldtilecfg` reads: the number of the palette, and the size of each register.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// Registers 0 to 3 are sums, 4 and 5 rows, 6 and 7 columns; where there is a tail, 5 is rows and 7
    /// columns of so many cells.
    fn new(tail: usize) -> Self {
        let mut configuration =
            Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for register in 0..8 {
            configuration.row_bytes[register] = 64;
            configuration.rows[register] = 16;
        }
        if tail > 0 {
            configuration.row_bytes[5] = tail as u16 * 4;
            configuration.rows[7] = tail as u8;
        }
        configuration
    }
}

/// Cells of columns that stay near while all rows pass: half of a second-level cache of 1 MiB.
const NEAR: usize = 1 << 17;

/// Cells that stay in the nearest cache, of 48 KiB.
const NEAREST: usize = 10 << 10;

/// Blocks of rows at most, where a tile has one block of columns.
const TALL: usize = 4;

/// Planes of the left and of the right side that are multiplied. Of three times three, those that are left
/// out are at most 2^-23 of a product together.
const fn pairs<const PLANES: usize>() -> &'static [(usize, usize)] {
    match PLANES {
        1 => &[(0, 0)],
        2 => &[(1, 0), (1, 1), (0, 1), (0, 0)],
        _ => &[(2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)],
    }
}

/// Multiplies blocks of rows and columns from these on; see [`tile`].
type Kernel = unsafe fn(&Panel<'_>, usize, usize, &mut [[[f32; WIDTH]; ROWS]; TALL]);

fn kernel<const PLANES: usize>(down: usize, across: usize, whole: bool) -> Kernel {
    match (down, across) {
        (1, 1) => tile::<PLANES, 1, 1, false>,
        (1, 2) => tile::<PLANES, 1, 2, false>,
        (1, 3) => tile::<PLANES, 1, 3, false>,
        (1, _) => tile::<PLANES, 1, 4, false>,
        (2, 1) => tile::<PLANES, 2, 1, false>,
        (2, _) if whole => tile::<PLANES, 2, 2, true>,
        (2, _) => tile::<PLANES, 2, 2, false>,
        (3, _) => tile::<PLANES, 3, 1, false>,
        (_, _) => tile::<PLANES, 4, 1, false>,
    }
}

pub(super) fn multiply(panel: &Panel<'_>, mut f: impl FnMut(Tile<'_>)) {
    #[repr(C, align(64))]
    struct Sums([[[f32; WIDTH]; ROWS]; TALL]);
    let mut sums = Sums([[[0.0; WIDTH]; ROWS]; TALL]);
    let configuration = Configuration::new(panel.depth % CELLS);
    let whole = panel.depth.is_multiple_of(CELLS);
    let kernel = match panel.planes {
        1 => kernel::<1>,
        2 => kernel::<2>,
        _ => kernel::<3>,
    };
    // SAFETY: the processor has tiles and the system allows them, as `Panel::multiply` has seen. The
    // configuration is a valid one of 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &configuration, options(nostack, readonly)) };
    let (row_blocks, blocks) = (panel.rows.div_ceil(ROWS), panel.columns.div_ceil(CELLS));
    let mut run = |rows: Range<usize>, columns: Range<usize>| {
        let run = kernel(rows.len(), columns.len(), whole);
        // SAFETY: configured above; whole blocks of rows and columns lie in the slices.
        unsafe { run(panel, rows.start, columns.start, &mut sums.0) };
        let column = columns.start * CELLS;
        let columns = (columns.len() * CELLS).min(panel.columns - column);
        for (sums, row) in sums.0.iter().zip(rows) {
            let row = row * ROWS;
            f(Tile { row, column, rows: ROWS.min(panel.rows - row), columns, sums });
        }
    };
    // Rows of matrices: as tall as wide reads the fewest cells, and results are written along rows.
    let matrices = !panel.strips && panel.left_row >= panel.depth * panel.left_starts.len();
    if matrices && row_blocks.min(blocks) > 1 {
        let near = (NEAR / panel.right_block.max(1)).next_multiple_of(2).max(2);
        for near in parts(0..blocks, near) {
            for rows in parts(0..row_blocks, 2) {
                parts(near.clone(), 2).for_each(|columns| run(rows.clone(), columns));
            }
        }
    } else {
        // Rows share cells, so that they are near whatever comes between: as wide as columns go, unless
        // those of one tile are too many to stay near.
        let far = !panel.strips && blocks * panel.right_block > NEAREST && row_blocks > 1;
        let most = if far { 2 } else { 4 };
        let wide = blocks.div_ceil(blocks.div_ceil(most));
        for columns in parts(0..blocks, wide) {
            // Four registers of sums: what columns leave goes to more rows.
            let tall = 4 / wide.next_power_of_two();
            parts(0..row_blocks, tall).for_each(|rows| run(rows, columns.clone()));
        }
    }
    // SAFETY: as above. Registers in use would be saved at every switch of threads.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// `range` in parts of `each`, and what is left.
fn parts(range: Range<usize>, each: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(each).map(move |first| first..end.min(first + each))
}

/// `DOWN` by `ACROSS` blocks, at most four. Two by two of a `WHOLE` panel, its depth full registers, keep
/// rows and columns in registers from one pair of planes to the next.
///
/// # Safety
/// Tiles configured for the panel's depth; blocks of rows from `block` on, and of columns from `first`
/// on, in the slices.
unsafe fn tile<const PLANES: usize, const DOWN: usize, const ACROSS: usize, const WHOLE: bool>(
    panel: &Panel<'_>,
    block: usize,
    first: usize,
    sums: &mut [[[f32; WIDTH]; ROWS]; TALL],
) {
    // SAFETY: of this block and all below: addresses are those of cells of the panel, or of `sums`; no
    // other code uses tile registers.
    unsafe { asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3") };
    let (row, down) = (panel.left_row * 4, panel.right_step * 4);
    macro_rules! load {
        ($register:literal, $at:expr, $stride:ident) => {
            // SAFETY: see above.
            unsafe {
                asm!(
                    concat!("tileloadd ", $register, ", [{at} + {stride}]"),
                    at = in(reg) $at,
                    stride = in(reg) $stride,
                    options(nostack, readonly),
                );
            }
        };
    }
    macro_rules! product {
        ($sum:literal, $rows:literal, $columns:literal) => {
            // SAFETY: see above.
            unsafe {
                asm!(
                    concat!("tdpbf16ps ", $sum, ", ", $rows, ", ", $columns),
                    options(nostack, nomem),
                );
            }
        };
    }
    // Registers for rows, two for columns, and where their cells are.
    macro_rules! multiply {
        ($rows:literal, $columns:literal, $last:literal, $left:ident, $right:ident) => {
            let left_block = |n: usize| $left.wrapping_add(n * panel.left_block);
            let right_block = |n: usize| $right.wrapping_add(n * panel.right_block);
            load!($rows, left_block(0), row);
            load!($columns, right_block(0), down);
            product!("tmm0", $rows, $columns);
            if ACROSS > 1 {
                load!($last, right_block(1), down);
                product!("tmm1", $rows, $last);
            }
            if ACROSS > 2 {
                load!($last, right_block(2), down);
                product!("tmm2", $rows, $last);
            }
            if ACROSS > 3 {
                load!($last, right_block(3), down);
                product!("tmm3", $rows, $last);
            }
            if DOWN > 1 {
                load!($rows, left_block(1), row);
                if ACROSS > 1 {
                    product!("tmm3", $rows, $last);
                    load!($columns, right_block(0), down);
                    product!("tmm2", $rows, $columns);
                } else {
                    product!("tmm1", $rows, $columns);
                }
            }
            if DOWN > 2 {
                load!($rows, left_block(2), row);
                product!("tmm2", $rows, $columns);
            }
            if DOWN > 3 {
                load!($rows, left_block(3), row);
                product!("tmm3", $rows, $columns);
            }
        };
    }
    for (left, right) in panel.left_starts.iter().zip(panel.right_starts) {
        let left = block * panel.left_block + left;
        let right = first * panel.right_block + right;
        let mut left = panel.left.as_ptr().wrapping_add(left);
        let mut right = panel.right.as_ptr().wrapping_add(right);
        for _ in 0..panel.depth / (PLANES * CELLS) {
            let mut loaded = (PLANES, PLANES);
            for &(l, r) in pairs::<PLANES>() {
                let left = left.wrapping_add(l * CELLS * panel.left_step);
                let right = right.wrapping_add(r * CELLS * panel.right_step);
                if !WHOLE {
                    multiply!("tmm4", "tmm6", "tmm6", left, right);
                    continue;
                }
                if l != loaded.0 {
                    load!("tmm4", left, row);
                    load!("tmm5", left.wrapping_add(panel.left_block), row);
                }
                if r != loaded.1 {
                    load!("tmm6", right, down);
                    load!("tmm7", right.wrapping_add(panel.right_block), down);
                }
                loaded = (l, r);
                product!("tmm0", "tmm4", "tmm6");
                product!("tmm1", "tmm4", "tmm7");
                product!("tmm2", "tmm5", "tmm6");
                product!("tmm3", "tmm5", "tmm7");
            }
            left = left.wrapping_add(PLANES * CELLS * panel.left_step);
            right = right.wrapping_add(PLANES * CELLS * panel.right_step);
        }
        if !panel.depth.is_multiple_of(CELLS) {
            // These registers hold only as many cells of a row as are left.
            multiply!("tmm5", "tmm7", "tmm7", left, right);
        }
    }
    macro_rules! store {
        ($n:literal, $sum:literal) => {
            if $n < DOWN * ACROSS {
                let place = sums[$n / ACROSS].as_mut_ptr().cast::<f32>();
                // SAFETY: see above; 16 rows of 16 sums from a column of the tile on.
                unsafe {
                    asm!(
                        concat!("tilestored [{sums} + {row}], ", $sum),
                        sums = in(reg) place.add($n % ACROSS * CELLS),
                        row = in(reg) WIDTH * 4,
                        options(nostack),
                    );
                }
            }
        };
    }
    store!(0, "tmm0");
    store!(1, "tmm1");
    store!(2, "tmm2");
    store!(3, "tmm3");
}
