//! Packs matrices into VNNI words, tile by tile.
//!
//! The unit of work is a tile of 16 rows by 16 words, which sixteen AVX-512 registers hold. A tile is read along
//! the direction in which the matrix is contiguous. If the micro-kernel wants the other direction, the tile is
//! transposed in registers. So no element is read or written one at a time, whatever the strides are.
//!
//! A word is 32 bits, and lies in a lane of a [`Vector`] as the bits of an F32.
#![allow(unsafe_code)]

use half::bf16;

use crate::kernels::cpu::tile::transpose_words;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_bf16_vectors, with_vectors};

/// A matrix, seen from a product: `lines` sums' worth of elements, each of `depth` elements along the
/// sum. Element `(line, k)` is `data[line * line_stride + k * depth_stride]`, and one of the strides is
/// 1. BF16 is packed as it is, F32 into three of it: see [`super::PackedGemm`].
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct MatrixView<'a, T = bf16> {
    pub(in crate::kernels) data: &'a [T],
    pub(in crate::kernels) lines: usize,
    pub(in crate::kernels) depth: usize,
    pub(in crate::kernels) line_stride: usize,
    pub(in crate::kernels) depth_stride: usize,
}

/// What is packed into words of BF16: an element is the exact sum of its numbers in all terms.
pub(in crate::kernels) trait Bf16Terms: Copy + Send + Sync {
    /// How many terms.
    const COUNT: usize;

    /// Writes 16 lines by 16 words of each term: a row per line, or else a row per word, `stride` words
    /// apart; zeros beyond the matrix. The next term's are after those, 16 words or 16 rows further.
    ///
    /// # Safety
    /// The features of `V`; 16 rows can be written. [`MatrixView::check`] has passed.
    unsafe fn pack_tile<V: Vector>(
        view: &MatrixView<'_, Self>,
        from: [usize; 2],
        by_line: bool,
        out: *mut u32,
        stride: usize,
    );
}

impl<'a, T: Bf16Terms> MatrixView<'a, T> {
    /// Some of the lines, and some elements of each.
    pub(in crate::kernels) fn submatrix(
        self,
        line: usize,
        lines: usize,
        k: usize,
        depth: usize,
    ) -> Self {
        let data = &self.data[line * self.line_stride + k * self.depth_stride..];
        Self { data, lines, depth, ..self }
    }

    /// Words of a line, in whole vectors of every term.
    pub(in crate::kernels) fn words(&self) -> usize {
        self.depth.div_ceil(2).next_multiple_of(16) * T::COUNT
    }

    /// Words of lines, and how many from a line to the next, where they can be read as they lie. Those
    /// are pairs along the sum, in whole blocks of 16 lines that begin on cache lines.
    pub(in crate::kernels) fn as_packed(&self) -> Option<(&'a [u32], usize)> {
        let pairs = T::COUNT == 1 && self.depth_stride == 1 && self.depth.is_multiple_of(2);
        let blocks = self.lines.is_multiple_of(16) && self.line_stride.is_multiple_of(32);
        let whole = pairs && blocks && self.data.as_ptr().addr().is_multiple_of(64);
        // SAFETY: two BF16 are a word of their bits, the lower one first, as packing writes it.
        let (_, words, _) = unsafe { self.data.align_to::<u32>() };
        whole.then_some((words, self.line_stride / 2))
    }

    /// Writes `(line, word)`, each line `stride` words after the one before; of the first `lines`
    /// in whole blocks of 16.
    ///
    /// # Panics
    /// When there is no room, the matrix reaches beyond its data, or the processor has no vectors
    /// [for BF16](Vectors::for_bf16).
    pub(in crate::kernels) fn pack_lines(&self, stride: usize, out: &mut [u32]) {
        self.pack(true, stride, out);
    }

    /// Writes `(line / 16, word, line % 16)`.
    ///
    /// # Panics
    /// As [`Self::pack_lines`].
    pub(in crate::kernels) fn pack_blocks(&self, out: &mut [u32]) {
        self.pack(false, self.words(), out);
    }

