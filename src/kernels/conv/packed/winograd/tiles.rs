//! Tiles of NHWC images, whose vectors are channels of a pixel.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::rows::Stored;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::prefetch::prefetch_at;
use crate::kernels::cpu::vector::{Vector, first_lanes};

/// The tiles of two by two output pixels of images, counted along rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiles {
    pub(super) batch: usize,
    /// Of an image.
    rows: usize,
    columns: usize,
    /// Height and width of what is read, without padding, and of what is written.
    pub(super) size: (usize, usize),
    pub(super) out_size: (usize, usize),
    /// Rows above and columns left of an image.
    padding: (usize, usize),
}

/// A tile's image, and its first pixel in what is written.
#[derive(Clone, Copy, Debug)]
pub(super) struct WinogradTile {
    image: usize,
    row: usize,
    column: usize,
}

/// The numbers of `N` rows of `N` pixels; none for those that lie in no image.
type Pixels<const N: usize> = [[Option<usize>; N]; N];

impl Tiles {
    pub(super) fn new(shape: &Shape) -> Self {
        Self {
            batch: shape.batch,
            rows: shape.out_height.div_ceil(2),
            columns: shape.out_width.div_ceil(2),
            size: (shape.height, shape.width),
            out_size: (shape.out_height, shape.out_width),
            padding: shape.geometry.padding,
        }
    }

    pub(super) fn count(&self) -> usize {
        self.batch * self.rows * self.columns
    }

    /// Tile `index` of [`Self::count`].
    pub(super) fn tile(&self, index: usize) -> WinogradTile {
        let line = index / self.columns;
        let (row, column) = (2 * (line % self.rows), 2 * (index % self.columns));
        WinogradTile { image: line / self.rows, row, column }
    }

    /// The pixels that a tile reads.
    #[inline(always)]
    pub(super) fn read(&self, tile: WinogradTile) -> Pixels<4> {
        let ((height, width), padding) = (self.size, self.padding);
        let mut pixels = [[None; 4]; 4];
        for (i, pixels) in pixels.iter_mut().enumerate() {
            let Some(y) = (tile.row + i).checked_sub(padding.0).filter(|&y| y < height) else {
                continue;
            };
            for (j, pixel) in pixels.iter_mut().enumerate() {
                let x = (tile.column + j).checked_sub(padding.1).filter(|&x| x < width);
                *pixel = x.map(|x| (tile.image * height + y) * width + x);
            }
        }
        pixels
    }

    /// Asks for two pixels of each of two rows, two rows below these, in images that are `width` wide: what the tile below
    /// reads and this one does not. At the edges of an image some are not asked for. Pixels have `all` channels, of which
    /// these are read.
    #[inline(always)]
    pub(super) fn prefetch_below<S>(
        x: *const S,
        rows: [Option<usize>; 2],
        width: usize,
        (channels, all): (&Range<usize>, usize),
    ) {
        for pixel in rows.into_iter().flatten() {
            for pixel in [pixel, pixel + 1] {
                let first = (pixel + 2 * width) * all + channels.start;
                prefetch_at(x.wrapping_add(first), channels.len());
            }
        }
    }

    /// The pixels that a tile writes.
    #[inline(always)]
    pub(super) fn written(&self, tile: WinogradTile) -> Pixels<2> {
        let (height, width) = self.out_size;
        let mut pixels = [[None; 2]; 2];
        for (i, pixels) in pixels.iter_mut().enumerate() {
            for (j, pixel) in pixels.iter_mut().enumerate() {
                let (y, x) = (tile.row + i, tile.column + j);
                if y < height && x < width {
                    *pixel = Some((tile.image * height + y) * width + x);
                }
            }
        }
        pixels
    }
}

/// The first sixteen of `channels` of pixels that have `all`; zeros where there is no pixel.
///
/// # Safety
/// The features of `V`; the pixels lie in the images of `x`.
#[inline(always)]
pub(super) unsafe fn load<V: Vector, S: Stored, const N: usize>(
    x: *const S,
    pixels: Pixels<N>,
    all: usize,
    channels: Range<usize>,
) -> [[V; N]; N] {
    let mask = first_lanes(channels.len());
    // SAFETY: the features.
    let mut vectors = unsafe { [[V::zero(); N]; N] };
    for (vector, pixel) in vectors.as_flattened_mut().iter_mut().zip(pixels.as_flattened()) {
        if let Some(pixel) = pixel {
            // SAFETY: a pixel has the channels of the mask.
            *vector = unsafe { S::load(x.wrapping_add(pixel * all + channels.start), mask) };
        }
    }
    vectors
}
