//! The tiles of a part of a product.
#![allow(unsafe_code)]

use crate::kernels::cpu::vector::{Vector, Vectors, with_vectors};

/// Rows and columns of a tile, whose sums stay in registers.
pub(super) fn size(vectors: Vectors) -> [usize; 2] {
    if vectors.hold_squares() { [8, 32] } else { [6, 16] }
}

/// Lines that a thread packs for itself, about, and rows that it multiplies by all columns: 108 KiB in the second-level
/// cache, or 216 KiB where that is larger.
pub(super) fn lines(vectors: Vectors) -> usize {
    if vectors.hold_squares() { 144 } else { 72 }
}

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

/// One side: packed words, and of how many lines.
pub(super) type Lines<'a> = (&'a [f32], usize);

/// Multiplies packed rows by packed columns.
///
/// # Safety
/// The elements of the result are the caller's alone, and initialised where they are added to.
///
/// # Panics
/// When there are fewer words than these have, or the processor has no such vectors.
pub(super) unsafe fn multiply(
    vectors: Vectors,
    [left, right]: [Lines<'_>; 2],
    depth: usize,
    out: Output,
) {
    for ((words, lines), width) in [left, right].into_iter().zip(size(vectors)) {
        assert!(words.len() >= lines.next_multiple_of(width) * depth, "lines are missing");
    }
    let at_once = lines(vectors);
    assert!(at_once.is_multiple_of(size(vectors)[0]), "panels are cut");
    // SAFETY: whole panels of each side, as asserted, in tiles of `size`; the result is the caller's. The features are
    // within `with_vectors!`.
    with_vectors!(vectors, V => unsafe {
        assert_eq!(V::WIDE, vectors.hold_squares(), "other tiles than those of `size`");
        match V::WIDE {
            true => tiles::<V, 8, 2>([left, right], depth, at_once, out),
            false => tiles::<V, 6, 1>([left, right], depth, at_once, out),
        }
    });
}

/// All tiles, of `ROWS` rows and `COUNT` vectors of columns.
///
/// # Safety
/// The features of `V`; whole panels of each side, of which `at_once` has whole ones; the result is the caller's.
#[inline(always)]
unsafe fn tiles<V: Vector, const ROWS: usize, const COUNT: usize>(
    [(left, rows), (right, columns)]: [Lines<'_>; 2],
    depth: usize,
    at_once: usize,
    out: Output,
) {
    // Rows that stay in the second-level cache, while all columns pass.
    for first in (0..rows).step_by(at_once) {
        let end = rows.min(first + at_once);
        for column in (0..columns).step_by(COUNT * 16) {
            let right = right.as_ptr().wrapping_add(column * depth);
            for row in (first..end).step_by(ROWS) {
                let left = left.as_ptr().wrapping_add(row * depth);
                let out = Output { at: out.at.wrapping_add(row * out.stride + column), ..out };
                let size = [ROWS.min(end - row), (COUNT * 16).min(columns - column)];
                // SAFETY: a panel of each side; the tile is a part of the result.
                unsafe { tile::<V, ROWS, COUNT>([left, right], depth, size, out) };
            }
        }
    }
}

/// One tile; less of it at the end of the result.
///
/// # Safety
/// The features of `V`; a panel of each side; a tile of this size, as in [`multiply`].
#[inline(always)]
unsafe fn tile<V: Vector, const ROWS: usize, const COUNT: usize>(
    [left, right]: [*const f32; 2],
    depth: usize,
    [rows, columns]: [usize; 2],
    out: Output,
) {
    let (left, right) = ((left, ROWS), (right, COUNT * 16));
    let out_rows = (out.at, out.stride);
    let vectors = columns.div_ceil(16);
    // SAFETY: the caller's. Of a tile that is cut, whole rows of whole vectors go straight to the result. Others are
    // multiplied elsewhere, and what the result has is copied.
    unsafe {
        if rows == ROWS && columns == COUNT * 16 {
            match out.add {
                true => V::multiply::<ROWS, COUNT, 1, true>(left, right, depth, out_rows),
                false => V::multiply::<ROWS, COUNT, 1, false>(left, right, depth, out_rows),
            }
            return;
        }
        let at = |vector: usize| (right.0.wrapping_add(16 * vector), right.1);
        if rows == ROWS && columns.is_multiple_of(16) {
            for vector in 0..vectors {
                let out_rows = (out.at.wrapping_add(16 * vector), out.stride);
                match out.add {
                    true => V::multiply::<ROWS, 1, 1, true>(left, at(vector), depth, out_rows),
                    false => V::multiply::<ROWS, 1, 1, false>(left, at(vector), depth, out_rows),
                }
            }
            return;
        }
        let mut sums = [[[0f32; 16]; COUNT]; ROWS];
        let to: *mut f32 = sums.as_mut_ptr().cast();
        for vector in 0..vectors {
            let to = (to.wrapping_add(16 * vector), COUNT * 16);
            V::multiply::<ROWS, 1, 1, false>(left, at(vector), depth, to);
        }
        for (row, sums) in sums.iter().enumerate().take(rows) {
            for (column, &sum) in sums.as_flattened().iter().enumerate().take(columns) {
                let at = out.at.wrapping_add(row * out.stride + column);
                *at = if out.add { *at + sum } else { sum };
            }
        }
    }
}
