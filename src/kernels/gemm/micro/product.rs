//! A product of packed matrices: where their words lie, and the tiles that its results are.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::isa::InstructionSet;
use crate::kernels::cpu::simd::vectorise;

/// `left (rows × depth) × right (depth × columns)`, the depth in equal segments.
///
/// In words, element `(m, k)` of segment `s` is at `left[m / R * left_block + m % R * left_row +
/// k * left_step + left_starts[s]]`, `R` being [`InstructionSet::rows`], and element `(k, n)` is at
/// `right[n / 16 * right_block + n % 16 + k * right_step + right_starts[s]]`.
///
/// Rows are read in whole blocks of `R`, columns in whole blocks of 16; what is there beyond the
/// matrix is multiplied and dropped.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct PackedGemm<'a> {
    pub(in crate::kernels) left: &'a [u32],
    pub(in crate::kernels) left_block: usize,
    pub(in crate::kernels) left_row: usize,
    pub(in crate::kernels) left_step: usize,
    /// Where each segment starts; so many segments there are, on the right too.
    pub(in crate::kernels) left_starts: &'a [usize],
    pub(in crate::kernels) right: &'a [u32],
    pub(in crate::kernels) right_block: usize,
    pub(in crate::kernels) right_step: usize,
    pub(in crate::kernels) right_starts: &'a [usize],
    pub(in crate::kernels) rows: usize,
    pub(in crate::kernels) columns: usize,
    /// Words of a sum in one segment, of all terms.
    pub(in crate::kernels) depth: usize,
    /// More than one for [`InstructionSet::AmxBf16x3`] only, and in whole registers.
    pub(in crate::kernels) terms: usize,
    /// Whether columns are positions whose words lie apart, along row panels: tiles of AMX are as wide as can be, and
    /// those of AVX-512 go along rows.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "read by those two"))]
    pub(in crate::kernels) row_panels: bool,
}

impl PackedGemm<'_> {
    /// Checks what the kernels rely on.
    ///
    /// # Panics
    /// When the product reaches beyond its data, or `isa` cannot read it.
    pub(super) fn check(&self, isa: InstructionSet) {
        let last = |count: usize, step: usize| count.saturating_sub(1) * step;
        assert!(!isa.is_amx() || self.left_step == 1, "tile registers read whole rows");
        let whole = isa == InstructionSet::AmxBf16x3 && self.depth.is_multiple_of(16 * self.terms);
        assert!(whole || self.terms == 1, "terms are whole tile registers");
        assert!(self.left_starts.len() == self.right_starts.len(), "segments have two sides");
        let starts = self.left_starts.iter().max().zip(self.right_starts.iter().max());
        let (Some((left_start, start)), true) = (starts, self.depth > 0) else { return };
        let blocks = self.rows.div_ceil(isa.rows());
        let left = last(blocks, self.left_block)
            + last(isa.rows(), self.left_row)
            + last(self.depth, self.left_step)
            + left_start;
        assert!(left < self.left.len(), "the left matrix reaches beyond its words");
        let right = last(self.columns.div_ceil(16), self.right_block)
            + 15
            + last(self.depth, self.right_step)
            + start;
        assert!(right < self.right.len(), "the right matrix reaches beyond its words");
    }
}

/// Columns of a tile of results in memory.
pub(in crate::kernels) const WIDTH: usize = 64;

/// A tile of results: rows of [`WIDTH`] elements.
pub(in crate::kernels) struct Tile<'a> {
    /// Where it lies in the product.
    pub(in crate::kernels) row: usize,
    pub(in crate::kernels) column: usize,
    /// Its size; at most 32 by [`WIDTH`], in whole blocks of [`InstructionSet::rows`] but for the last.
    pub(in crate::kernels) rows: usize,
    pub(in crate::kernels) columns: usize,
    pub(in crate::kernels) sums: &'a [[f32; WIDTH]],
}

impl Tile<'_> {
    /// Whether no sum is infinite or NaN.
    pub(in crate::kernels) fn is_finite(&self) -> bool {
        let mut finite = true;
        vectorise(
            #[inline(always)]
            || {
                for line in self.sums.iter().take(self.rows) {
                    let all = |sums: &[f32]| sums.iter().fold(true, |all, x| all & x.is_finite());
                    finite &= all(&line[..self.columns]);
                }
            },
        );
        finite
    }

    /// Writes it to sums of the whole product, whose rows have `columns` elements.
    pub(super) fn write_to(&self, sums: &mut [MaybeUninit<f32>], columns: usize) {
        for (row, line) in self.sums.iter().enumerate().take(self.rows) {
            let start = (self.row + row) * columns + self.column;
            sums[start..start + self.columns].write_copy_of_slice(&line[..self.columns]);
        }
    }

    /// Adds it to sums of the whole product, whose rows have `columns` elements.
    pub(in crate::kernels) fn add_to(&self, sums: &mut [f32], columns: usize) {
        vectorise(
            #[inline(always)]
            || {
                for (row, line) in self.sums.iter().enumerate().take(self.rows) {
                    let start = (self.row + row) * columns + self.column;
                    let places = &mut sums[start..start + self.columns];
                    places.iter_mut().zip(line).for_each(|(place, sum)| *place += sum);
                }
            },
        );
    }
}

/// `0..len` in parts of at most `most`, as equal as can be.
pub(in crate::kernels) fn equal_parts(
    len: usize,
    most: usize,
) -> impl Iterator<Item = Range<usize>> {
    let count = len.div_ceil(most);
    let bound = move |part: usize| part * len / count;
    (0..count).map(move |part| bound(part)..bound(part + 1))
}
