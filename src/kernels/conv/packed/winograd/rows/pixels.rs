//! Vectors of tiles, read from images and written to them.
#![allow(unsafe_code)]

use super::grid::{TileGrid, VectorTiles};
use crate::kernels::conv::packed::rows::{Stored, bits};
use crate::kernels::cpu::prefetch::{is_far, prefetch_at};
use crate::kernels::cpu::vector::Vector;
use crate::kernels::gemm::micro::Rounded;

impl TileGrid {
    /// Tiles of a channel, four rows of four pixels each.
    ///
    /// Pixels of the padding are zero. So are those of lanes without a tile, or they are others of
    /// the same rows.
    ///
    /// # Safety
    /// The features of `V`; `x` is the channel in the image of `place`.
    #[inline(always)]
    pub(super) unsafe fn read<V: Vector, S: Stored>(
        &self,
        place: VectorTiles,
        x: *const S,
    ) -> [[V; 4]; 4] {
        let TileGrid { size: (height, width), padding, .. } = *self;
        // SAFETY: the features.
        let mut tile = unsafe { [[V::zero(); 4]; 4] };
        let first = 2 * place.column as isize - padding.1 as isize;
        let inside = bits(-first, width as isize - first);
        for (i, tile) in tile.iter_mut().enumerate() {
            let Some(y) = (2 * place.row + i).checked_sub(padding.0) else { continue };
            if y >= height {
                continue;
            }
            let row = x.wrapping_add(y * width).wrapping_offset(first);
            // Pixels of even columns are the left ones of the tiles' pairs, those of odd columns the right ones. The
            // halo's are two columns further on.
            for half in 0..2 {
                let at = 2 * half;
                // SAFETY: the features; the pixels inside lie in the row of an image, and no others are in the masks.
                unsafe {
                    let low = S::load::<V>(row.wrapping_add(at), (inside >> at) as u16);
                    let high =
                        S::load::<V>(row.wrapping_add(at + 16), (inside >> (at + 16)) as u16);
                    [tile[at], tile[at + 1]] = [low.evens(high), low.odds(high)];
                }
            }
        }
        tile
    }

    /// Asks for the pixels of these tiles in the channel after the next, without the halo, for which other tiles ask. `x` as
    /// [`Self::read`] has it.
    #[inline(always)]
    pub(super) fn prefetch_ahead<S>(&self, place: VectorTiles, x: *const S) {
        let (height, width) = self.size;
        if !is_far::<S>(height * width) {
            return;
        }
        let x = x.wrapping_add(2 * height * width + 2 * place.column);
        for y in 2 * place.row..height.min(2 * place.row + 2) {
            prefetch_at(x.wrapping_add(y * width), width.min(32));
        }
    }

    /// Writes the pixels, of tiles of two by two, that lie in the image. Whether they are all finite.
    ///
    /// # Safety
    /// The features of `V`; `out` is the channel in the image of `place`.
    #[inline(always)]
    pub(super) unsafe fn write<V: Vector, O: Rounded>(
        &self,
        place: VectorTiles,
        tile: [[V; 2]; 2],
        out: *mut O,
    ) -> bool {
        let (height, width) = self.out_size;
        let first = 2 * place.column;
        let inside = bits(0, (width - first) as isize);
        let mut finite = true;
        for (i, [left, right]) in tile.into_iter().enumerate() {
            let y = 2 * place.row + i;
            if y >= height {
                continue;
            }
            let row = out.wrapping_add(y * width + first);
            // SAFETY: the features; the pixels of the masks lie in the row.
            unsafe {
                for (half, pixels) in left.interleave(right).into_iter().enumerate() {
                    let mask = (inside >> (16 * half)) as u16;
                    finite &= pixels.is_finite(mask);
                    O::store(row.wrapping_add(16 * half), mask, pixels);
                }
            }
        }
        finite
    }
}
