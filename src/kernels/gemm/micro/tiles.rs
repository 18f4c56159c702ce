//! Tiles of 32 rows, for micro-kernels whose registers have fewer lanes than a vector.
//!
//! Up to 128 words of some columns stay in a first-level cache of 32 KiB while all rows of a tile pass. So the
//! second-level cache is read once for 32 rows.
#![allow(unsafe_code)]

use std::ops::Range;

use super::product::{PackedGemm, Tile, WIDTH, equal_parts};

/// Rows of a block of the left matrix, and of a tile.
pub(super) const ROWS: usize = 8;
const TILE_ROWS: usize = 4 * ROWS;
/// Words added up in a register, before their sum is added to those of earlier ones: the error of a sum
/// grows with the terms added one after the other.
const LONGEST: usize = 128;

/// Adds a stretch of the sums to the lines, from a column on, or writes the first stretch. The sums are of some rows,
/// from one on, and some registers of columns, from one on.
///
/// # Safety
/// The instructions, and the rows and the columns in the slices.
pub(super) type Add = unsafe fn(
    &PackedGemm<'_>,
    (Range<usize>, Range<usize>),
    (usize, usize),
    &mut [[f32; WIDTH]],
    (usize, bool),
);

/// Calls `f` with every tile. `kernel` has the function for up to three registers of `lanes` columns, and how many rows
/// it takes; its second argument says whether rows are neighbours.
///
/// # Safety
/// The instructions of the kernels; [`PackedGemm::check`] has passed.
#[inline]
pub(super) unsafe fn multiply(
    gemm: &PackedGemm<'_>,
    lanes: usize,
    kernel: impl Fn(usize, bool) -> (Add, usize),
    f: &mut dyn FnMut(Tile<'_>),
) {
    let mut sums = [[0f32; WIDTH]; TILE_ROWS];
    for column in (0..gemm.columns).step_by(WIDTH) {
        let columns = WIDTH.min(gemm.columns - column);
        for row in (0..gemm.rows).step_by(TILE_ROWS) {
            let rows = TILE_ROWS.min(gemm.rows - row);
            for part in equal_parts(columns.div_ceil(lanes), 3) {
                let (run, tall) = kernel(part.len(), gemm.left_row == 1);
                let (register, to) = (column / lanes + part.start, lanes * part.start);
                let mut first = true;
                for_each_stretch(gemm, |segments, words| {
                    for top in (0..rows).step_by(tall) {
                        let out = &mut sums[top..top + tall];
                        let stretch = (segments.clone(), words.clone());
                        // SAFETY: the caller's: whole blocks of rows and columns of the product lie in its slices.
                        unsafe { run(gemm, stretch, (row + top, register), out, (to, first)) };
                    }
                    first = false;
                });
            }
            f(Tile { row, column, rows, columns, sums: &sums });
        }
    }
}

/// Calls `f` with segments and words of each, so that together they are all words of the sum, and each time at most
/// [`LONGEST`]; at least once.
fn for_each_stretch(gemm: &PackedGemm<'_>, mut f: impl FnMut(Range<usize>, Range<usize>)) {
    let (segments, depth) = (gemm.left_starts.len(), gemm.depth);
    if segments * depth == 0 {
        return f(0..0, 0..0);
    }
    if depth <= LONGEST {
        return equal_parts(segments, LONGEST / depth).for_each(|segments| f(segments, 0..depth));
    }
    for segment in 0..segments {
        equal_parts(depth, LONGEST).for_each(|words| f(segment..segment + 1, words));
    }
}
