//! Which convolutions blocks of tiles can compute, and for which they are faster.

use super::super::suits::{is_plain, pays};
use super::grid::Grid;
use super::phases::products;
use super::sizes::{LARGE, SMALL, STRIDED};
use super::wgrad::Wgrad;
use crate::kernels::conv::packed::weights::Order;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cuda::PassKind;
use crate::kernels::tensors::format::Format;

/// Whether there are enough channels to fill most lanes.
fn fills_lanes(shape: &Shape) -> bool {
    shape.c_in.min(shape.c_out) >= 8
}

/// Whether tiles of two by two are faster than row panels for a convolution of the kind taken at stride 1.
pub(in super::super) fn suits_small(shape: &Shape) -> bool {
    let tiles = Grid::new(shape, Order::Forward, &SMALL).tiles();
    fills_lanes(shape) && pays(tiles, 1.2, shape)
}

/// Whether tiles of two by two are faster for the gradient with respect to the weight at stride 1. The sums of each run are
/// transformed, which takes as long as some tiles.
pub(in crate::kernels::conv) fn suits_wgrad(shape: &Shape) -> bool {
    if !is_plain(shape) || !fills_lanes(shape) {
        return false;
    }
    let batch = Wgrad::run_images(shape, false);
    let tiles = Grid::new(&Shape { batch, ..*shape }, Order::Forward, &SMALL).tiles();
    pays(shape.batch.div_ceil(batch) * (tiles + 32), 0.78, shape)
}

/// Whether a convolution at stride 2 is of the kind taken here, and these tiles faster than row panels.
pub(in crate::kernels::conv) fn suits_strided(shape: &Shape, order: Order) -> bool {
    let geometry = shape.geometry;
    let taps = shape.kernel_height * shape.kernel_width;
    let few = [shape.kernel_height, shape.kernel_width].iter().all(|taps| (3..=4).contains(taps));
    if !few || (geometry.stride, geometry.dilation, geometry.groups) != (2, 1, 1) {
        return false;
    }
    // To transform the weights takes as long as some tiles.
    let tiles = Grid::new(shape, order, &STRIDED).tiles() + 8;
    let direct = shape.batch * shape.pixels() * taps;
    // With channels first, row panels leave lanes of short rows empty: tiles pay with a tenth more products.
    let share = if shape.geometry.format == Format::ChannelsFirst { 1.1 } else { 0.9 };
    let pays = (tiles * products(shape, order, 3)) as f64 <= share * direct as f64;
    shape.c_in.min(shape.c_out) >= 16 && pays
}

/// Whether tiles of four by four are faster for a pass over 16-bit operands than smaller ones, row panels, and pairs of BF16.
pub(in crate::kernels::conv) fn suits_large(pass: PassKind, shape: &Shape) -> bool {
    // dgrad pads the gradient by two less the padding, which is not negative then.
    if !is_plain(shape) || pass == PassKind::Dgrad && shape.transposed().is_none() {
        return false;
    }
    let (order, pixels) = match pass {
        PassKind::Dgrad => (Order::Backward, shape.batch * shape.height * shape.width),
        PassKind::Forward | PassKind::Wgrad => (Order::Forward, shape.batch * shape.pixels()),
    };
    // A kernel of nine weights becomes 36 elements in F32. Those of more channels would not stay in a third-level cache.
    let most = 1 << 16;
    // To transform the weights takes as long as some tiles. A pixel has nine products directly, of BF16 two at a time.
    let tiles = Grid::new(shape, order, &LARGE).tiles() + 24;
    shape.c_in.min(shape.c_out) >= 16
        && shape.c_in * shape.c_out <= most
        && (36 * tiles) as f64 <= 3.2 * pixels as f64
}