    fn pack(&self, by_line: bool, stride: usize, out: &mut [u32]) {
        // SAFETY: the features of the vectors.
        with_bf16_vectors!(V => unsafe { self.pack_tiles::<V>(by_line, stride, out) });
    }

    /// [`Self::pack_lines`], or else [`Self::pack_blocks`] with a stride of [`Self::words`].
    ///
    /// # Safety
    /// The features of `V`.
    #[inline(always)]
    pub(super) unsafe fn pack_tiles<V: Vector>(
        &self,
        by_line: bool,
        stride: usize,
        out: &mut [u32],
    ) {
        assert!(self.words() <= stride && self.lines.next_multiple_of(16) * stride <= out.len());
        self.check();
        // Words from a word of a line to the next, and from a row of a tile to the next.
        let (across, down) = if by_line { (1, stride) } else { (16, 16) };
        let row = if by_line { 16 * T::COUNT } else { 256 * T::COUNT - 15 * 16 };
        for (line, word) in self.tile_origins() {
            let out = &mut out[line * stride + word * across * T::COUNT..][..15 * down + row];
            // SAFETY: the caller's; `check` has seen the data, and `out` has 16 rows.
            unsafe { T::pack_tile::<V>(self, [line, word], by_line, out.as_mut_ptr(), down) };
        }
    }

    /// Lines and words of a term, 16 by 16, what shares cache lines after each other.
    fn tile_origins(&self) -> impl Iterator<Item = (usize, usize)> + use<T> {
        let (lines, words) = (self.lines, self.words() / T::COUNT);
        let beside = if self.depth_stride == 1 { 16 } else { 64 };
        (0..lines).step_by(beside).flat_map(move |first| {
            let end = lines.min(first + beside);
            let across = move |word| (first..end).step_by(16).map(move |line| (line, word));
            (0..words).step_by(16).flat_map(across)
        })
    }

    fn check(&self) {
        assert!(self.line_stride == 1 || self.depth_stride == 1, "a matrix has rows or columns");
        if self.lines * self.depth > 0 {
            let last = (self.lines - 1) * self.line_stride + (self.depth - 1) * self.depth_stride;
            assert!(last < self.data.len(), "the matrix reaches beyond its data");
        }
    }
}

impl Bf16Terms for bf16 {
    const COUNT: usize = 1;

    #[inline(always)]
    unsafe fn pack_tile<V: Vector>(
        view: &MatrixView<'_, Self>,
        [line, word]: [usize; 2],
        by_line: bool,
        out: *mut u32,
        stride: usize,
    ) {
        let along = view.depth_stride == 1;
        // SAFETY: the caller's; the stride of 1 is that of the direction.
        let mut tile: [V; 16] =
            unsafe { if along { view.along(line, word) } else { view.across(line, word) } };
        if along != by_line {
            // SAFETY: the caller's.
            tile = unsafe { V::transpose(tile) };
        }
        for (row, vector) in tile.into_iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { vector.store(out.add(row * stride).cast()) };
        }
    }
}

