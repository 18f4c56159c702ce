//! Rounds tiles of sums into the channels of NHWC pixels.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use crate::kernels::cpu::vector::{Vector, with_ftz_vectors, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, Rounded, Tile, store_all};

/// Maps the product's rows to output pixels: of every `positions` rows, the first `columns` are pixels, the rest are
/// dropped.
#[derive(Clone, Copy, Debug)]
pub(super) struct NhwcStore {
    pub(super) positions: usize,
    pub(super) columns: usize,
    /// The pixel of the first position, and pixels from a line to the next and from a position to the
    /// next.
    pub(super) start: usize,
    pub(super) row: usize,
    pub(super) column: usize,
    /// Channels of a pixel.
    pub(super) channels: usize,
}

impl NhwcStore {
    /// Writes a tile that `isa` computed, plus the bias of each column, to the channels from `from` on.
    pub(super) fn store<O: Rounded>(
        &self,
        isa: InstructionSet,
        tile: &Tile<'_>,
        from: usize,
        bias: Option<&[f32]>,
        out: &mut [MaybeUninit<O>],
    ) {
        let last = tile.row + tile.rows - 1;
        let end = self.start + last / self.positions * self.row + self.columns * self.column;
        let end = (end - self.column) * self.channels + from + tile.columns;
        assert!(end <= out.len() && from + tile.columns <= self.channels);
        assert!(bias.is_none_or(|bias| bias.len() >= tile.columns));
        let (bias, out) = (bias.map(<[f32]>::as_ptr), out.as_mut_ptr().cast());
        // SAFETY: an `InstructionSet` has the features. The last pixel of the last line is in `out`, as asserted.
        unsafe {
            match isa.rounds_ftz() {
                true => with_ftz_vectors!(V => {
                    self.write::<O, V, true>(tile, from, bias, out)
                }),
                false => with_vectors!(isa.vectors(), V => {
                    self.write::<O, V, false>(tile, from, bias, out)
                }),
            }
        }
    }

    /// Inlined where the features are.
    ///
    /// # Safety
    /// The features of `V`, within `with_ftz_vectors!` if `FTZ`; the pixels of all lines of the tile in `out`, the bias of
    /// its columns.
    #[inline(always)]
    unsafe fn write<O: Rounded, V: Vector, const FTZ: bool>(
        &self,
        tile: &Tile<'_>,
        from: usize,
        bias: Option<*const f32>,
        out: *mut O,
    ) {
        let (mut line, mut position) = (tile.row / self.positions, tile.row % self.positions);
        for sums in &tile.sums[..tile.rows] {
            if position < self.columns {
                let pixel = self.start + line * self.row + position * self.column;
                let out = out.wrapping_add(pixel * self.channels + from);
                // SAFETY: as many sums, numbers in the bias and elements from `out` on as columns.
                unsafe {
                    let out = std::slice::from_raw_parts_mut(out.cast(), tile.columns);
                    store_all::<O, V, FTZ>(sums.as_ptr(), bias, out);
                }
            }
            position += 1;
            if position == self.positions {
                (line, position) = (line + 1, 0);
            }
        }
    }
}
