//! The products of tiles whose lanes are channels: rows are tiles, and columns output channels.
//!
//! Output channels are cut into products of about equal width, at most [`VECTORS`] vectors. Where that is one vector, a
//! product has [`TALL`] rows: with fewer sums, a multiply-add would wait for the one before.
#![allow(unsafe_code)]

use super::products::{ROWS, VECTORS};
use crate::kernels::cpu::vector::Vector;

/// Rows of a product that has one vector of columns; others have [`ROWS`].
const TALL: usize = 16;

/// How output channels are divided into columns of products.
#[derive(Clone, Copy, Debug)]
pub(super) struct Columns {
    pub(super) products: usize,
    /// Vectors of each, but perhaps fewer of the last.
    vectors: usize,
}

impl Columns {
    pub(super) fn new(outs: usize) -> Self {
        let vectors = outs.div_ceil(16);
        let products = vectors.div_ceil(VECTORS);
        Self { products, vectors: vectors.div_ceil(products) }
    }

    /// Output channels of a product.
    pub(super) fn width(self) -> usize {
        16 * self.vectors
    }

    /// The vectors of a product, where there are so many output channels.
    pub(super) fn vectors_of(self, product: usize, outs: usize) -> usize {
        (outs - product * self.width()).div_ceil(16).min(self.vectors)
    }

    /// Rows that [`Self::multiply`] takes at a time.
    pub(super) fn rows(vectors: usize) -> usize {
        if vectors == 1 { TALL } else { ROWS }
    }

    /// [`Vector::multiply`] of [`Self::rows`] by so many vectors, written or added.
    ///
    /// # Safety
    /// As [`Vector::multiply`].
    #[inline(always)]
    pub(super) unsafe fn multiply<V: Vector, const LEFT: usize>(
        vectors: usize,
        left: (*const f32, usize),
        right: (*const f32, usize),
        depth: usize,
        sums: (*mut f32, usize),
        add: bool,
    ) {
        // SAFETY: the caller's.
        unsafe {
            match (vectors, add) {
                (1, false) => V::multiply::<TALL, 1, LEFT, false>(left, right, depth, sums),
                (1, true) => V::multiply::<TALL, 1, LEFT, true>(left, right, depth, sums),
                (2, false) => V::multiply::<ROWS, 2, LEFT, false>(left, right, depth, sums),
                (2, true) => V::multiply::<ROWS, 2, LEFT, true>(left, right, depth, sums),
                (_, false) => V::multiply::<ROWS, 3, LEFT, false>(left, right, depth, sums),
                (_, true) => V::multiply::<ROWS, 3, LEFT, true>(left, right, depth, sums),
            }
        }
    }
}
