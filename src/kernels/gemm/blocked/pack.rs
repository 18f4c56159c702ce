//! One side of a product, and its packed words.
#![allow(unsafe_code)]

use std::ops::Range;

use super::tile::{COLUMNS, ROWS};
use crate::kernels::cpu::array::from_fn;
use crate::kernels::cpu::vector::{Vector, Vectors, with_vectors};
use crate::kernels::gemm::matrix::Matrix;

/// The rows of the left matrix, or the columns of the right one: lines of terms.
///
/// Packed, `width` lines are a panel, whose words lie term by term. Lines that are missing in the last are zeros.
#[derive(Clone, Copy)]
pub(super) struct Side<'a> {
    matrix: Matrix<'a, f32>,
    width: usize,
}

impl<'a> Side<'a> {
    /// Of a matrix whose rows are the lines.
    pub(super) fn new(matrix: Matrix<'a, f32>, width: usize) -> Self {
        Self { matrix, width }
    }

    pub(super) fn lines(&self) -> usize {
        self.matrix.rows
    }

    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// Words of packed lines.
    pub(super) fn len(&self, lines: &Range<usize>, depth: &Range<usize>) -> usize {
        lines.len().next_multiple_of(self.width) * depth.len()
    }

    /// Packs terms of lines, the first of which is the first of a panel.
    pub(super) fn pack(
        &self,
        vectors: Vectors,
        lines: Range<usize>,
        depth: Range<usize>,
        words: &mut [f32],
    ) {
        with_vectors!(vectors, V => match self.width {
            ROWS => pack::<V, ROWS>(self.matrix, lines.clone(), depth.clone(), words),
            _ => pack::<V, COLUMNS>(self.matrix, lines.clone(), depth.clone(), words),
        });
    }
}

/// See [`Side::pack`].
#[inline(always)]
fn pack<V: Vector, const WIDTH: usize>(
    matrix: Matrix<'_, f32>,
    lines: Range<usize>,
    depth: Range<usize>,
    words: &mut [f32],
) {
    let Matrix { data, row_stride: down, col_stride: along, .. } = matrix;
    let steps = depth.len();
    let whole = match (down, along) {
        (1, _) | (_, 1) => lines.len() / WIDTH,
        _ => 0,
    };
    let (panels, rest) = words.split_at_mut(whole * steps * WIDTH);
    if along == 1 {
        for (panel, words) in panels.chunks_exact_mut(steps * WIDTH).enumerate() {
            let first = lines.start + panel * WIDTH;
            let lines: [&[f32]; WIDTH] = from_fn(
                #[inline(always)]
                |line| &data[(first + line) * down + depth.start..][..steps],
            );
            turn::<V, WIDTH>(lines, words.as_chunks_mut().0);
        }
    } else if whole > 0 {
        for step in 0..steps {
            let line = &data[(depth.start + step) * along + lines.start..][..whole * WIDTH];
            for (panel, line) in line.as_chunks::<WIDTH>().0.iter().enumerate() {
                panels[(panel * steps + step) * WIDTH..][..WIDTH].copy_from_slice(line);
            }
        }
    }
    let mut first = lines.start + whole * WIDTH;
    for words in rest.chunks_exact_mut(steps * WIDTH) {
        for (step, words) in words.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
            for (line, word) in words.iter_mut().enumerate() {
                let (line, step) = (first + line, depth.start + step);
                *word = if line < lines.end { data[line * down + step * along] } else { 0.0 };
            }
        }
        first += WIDTH;
    }
}

/// Lines of a panel, each in memory by itself, term by term.
#[inline(always)]
fn turn<V: Vector, const WIDTH: usize>(lines: [&[f32]; WIDTH], words: &mut [[f32; WIDTH]]) {
    let mut done = 0;
    if WIDTH == 16 {
        let (squares, _) = words.as_chunks_mut::<16>();
        for square in squares {
            // SAFETY: the features, as within `with_vectors!`; sixteen terms of each line, and as many of each word.
            unsafe {
                let rows = from_fn(
                    #[inline(always)]
                    |line| V::load(lines[line % WIDTH][done..][..16].as_ptr()),
                );
                for (words, terms) in square.iter_mut().zip(V::transpose(rows)) {
                    terms.store(words.as_mut_ptr());
                }
            }
            done += 16;
        }
    }
    for (step, words) in words.iter_mut().enumerate().skip(done) {
        for (line, word) in words.iter_mut().enumerate() {
            *word = lines[line][step];
        }
    }
}