impl MatrixView<'_, bf16> {
    /// A row per line, 16 words from `word` on; zeros beyond the matrix.
    ///
    /// # Safety
    /// The features of `V`; elements along the sum follow each other.
    #[inline(always)]
    unsafe fn along<V: Vector>(&self, line: usize, word: usize) -> [V; 16] {
        let left = self.depth.saturating_sub(2 * word);
        let mask = if left >= 32 { u32::MAX } else { (1 << left) - 1 };
        // SAFETY: the caller's.
        let mut tile = [unsafe { V::zero() }; 16];
        for (i, vector) in tile.iter_mut().enumerate().take(self.lines - line) {
            let at = self.data.as_ptr().wrapping_add((line + i) * self.line_stride + 2 * word);
            // SAFETY: the caller's; only elements of the matrix are in the mask.
            *vector = unsafe { V::load_pairs(at, mask) };
        }
        tile
    }

    /// A row per word, 16 lines from `line` on; zeros beyond the matrix.
    ///
    /// # Safety
    /// The features of `V`; elements of consecutive lines follow each other.
    #[inline(always)]
    unsafe fn across<V: Vector>(&self, line: usize, word: usize) -> [V; 16] {
        let left = self.lines - line;
        let mask = if left >= 16 { u16::MAX } else { (1 << left) - 1 };
        let elements = self.depth.saturating_sub(2 * word);
        let from = self.data.as_ptr().wrapping_add(line + 2 * word * self.depth_stride);
        // SAFETY: the caller's.
        let mut tile = [unsafe { V::zero() }; 16];
        for (i, vector) in tile.iter_mut().enumerate().take(elements.div_ceil(2)) {
            let first = from.wrapping_add(2 * i * self.depth_stride);
            let second = if 2 * i + 1 < elements { mask } else { 0 };
            // SAFETY: the caller's; only elements of the matrix are in the masks.
            *vector = unsafe {
                let last: V = V::load_bf16(first.wrapping_add(self.depth_stride), second);
                V::load_bf16(first, mask).shift_down().or(last)
            };
        }
        tile
    }
}

/// Writes the transpose of up to 16 rows of `columns` words, `stride` apart, to `dst`, as `(column, row)`: 16 rows, and
/// columns in whole tiles of 16. Those that are not there are zeros.
///
/// # Panics
/// When they do not fit, or the processor has no such vectors.
pub(in crate::kernels) fn transpose(
    src: &[u32],
    rows: usize,
    stride: usize,
    columns: usize,
    dst: &mut [u32],
    vectors: Vectors,
) {
    assert!(rows <= 16 && columns.next_multiple_of(16) * 16 <= dst.len());
    assert!(rows * columns == 0 || (rows - 1) * stride + columns <= src.len());
    with_vectors!(vectors, V => {
        for column in (0..columns).step_by(16) {
            let src: *const f32 = src.as_ptr().wrapping_add(column).cast();
            let dst: *mut f32 = dst[column * 16..].as_mut_ptr().cast();
            let mask = first_lanes(columns - column);
            // SAFETY: the features; the rows have the columns of the mask, and `dst` a whole tile, as asserted.
            unsafe {
                if rows == 16 && mask == u16::MAX {
                    transpose_words::<V>(src, stride, dst, 16);
                    continue;
                }
                let mut tile = [V::zero(); 16];
                for (row, vector) in tile.iter_mut().enumerate().take(rows) {
                    *vector = V::load_masked(src.wrapping_add(row * stride), mask);
                }
                for (row, vector) in V::transpose(tile).into_iter().enumerate() {
                    vector.store(dst.wrapping_add(row * 16));
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::kernels::gemm::micro::InstructionSet;

    #[test]
    fn a_transpose_has_zeros_beyond_its_rows_and_columns() {
        const OTHER: u32 = 0xdead_beef;
        let mut rng = ChaCha8Rng::seed_from_u64(5);
        for isa in InstructionSet::of_f32() {
            for (rows, columns, stride) in
                [(16, 16, 16), (1, 1usize, 1), (16, 33, 40), (7, 31, 31), (15, 48, 50), (0, 5, 5)]
            {
                // No more than what is read.
                let len = if rows == 0 { 0 } else { (rows - 1) * stride + columns };
                let src: Vec<u32> = (0..len).map(|_| rng.random()).collect();
                let whole = columns.next_multiple_of(16) * 16;
                let mut dst = vec![OTHER; whole + 5];
                transpose(&src, rows, stride, columns, &mut dst, isa.vectors());
                for (at, &word) in dst.iter().enumerate() {
                    let (column, row) = (at / 16, at % 16);
                    let expected = match () {
                        () if at >= whole => OTHER,
                        () if row < rows && column < columns => src[row * stride + column],
                        () => 0,
                    };
                    assert_eq!(word, expected, "{isa:?}: row {row}, column {column} of {columns}");
                }
            }
        }
    }
}
