//! Which tiles share a vector.

use crate::kernels::conv::shape::Shape;

/// Images cut into tiles of two by two output pixels: at most sixteen of a row are a vector.
#[derive(Clone, Copy, Debug)]
pub(super) struct TileGrid {
    pub(super) batch: usize,
    /// Height and width of the images read, without padding.
    pub(super) size: (usize, usize),
    /// Height and width of what the tiles cover.
    pub(super) out_size: (usize, usize),
    /// Rows above and columns left of an image.
    pub(super) padding: (usize, usize),
}

/// The tiles of a vector.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct VectorTiles {
    pub(super) image: usize,
    /// The row of tiles.
    pub(super) row: usize,
    /// The first tile in its row.
    pub(super) column: usize,
}

impl TileGrid {
    /// That of a convolution.
    pub(super) fn of(shape: &Shape) -> Self {
        Self {
            batch: shape.batch,
            size: (shape.height, shape.width),
            out_size: (shape.out_height, shape.out_width),
            padding: shape.geometry.padding,
        }
    }

    /// Tiles of a row.
    pub(super) fn columns(&self) -> usize {
        self.out_size.1.div_ceil(2)
    }

    fn rows(&self) -> usize {
        self.out_size.0.div_ceil(2)
    }

    /// Vectors of a row of tiles.
    pub(super) fn across(&self) -> usize {
        self.columns().div_ceil(16)
    }

    pub(super) fn vectors(&self) -> usize {
        self.batch * self.rows() * self.across()
    }

    /// Where vector `vector` of [`Self::vectors`] lies.
    pub(super) fn place(&self, vector: usize) -> VectorTiles {
        let (across, rows) = (self.across(), self.rows());
        VectorTiles {
            image: vector / across / rows,
            row: vector / across % rows,
            column: vector % across * 16,
        }
    }
}
