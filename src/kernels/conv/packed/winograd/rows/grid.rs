//! Which tiles share a vector.

use crate::kernels::conv::shape::Shape;

/// Images cut into tiles of two by two output pixels, sixteen a vector. These are tiles of one row
/// of one image; of two images that are at most 16 pixels wide, of four that are at most 8.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileGrid {
    pub(super) batch: usize,
    /// Height and width of the images read, without padding.
    pub(super) size: (usize, usize),
    /// Height and width of what the tiles cover.
    pub(super) out_size: (usize, usize),
    /// Rows above and columns left of an image.
    pub(super) padding: (usize, usize),
    /// Images of a vector: 1, 2 or 4.
    pub(super) together: usize,
}

/// The tiles of a vector.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VectorTiles {
    pub(super) image: usize,
    /// The images there are, at most [`TileGrid::together`].
    pub(super) images: usize,
    /// The row of tiles.
    pub(super) row: usize,
    /// The first tile in its row.
    pub(super) column: usize,
}

impl TileGrid {
    /// That of a convolution.
    pub(super) fn of(shape: &Shape) -> Self {
        let together = match shape.width.max(shape.out_width) {
            0..=8 => 4,
            9..=16 => 2,
            _ => 1,
        };
        Self {
            batch: shape.batch,
            size: (shape.height, shape.width),
            out_size: (shape.out_height, shape.out_width),
            padding: shape.geometry.padding,
            together,
        }
    }

    /// Tiles of a row of one image.
    fn columns(&self) -> usize {
        self.out_size.1.div_ceil(2)
    }

    fn rows(&self) -> usize {
        self.out_size.0.div_ceil(2)
    }

    /// Vectors of a row of tiles.
    fn across(&self) -> usize {
        if self.together > 1 { 1 } else { self.columns().div_ceil(16) }
    }

    /// Whether rows of one image fill vectors, but for an eighth of their lanes.
    pub(super) fn is_filled(&self) -> bool {
        8 * self.columns() >= 7 * 16 * self.across()
    }

    pub(super) fn vectors(&self) -> usize {
        self.batch.div_ceil(self.together) * self.rows() * self.across()
    }

    /// Where vector `vector` of [`Self::vectors`] lies.
    pub(super) fn place(&self, vector: usize) -> VectorTiles {
        let (across, rows) = (self.across(), self.rows());
        let image = vector / across / rows * self.together;
        VectorTiles {
            image,
            images: self.together.min(self.batch - image),
            row: vector / across % rows,
            column: vector % across * 16,
        }
    }
}
