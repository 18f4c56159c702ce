//! One side of a product, and its packed words.
#![allow(unsafe_code)]

use std::ops::Range;

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

    /// Lines that are packed at once.
    pub(super) fn at_once(&self) -> usize {
        at_once(self.width)
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
        let (matrix, width) = (self.matrix, self.width);
        with_vectors!(vectors, V => match (V::WIDE, width) {
            (true, 8) => pack::<V, 8>(matrix, lines.clone(), depth.clone(), words),
            (true, _) => pack::<V, 32>(matrix, lines.clone(), depth.clone(), words),
            (false, 6) => pack::<V, 6>(matrix, lines.clone(), depth.clone(), words),
            (false, _) => pack::<V, 16>(matrix, lines.clone(), depth.clone(), words),
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
    let (steps, at_once) = (depth.len(), at_once(WIDTH));
    let whole = match (down, along) {
        (1, _) | (_, 1) => lines.len() / at_once * at_once,
        _ => 0,
    };
    let (panels, rest) = words.split_at_mut(whole * steps);
    let mut first = lines.start;
    if along == 1 {
        for words in panels.chunks_exact_mut(at_once * steps) {
            let line = |line| &data[(first + line) * down + depth.start..][..steps];
            match at_once.is_multiple_of(16) {
                true => turn_squares::<V, WIDTH>(line, words),
                false => turn::<WIDTH>(line, 0, words.as_chunks_mut().0),
            }
            first += at_once;
        }
    } else if whole > 0 {
        for step in 0..steps {
            let at = (depth.start + step) * along + lines.start;
            let line = &data[at..][..whole];
            for (panel, line) in line.as_chunks::<WIDTH>().0.iter().enumerate() {
                panels[(panel * steps + step) * WIDTH..][..WIDTH].copy_from_slice(line);
            }
        }
        first += whole;
    }
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

/// Lines that are packed at once, where vectors turn sixteen of them.
const fn at_once(width: usize) -> usize {
    if width == 8 { 16 } else { width }
}

/// Lines of a panel, or of two of 8, each in memory by itself, term by term.
#[inline(always)]
fn turn_squares<'a, V: Vector, const WIDTH: usize>(
    line: impl Fn(usize) -> &'a [f32] + Copy,
    words: &mut [f32],
) {
    let steps = line(0).len();
    let (panels, _) = words.as_chunks_mut::<WIDTH>();
    for first in (0..at_once(WIDTH)).step_by(16) {
        let lines: [&[f32]; 16] = from_fn(
            #[inline(always)]
            |at| line(first + at),
        );
        for step in (0..steps - steps % 16).step_by(16) {
            // SAFETY: the features, as within `with_vectors!`; sixteen terms of each line. A store writes sixteen
            // words of a panel, or the eight of one: the second mask begins eight words after its address, which is
            // eight before them.
            unsafe {
                let rows = from_fn(
                    #[inline(always)]
                    |at| V::load(lines[at][step..][..16].as_ptr()),
                );
                let terms = V::transpose(rows);
                if WIDTH == 8 {
                    let (low, high) = panels.split_at_mut(steps);
                    let words = low[step..][..16].iter_mut().zip(&mut high[step..][..16]);
                    for (terms, (low, high)) in terms.into_iter().zip(words) {
                        terms.store_masked(low.as_mut_ptr(), 0x00ff);
                        terms.store_masked(high.as_mut_ptr().wrapping_sub(8), 0xff00);
                    }
                } else {
                    for (terms, words) in terms.into_iter().zip(&mut panels[step..][..16]) {
                        terms.store(words[first..][..16].as_mut_ptr());
                    }
                }
            }
        }
    }
    for (panel, words) in panels.chunks_exact_mut(steps).enumerate() {
        let line = |at| line(panel * WIDTH + at);
        turn::<WIDTH>(line, steps - steps % 16, words);
    }
}

/// Terms from `done` on of lines of a panel, each in memory by itself.
#[inline(always)]
fn turn<'a, const WIDTH: usize>(
    line: impl Fn(usize) -> &'a [f32],
    done: usize,
    words: &mut [[f32; WIDTH]],
) {
    let lines: [&[f32]; WIDTH] = from_fn(line);
    for (step, words) in words.iter_mut().enumerate().skip(done) {
        for (line, word) in words.iter_mut().enumerate() {
            *word = lines[line][step];
        }
    }
}
