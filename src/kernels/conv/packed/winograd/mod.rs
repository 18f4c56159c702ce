//! Convolutions by Winograd's algorithms: fewer products, of tiles that are transformed.
//!
//! Three by three weights at stride 1 are F(2×2, 3×3): sixteen products where a tile of two by two pixels takes thirty-six.
//! Where images have channels first, and few, a lane is a tile: [`rows`]. Otherwise it is a channel: [`blocks`]. Blocks also compute stride 2, and larger tiles of 16-bit operands.
//!
//! Infinities, and sums of the transform that overflow, come out as NaN where they enter a result,
//! and nowhere else. A pass that meets a result that is not finite is repeated without tiles, so
//! that it is infinite or NaN as it ought to be.

mod blocks;
mod columns;
mod products;
mod rows;
mod suits;
mod transform;

use candle_core::{Result, Tensor};

use super::weights::Order;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::guard::hold;
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::micro::{InstructionSet, Rounded};
pub(super) use blocks::Wgrad;
#[cfg(test)]
pub(in crate::kernels::conv) use blocks::suits_strided;
pub(in crate::kernels::conv) use blocks::{suits_large, suits_wgrad};
#[cfg(test)]
pub(in crate::kernels::conv) use rows::suits as suits_rows;
pub(super) use suits::is_plain;

/// Whether tiles are faster than row panels at stride 1, forward.
pub(in crate::kernels::conv) fn suits(shape: &Shape) -> bool {
    is_plain(shape) && (rows::suits(shape) || blocks::suits_small(shape))
}

/// Whether tiles are faster than row panels for a pass.
pub(in crate::kernels::conv) fn suits_pass(pass: PassKind, shape: &Shape) -> bool {
    match pass {
        PassKind::Forward => suits(shape) || blocks::suits_strided(shape, Order::Forward),
        PassKind::Dgrad => {
            shape.transposed().is_some_and(|back| suits(&back))
                || blocks::suits_strided(shape, Order::Backward)
        }
        PassKind::Wgrad => suits_wgrad(shape) || blocks::suits_strided(shape, Order::Forward),
    }
}

/// See [`super::super::forward`], or [`super::super::dgrad`], by `large` tiles of four by four, or others; `None` where a result
/// is not finite, or, of other tiles at stride 1, where no convolution is the gradient.
pub(in crate::kernels::conv) fn convolve<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    order: Order,
    (isa, large): (InstructionSet, bool),
) -> Result<Option<Tensor>> {
    let _held = hold([x, weight].into_iter().chain(bias));
    if !large && shape.geometry.stride == 1 {
        let plain = if order == Order::Backward { shape.transposed() } else { Some(*shape) };
        let Some(plain) = &plain else { return Ok(None) };
        if rows::suits(plain) {
            return rows::convolve::<O>(x, weight, bias, plain, order, isa);
        }
    }
    blocks::convolve::<O>(x, weight, bias, shape, order, (isa, large))
}
