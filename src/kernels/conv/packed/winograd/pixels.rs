//! Vectors of tiles, read from images and written to them.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::super::rows::{Stored, bits};
use super::grid::{Grid, VectorTiles};
use crate::kernels::gemm::micro::Rounded;

/// Picks tiles from rows of pixels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader {
    grid: Grid,
    /// For each column of a tile, the pixel that each lane takes, of those in two vectors.
    pixels: [[i32; 16]; 4],
    /// The lanes that have such a pixel.
    masks: [u16; 4],
}

impl Reader {
    pub(super) fn new(grid: &Grid) -> Self {
        let mut reader = Self { grid: *grid, pixels: [[0; 16]; 4], masks: [0; 4] };
        let (columns, each) = (grid.columns(), 32 / grid.together);
        for lane in 0..16 {
            for j in 0..4 {
                let image = if grid.together == 1 { 0 } else { lane / columns };
                let pixel = match grid.together {
                    // The last two columns are loaded by themselves, two pixels further on.
                    1 => Some(2 * lane + j % 2),
                    _ => (2 * (lane % columns) + j).checked_sub(grid.padding.1),
                };
                let inside = |pixel: &usize| grid.together == 1 || *pixel < grid.size.1;
                if let (Some(pixel), true) = (pixel.filter(inside), image < grid.together) {
                    reader.pixels[j][lane] = (image * each + pixel) as i32;
                    reader.masks[j] |= 1 << lane;
                }
            }
        }
        reader
    }

    /// Tiles of a channel, `N` rows of `N` pixels each: four, or the two that are not halo.
    ///
    /// Pixels of the padding are zero. So are those of lanes without a tile, or they are others of
    /// the same rows.
    ///
    /// # Safety
    /// AVX-512 F, BW, DQ and VL; `x` is the channel in the first image of `place`, and those in the
    /// others follow `image` elements apart.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    #[inline]
    pub(super) unsafe fn read<S: Stored, const N: usize>(
        &self,
        place: VectorTiles,
        x: *const S,
        image: usize,
    ) -> [[__m512; N]; N] {
        let grid = &self.grid;
        let (height, width) = grid.size;
        let zero = _mm512_setzero_ps();
        let mut tile = [[zero; N]; N];
        let first = 2 * place.column as isize - grid.padding.1 as isize;
        let inside = bits(-first, width as isize - first);
        let whole = bits(0, width as isize) as u16;
        // SAFETY: a column has 16 pixels.
        let pick = |j: usize| unsafe { _mm512_loadu_si512(self.pixels[j].as_ptr().cast()) };
        for (i, tile) in tile.iter_mut().enumerate() {
            let Some(y) = (2 * place.row + i).checked_sub(grid.padding.0) else { continue };
            if y >= height {
                continue;
            }
            let row = x.wrapping_add(y * width);
            if grid.together == 1 {
                let row = row.wrapping_offset(first);
                // SAFETY: the pixels inside lie in the row, and no others are in the masks.
                let load = |at: usize| unsafe {
                    (
                        S::load(row.wrapping_add(at), (inside >> at) as u16),
                        S::load(row.wrapping_add(at + 16), (inside >> (at + 16)) as u16),
                    )
                };
                for half in 0..N / 2 {
                    let (low, high) = load(2 * half);
                    tile[2 * half] = _mm512_permutex2var_ps(low, pick(0), high);
                    tile[2 * half + 1] = _mm512_permutex2var_ps(low, pick(1), high);
                }
                continue;
            }
            // SAFETY: the row lies in the image, and nothing else is in the mask.
            let load = |n: usize, lane: usize| unsafe {
                match n < place.images {
                    true => S::load(row.wrapping_add(n * image).wrapping_sub(lane), whole << lane),
                    false => zero,
                }
            };
            let (low, high) = match grid.together {
                2 => (load(0, 0), load(1, 0)),
                _ => (_mm512_or_ps(load(0, 0), load(1, 8)), _mm512_or_ps(load(2, 0), load(3, 8))),
            };
            for (j, lanes) in tile.iter_mut().enumerate() {
                *lanes = _mm512_maskz_permutex2var_ps(self.masks[j], low, pick(j), high);
            }
        }
        tile
    }
}

/// Puts tiles of two by two pixels into rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer {
    grid: Grid,
    /// Of two vectors of pixels, the lane that each is, in the tiles' left pixels or their right.
    lanes: [[i32; 16]; 2],
}

impl Writer {
    pub(super) fn new(grid: &Grid) -> Self {
        let mut writer = Self { grid: *grid, lanes: [[0; 16]; 2] };
        let each = 32 / grid.together;
        for pixel in 0..32 {
            let tile = pixel / each * grid.columns() + pixel % each / 2;
            // A pixel beyond its row is not written.
            let tile = if grid.together == 1 { pixel / 2 } else { tile.min(15) };
            writer.lanes[pixel / 16][pixel % 16] = (tile + 16 * (pixel % 2)) as i32;
        }
        writer
    }

    /// Writes the pixels that lie in the images. Whether they are all finite.
    ///
    /// # Safety
    /// AVX-512 F, BW, DQ and VL; `out` is the channel in the first image of `place`, and those in
    /// the others follow `image` elements apart.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    #[inline]
    pub(super) unsafe fn write<O: Rounded>(
        &self,
        place: VectorTiles,
        tile: [[__m512; 2]; 2],
        out: *mut O,
        image: usize,
    ) -> bool {
        /// Quiet NaN, infinity, negative infinity, signalling NaN.
        const NOT_FINITE: i32 = 0x99;
        let (height, width) = self.grid.out_size;
        let first = 2 * place.column;
        let inside = bits(0, (width - first) as isize);
        let whole = bits(0, width as isize) as u16;
        // SAFETY: a vector has 16 pixels.
        let pick = |half: usize| unsafe { _mm512_loadu_si512(self.lanes[half].as_ptr().cast()) };
        let mut wrong = 0;
        for (i, [left, right]) in tile.into_iter().enumerate() {
            let y = 2 * place.row + i;
            if y >= height {
                continue;
            }
            let row = out.wrapping_add(y * width + first);
            let pixels = [
                _mm512_permutex2var_ps(left, pick(0), right),
                _mm512_permutex2var_ps(left, pick(1), right),
            ];
            // SAFETY: the pixels of the mask lie in the row.
            let mut put = |half: usize, at: *mut O, mask: u16| unsafe {
                wrong |= _mm512_mask_fpclass_ps_mask::<NOT_FINITE>(mask, pixels[half]);
                O::store(at, mask, pixels[half]);
            };
            if self.grid.together == 1 {
                put(0, row, inside as u16);
                put(1, row.wrapping_add(16), (inside >> 16) as u16);
                continue;
            }
            for n in 0..place.images {
                let row = row.wrapping_add(n * image);
                match self.grid.together {
                    2 => put(n, row, whole),
                    _ => put(n / 2, row.wrapping_sub(n % 2 * 8), whole << (n % 2 * 8)),
                }
            }
        }
        wrong == 0
    }
}
