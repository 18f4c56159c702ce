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
    /// The features of `V`; `x` is the channel in the first image of `place`, and those in the others follow `image`
    /// elements apart.
    #[inline(always)]
    pub(super) unsafe fn read<V: Vector, S: Stored>(
        &self,
        place: VectorTiles,
        x: *const S,
        image: usize,
    ) -> [[V; 4]; 4] {
        let TileGrid { size: (height, width), padding, together, .. } = *self;
        // SAFETY: the features.
        let zero = unsafe { V::zero() };
        let mut tile = [[zero; 4]; 4];
        let first = 2 * place.column as isize - padding.1 as isize;
        let inside = bits(-first, width as isize - first);
        for (i, tile) in tile.iter_mut().enumerate() {
            let Some(y) = (2 * place.row + i).checked_sub(padding.0) else { continue };
            if y >= height {
                continue;
            }
            let row = x.wrapping_add(y * width).wrapping_offset(first);
            // Image `n` takes `lanes` lanes from `lane` on, and its pixels from `at` on.
            macro_rules! load {
                ($n:expr, $at:expr, $lane:expr, $lanes:expr) => {{
                    let mask = ((inside >> $at) as u16 & (u16::MAX >> (16 - $lanes))) << $lane;
                    let at = row.wrapping_add($n * image + $at).wrapping_sub($lane);
                    // SAFETY: the pixels inside lie in the row of an image that is there; no others are in the mask.
                    if $n < place.images { unsafe { S::load::<V>(at, mask) } } else { zero }
                }};
            }
            // Pixels of even columns are the left ones of the tiles' pairs, those of odd columns the right ones. The
            // halo's are two columns further on.
            for half in 0..2 {
                let at = 2 * half;
                let (low, high) = match together {
                    1 => (load!(0, at, 0, 16), load!(0, at + 16, 0, 16)),
                    2 => (load!(0, at, 0, 16), load!(1, at, 0, 16)),
                    _ => {
                        let [a, b] = [load!(0, at, 0, 8), load!(1, at, 8, 8)];
                        let [c, d] = [load!(2, at, 0, 8), load!(3, at, 8, 8)];
                        // SAFETY: the features.
                        unsafe { (a.or(b), c.or(d)) }
                    }
                };
                // SAFETY: the features.
                [tile[2 * half], tile[2 * half + 1]] = unsafe { [low.evens(high), low.odds(high)] };
            }
        }
        tile
    }

    /// Asks for the pixels of these tiles in the channel after the next, without the halo, for which other tiles ask. `x`
    /// and `image` as [`Self::read`] has them.
    #[inline(always)]
    pub(super) fn prefetch_ahead<S>(&self, place: VectorTiles, x: *const S, image: usize) {
        let (height, width) = self.size;
        if !is_far::<S>(height * width) {
            return;
        }
        let x = x.wrapping_add(2 * height * width + 2 * place.column);
        for y in 2 * place.row..height.min(2 * place.row + 2) {
            for n in 0..place.images {
                prefetch_at(x.wrapping_add(n * image + y * width), width.min(32));
            }
        }
    }

    /// Writes the pixels, of tiles of two by two, that lie in the images. Whether they are all finite.
    ///
    /// # Safety
    /// The features of `V`; `out` is the channel in the first image of `place`, and those in the others follow `image`
    /// elements apart.
    #[inline(always)]
    pub(super) unsafe fn write<V: Vector, O: Rounded>(
        &self,
        place: VectorTiles,
        tile: [[V; 2]; 2],
        out: *mut O,
        image: usize,
    ) -> bool {
        let TileGrid { out_size: (height, width), together, .. } = *self;
        let first = 2 * place.column;
        let inside = bits(0, (width - first) as isize);
        let mut finite = true;
        for (i, [left, right]) in tile.into_iter().enumerate() {
            let y = 2 * place.row + i;
            if y >= height {
                continue;
            }
            let row = out.wrapping_add(y * width + first);
            // SAFETY: the features.
            let pixels = unsafe { left.interleave(right) };
            macro_rules! put {
                ($half:expr, $at:expr, $mask:expr) => {
                    // SAFETY: the pixels of the mask lie in the row.
                    unsafe {
                        finite &= pixels[$half].is_finite($mask);
                        O::store($at, $mask, pixels[$half]);
                    }
                };
            }
            if together == 1 {
                put!(0, row, inside as u16);
                put!(1, row.wrapping_add(16), (inside >> 16) as u16);
                continue;
            }
            for n in 0..place.images {
                let row = row.wrapping_add(n * image);
                match together {
                    2 => put!(n, row, inside as u16),
                    _ => put!(n / 2, row.wrapping_sub(n % 2 * 8), (inside as u16) << (n % 2 * 8)),
                }
            }
        }
        finite
    }
}
