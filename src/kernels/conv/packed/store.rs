//! Output images, which several threads write, and how tiles of sums are rounded into those in NCHW.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use crate::kernels::cpu::vector::{Vector, with_ftz_vectors, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, Rounded, Tile};

/// A part of a vector of sums that goes to consecutive pixels.
#[derive(Clone, Copy, Debug)]
struct Piece {
    mask: u16,
    /// Where lane 0 would go, from the start of the channel in the first image.
    offset: isize,
}

/// Where columns of tiles go: lines of `images` runs of consecutive pixels.
pub(super) struct Runs {
    /// Columns of a run.
    pub(super) run: usize,
    /// Runs of a line.
    pub(super) images: usize,
    /// Columns of a line, with those that go nowhere.
    pub(super) line: usize,
    /// The pixel of the first column.
    pub(super) start: usize,
    /// Pixels from a line to the next, and from an image to the next.
    pub(super) row: usize,
    pub(super) image: usize,
}

/// Where every vector of columns goes.
pub(super) struct NchwStore {
    pieces: Vec<Piece>,
    /// Where the pieces of each vector start, and where the last one's end.
    starts: Vec<usize>,
    /// One more than the last place of a channel.
    end: usize,
    /// Pixels from a channel to the next.
    channel: usize,
}

impl NchwStore {
    /// Of so many columns.
    pub(super) fn new(runs: &Runs, columns: usize, channel: usize) -> Self {
        let (mut pieces, mut starts, mut end) = (Vec::new(), Vec::new(), 0);
        for vector in (0..columns).step_by(16) {
            starts.push(pieces.len());
            let (mut at, last) = (vector, columns.min(vector + 16));
            while at < last {
                let (row, within) = (at / runs.line, at % runs.line);
                let (image, pixel) = (within / runs.run, within % runs.run);
                if image >= runs.images {
                    at += runs.line - within;
                    continue;
                }
                let (lane, lanes) = (at - vector, (runs.run - pixel).min(last - at));
                let start = runs.start + row * runs.row + image * runs.image + pixel;
                let mask = (((1u32 << lanes) - 1) << lane) as u16;
                pieces.push(Piece { mask, offset: start as isize - lane as isize });
                end = end.max(start + lanes);
                at += lanes;
            }
        }
        starts.push(pieces.len());
        Self { pieces, starts, end, channel }
    }

    /// Writes a tile that `isa` computed, plus the bias of each row, to `out`, which starts with the channel of row 0.
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
                true => with_ftz_vectors!(V => {
                    self.write::<O, V, true>(tile, bias, out, len)
                }),
                false => with_vectors!(isa.vectors(), V => {
                    self.write::<O, V, false>(tile, bias, out, len)
                }),
            }
        }
    }

    /// Inlined where the features are.
    ///
    /// # Safety
    /// The features of `V`, within `with_ftz_vectors!` if `FTZ`; all places of the tile lie in `len` elements from `out` on.
    #[inline(always)]
    unsafe fn write<O: Rounded, V: Vector, const FTZ: bool>(
        &self,
        tile: &Tile<'_>,
        bias: Option<&[f32]>,
        out: *mut O,
        len: usize,
    ) {
        let bias = |row| bias.map_or(0.0, |bias| bias[tile.row + row]);
        let vectors = tile.column / 16..(tile.column + tile.columns).div_ceil(16);
        assert!(tile.column.is_multiple_of(16) && vectors.end < self.starts.len());
        assert!((tile.row + tile.rows - 1) * self.channel + self.end <= len);
        for (row, sums) in tile.sums.iter().enumerate().take(tile.rows) {
            let channel = out.wrapping_add((tile.row + row) * self.channel);
            // SAFETY: the features.
            let bias = unsafe { V::splat(bias(row)) };
            for (sums, vector) in sums.as_chunks::<16>().0.iter().zip(vectors.clone()) {
                // SAFETY: 16 sums.
                let sums = unsafe { V::load(sums.as_ptr()).add(bias) };
                for piece in &self.pieces[self.starts[vector]..self.starts[vector + 1]] {
                    let at = channel.wrapping_offset(piece.offset);
                    // SAFETY: the places of the mask were checked to lie in `out`.
                    unsafe {
                        match FTZ {
                            true => O::store_ftz(at, piece.mask, sums),
                            false => O::store(at, piece.mask, sums),
                        }
                    }
                }
            }
        }
    }
}

/// Output images that several threads write, each other elements.
#[derive(Debug)]
pub(super) struct OutputImages<O> {
    pub(super) at: *mut O,
    pub(super) len: usize,
}

// SAFETY: no two parts write the same place, and none reads.
unsafe impl<O: Send> Sync for OutputImages<O> {}

impl<O> OutputImages<O> {
    pub(super) fn of(out: &mut [MaybeUninit<O>]) -> Self {
        Self { at: out.as_mut_ptr().cast(), len: out.len() }
    }

    /// The elements from `start` on.
    pub(super) fn from(&self, start: usize) -> Self {
        assert!(start <= self.len);
        Self { at: self.at.wrapping_add(start), len: self.len - start }
    }
}
