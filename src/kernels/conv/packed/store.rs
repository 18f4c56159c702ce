//! Rounds tiles of sums into NCHW images.
#![allow(unsafe_code)]

use crate::kernels::cpu::vector::{Avx512, Vector, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, Rounded, Tile, WIDTH};

/// A part of a vector of sums that goes to consecutive pixels.
#[derive(Clone, Copy, Default)]
struct Piece {
    vector: usize,
    mask: u16,
    /// Where lane 0 would go, from the start of the channel in the first image.
    offset: isize,
}

/// Where the columns of tiles go: lines of `images` runs of consecutive pixels.
pub(super) struct NchwStore {
    /// Columns of a run.
    pub(super) run: usize,
    /// Runs of a line.
    pub(super) images: usize,
    /// Columns of a line, with those that go nowhere.
    pub(super) line: usize,
    /// The pixel of the first column.
    pub(super) start: usize,
    /// Pixels from a line to the next, from a channel to the next, and from an image to the next.
    pub(super) row: usize,
    pub(super) channel: usize,
    pub(super) image: usize,
}

impl NchwStore {
    /// Writes a tile of a unit, plus the bias of each row, to `out`, which starts with the channel of row 0.
    ///
    /// # Safety
    /// All places of the tile lie in `len` elements from `out` on.
    pub(super) unsafe fn store<O: Rounded>(
        &self,
        isa: InstructionSet,
        tile: &Tile<'_>,
        bias: Option<&[f32]>,
        out: *mut O,
        len: usize,
    ) {
        // SAFETY: an `InstructionSet` has the features; the caller's.
        unsafe {
            match isa.rounds_ftz() {
                true => self.write_ftz(tile, bias, out, len),
                false => with_vectors!(isa.vectors(), V => {
                    self.write::<O, V, false>(tile, bias, out, len)
                }),
            }
        }
    }

    /// # Safety
    /// As [`Self::write`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn write_ftz<O: Rounded>(
        &self,
        tile: &Tile<'_>,
        bias: Option<&[f32]>,
        out: *mut O,
        len: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { self.write::<O, Avx512, true>(tile, bias, out, len) }
    }

    /// Inlined where the features are.
    ///
    /// # Safety
    /// The features of `V`, and AVX-512 BF16 if `FTZ`; all places of the tile lie in `len` elements from `out` on.
    #[inline(always)]
    unsafe fn write<O: Rounded, V: Vector, const FTZ: bool>(
        &self,
        tile: &Tile<'_>,
        bias: Option<&[f32]>,
        out: *mut O,
        len: usize,
    ) {
        let bias = |row| bias.map_or(0.0, |bias| bias[tile.row + row]);
        let mut pieces = [Piece::default(); 2 * WIDTH];
        let mut count = 0;
        let mut column = 0;
        let mut end = 0;
        while column < tile.columns {
            let at = tile.column + column;
            let (vector, lane) = (column / 16, column % 16);
            let (row, within) = (at / self.line, at % self.line);
            let (image, pixel) = (within / self.run, within % self.run);
            if image >= self.images {
                column += self.line - within;
                continue;
            }
            let lanes = (16 - lane).min(self.run - pixel).min(tile.columns - column);
            let start = self.start + row * self.row + image * self.image + pixel;
            let mask = (((1u32 << lanes) - 1) << lane) as u16;
            pieces[count] = Piece { vector, mask, offset: start as isize - lane as isize };
            end = end.max(start + lanes);
            count += 1;
            column += lanes;
        }
        assert!((tile.row + tile.rows - 1) * self.channel + end <= len);
        for (row, sums) in tile.sums.iter().enumerate().take(tile.rows) {
            let channel = out.wrapping_add((tile.row + row) * self.channel);
            // SAFETY: the features.
            let bias = unsafe { V::splat(bias(row)) };
            for piece in &pieces[..count] {
                let sums = sums.as_chunks::<16>().0[piece.vector].as_ptr();
                // SAFETY: 16 sums; the places of the mask were checked to lie in `out`.
                unsafe {
                    let sums = V::load(sums).add(bias);
                    let at = channel.wrapping_offset(piece.offset);
                    match FTZ {
                        true => O::store_ftz(at, piece.mask, sums),
                        false => O::store(at, piece.mask, sums),
                    }
                }
            }
        }
    }
}
