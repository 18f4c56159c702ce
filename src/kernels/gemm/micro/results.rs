//! Products rounded into rows of results.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::epilogue::Rounded;
use super::isa::InstructionSet;
use super::product::PackedGemm;
use super::target;
use crate::kernels::cpu::uninit::zeroed;

impl PackedGemm<'_> {
    /// Adds the product to sums, whose rows have `columns` elements.
    ///
    /// # Panics
    /// As [`Self::multiply`], and when there are fewer sums.
    pub(in crate::kernels) fn add_to(&self, isa: InstructionSet, sums: &mut [f32], columns: usize) {
        if isa != InstructionSet::AmxBf16 || self.rows * self.columns == 0 {
            // F32 as BF16x3 too: sums of sums are the more exact ones.
            return self.multiply(isa, |tile| tile.add_to(sums, columns));
        }
        assert!(isa.is_runnable(), "{isa:?} is not available");
        self.check(isa);
        target::add_to_tiles(self, sums, columns);
    }

    /// As [`Self::add_to`], but overwrites sums, which may be uninitialised.
    ///
    /// # Panics
    /// As there.
    pub(in crate::kernels) fn write_to(
        &self,
        isa: InstructionSet,
        sums: &mut [MaybeUninit<f32>],
        columns: usize,
    ) {
        if isa.is_amx() {
            return self.add_to(isa, zeroed(sums), columns);
        }
        self.multiply(isa, |tile| tile.write_to(sums, columns));
    }

    /// Writes the product, plus the bias of each column, to rows of results `stride` elements apart. Subnormals
    /// may become zero, as they are to what multiplies pairs.
    ///
    /// # Safety
    /// All results can be written, and nobody else reads or writes them.
    ///
    /// # Panics
    /// As [`Self::multiply`], and when the bias has fewer columns.
    pub(in crate::kernels) unsafe fn round<O: Rounded>(
        &self,
        isa: InstructionSet,
        bias: Option<&[f32]>,
        out: *mut MaybeUninit<O>,
        stride: usize,
    ) {
        assert!(isa.is_runnable(), "{isa:?} is not available");
        assert!(bias.is_none_or(|bias| bias.len() >= self.columns));
        let interleaved = isa == InstructionSet::AmxBf16
            && self.terms == 1
            && self.left_starts.len() == 1
            && self.depth.is_multiple_of(16)
            && isa.rounds_ftz();
        let block = target::BLOCK;
        let whole = |lines: usize| if interleaved { lines / block * block } else { 0 };
        let (rows, columns) = (whole(self.rows), whole(self.columns));
        if rows * columns > 0 {
            self.check(isa);
            let whole = PackedGemm { rows, columns, ..*self };
            // SAFETY: an `InstructionSet` has tiles; what else is asked for, as just seen, and the caller's.
            unsafe { target::round_tiles(&whole, bias, out, stride) };
        }
        // What is left of the columns, and of the rows.
        let columns = if rows > 0 { columns } else { 0 };
        for (rows, columns) in
            [(0..self.rows, columns..self.columns), (rows..self.rows, 0..columns)]
        {
            if rows.is_empty() || columns.is_empty() {
                continue;
            }
            let gemm = PackedGemm {
                left: &self.left[rows.start / isa.rows() * self.left_block..],
                right: &self.right[columns.start / 16 * self.right_block..],
                rows: rows.len(),
                columns: columns.len(),
                ..*self
            };
            gemm.multiply(isa, |tile| {
                let column = columns.start + tile.column;
                let bias = bias.map(|bias| &bias[column..]);
                let out = out.wrapping_add((rows.start + tile.row) * stride + column);
                // SAFETY: the caller's.
                unsafe { O::store_tile(&tile, bias, out, stride) };
            });
        }
    }
}
