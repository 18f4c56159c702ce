//! The tiles of a part of a product.
#![allow(unsafe_code)]

use crate::kernels::cpu::vector::{Vector, Vectors, with_vectors};

/// Rows of a tile.
pub(super) const ROWS: usize = 6;
/// Columns of a tile.
pub(super) const COLUMNS: usize = 16;

/// Lines that a thread packs for itself, about, and rows that it multiplies by all columns: 108 KiB in the second-level
/// cache.
pub(super) const LINES: usize = 72;

/// Where a part of the result goes.
#[derive(Clone, Copy)]
pub(super) struct Output {
    /// Its first element.
    pub(super) at: *mut f32,
    /// Elements from a row to the next.
    pub(super) stride: usize,
    /// Whether it is added to what is there.
    pub(super) add: bool,
}

/// Multiplies packed rows by packed columns; of each, the words and how many they are.
///
/// # Safety
/// The elements of the result are the caller's alone, and initialised where they are added to.
///
/// # Panics
/// When there are fewer words than these have, or the processor has no such vectors.
pub(super) unsafe fn multiply(
    vectors: Vectors,
    (left, rows): (&[f32], usize),
    (right, columns): (&[f32], usize),
    depth: usize,
    out: Output,
) {
    assert!(left.len() >= rows.next_multiple_of(ROWS) * depth, "rows are missing");
    assert!(right.len() >= columns.next_multiple_of(COLUMNS) * depth, "columns are missing");
    // Rows that stay in the second-level cache, while all columns pass.
    for first in (0..rows).step_by(LINES) {
        let rows = first..rows.min(first + LINES);
        with_vectors!(vectors, V => for column in (0..columns).step_by(COLUMNS) {
            let right = right.as_ptr().wrapping_add(column * depth);
            for row in rows.clone().step_by(ROWS) {
                let left = left.as_ptr().wrapping_add(row * depth);
                let out = Output { at: out.at.wrapping_add(row * out.stride + column), ..out };
                let size = [ROWS.min(rows.end - row), COLUMNS.min(columns - column)];
                // SAFETY: a whole panel of each side, as asserted; the tile is a part of the result. The features are
                // within `with_vectors!`.
                unsafe { tile::<V>([left, right], depth, size, out) };
            }
        });
    }
}

/// One tile; less of it at the end of the result.
///
/// # Safety
/// The features of `V`; a panel of each side; a tile of this size, as in [`multiply`].
#[inline(always)]
unsafe fn tile<V: Vector>(
    [left, right]: [*const f32; 2],
    depth: usize,
    [rows, columns]: [usize; 2],
    out: Output,
) {
    let (left, right) = ((left, ROWS), (right, COLUMNS));
    // SAFETY: the caller's. A part of a tile is multiplied elsewhere, and only what the result has is copied.
    unsafe {
        if [rows, columns] == [ROWS, COLUMNS] {
            let out_rows = (out.at, out.stride);
            match out.add {
                true => V::multiply::<ROWS, 1, 1, true>(left, right, depth, out_rows),
                false => V::multiply::<ROWS, 1, 1, false>(left, right, depth, out_rows),
            }
            return;
        }
        let mut sums = [[0f32; COLUMNS]; ROWS];
        V::multiply::<ROWS, 1, 1, false>(left, right, depth, (sums.as_mut_ptr().cast(), COLUMNS));
        for (row, sums) in sums.iter().enumerate().take(rows) {
            for (column, &sum) in sums.iter().enumerate().take(columns) {
                let at = out.at.wrapping_add(row * out.stride + column);
                *at = if out.add { *at + sum } else { sum };
            }
        }
    }
}
