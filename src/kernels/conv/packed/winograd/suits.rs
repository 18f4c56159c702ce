//! Which convolutions at stride 1 tiles can compute, and for which they are faster.

use super::grid::TileGrid;
use super::products::TILE_ELEMENTS;
use super::tiles::Tiles;
use crate::kernels::conv::shape::Shape;
use crate::kernels::tensors::format::Format;

/// Whether a convolution is of the kind taken at stride 1.
pub(in super::super) fn is_plain(shape: &Shape) -> bool {
    let kernel = (shape.kernel_height, shape.kernel_width);
    let geometry = shape.geometry;
    kernel == (3, 3) && (geometry.stride, geometry.dilation, geometry.groups) == (1, 1, 1)
}

/// Whether tiles are faster than row panels at stride 1, forward.
pub(in crate::kernels::conv) fn suits(shape: &Shape) -> bool {
    let channels = shape.geometry.format == Format::ChannelsFirst || enough_channels(shape);
    is_plain(shape) && channels && pays(vectors(shape), 1.2, shape)
}

/// Whether there are enough channels to fill most lanes.
pub(super) fn enough_channels(shape: &Shape) -> bool {
    shape.c_in.min(shape.c_out) >= 8
}

/// The number of vectors of tiles; for NHWC, sixteen tiles count as one.
pub(super) fn vectors(shape: &Shape) -> usize {
    match shape.geometry.format {
        Format::ChannelsFirst => TileGrid::of(shape).vectors(),
        Format::ChannelsLast => Tiles::new(shape).count().div_ceil(16),
    }
}

/// Whether the products of so many vectors are at most `share` of a direct convolution's: not where
/// tiles leave lanes empty, or many reach beyond the image.
pub(super) fn pays(vectors: usize, share: f64, shape: &Shape) -> bool {
    (TILE_ELEMENTS * 16 * vectors) as f64 <= share * (9 * shape.batch * shape.pixels()) as f64
}
