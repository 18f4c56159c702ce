//! Which convolutions are of the kind that tiles at stride 1 compute.

use crate::kernels::conv::shape::Shape;

/// Whether a convolution is of the kind taken at stride 1.
pub(in super::super) fn is_plain(shape: &Shape) -> bool {
    let kernel = (shape.kernel_height, shape.kernel_width);
    let geometry = shape.geometry;
    kernel == (3, 3) && (geometry.stride, geometry.dilation, geometry.groups) == (1, 1, 1)
}

/// Whether the products of so many tiles of two by two are at most `share` of a direct convolution's: not where vectors have
/// empty lanes, or many tiles reach beyond the image.
pub(super) fn pays(tiles: usize, share: f64, shape: &Shape) -> bool {
    (16 * tiles) as f64 <= share * (9 * shape.batch * shape.pixels()) as f64
}
