//! Small images: which those are, and their rows transposed, so that each lane of a vector has one.
#![allow(unsafe_code)]

use half::bf16;

use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::vector::{Vector, first_lanes};
use crate::kernels::gemm::micro::InstructionSet;

/// Lanes of a vector: the images of a block.
pub(super) const LANES: usize = 16;
/// Rows of a tile, which are output channels.
pub(super) const ROWS: usize = 8;
/// Pixels of an image, at most: more are streamed by im2col just as well.
const PIXELS: usize = 64;
/// Channels on either side, at least: with fewer, sums are too short to pay for the transposes.
const CHANNELS: usize = 128;

/// Whether the images that are read and written are small, and their channels many.
pub(super) fn is_small(shape: &Shape, isa: InstructionSet) -> bool {
    isa == InstructionSet::Avx512Bf16
        && shape.geometry.groups == 1
        && !shape.pointwise()
        && shape.c_in.min(shape.c_out) >= CHANNELS
        && shape.pixels().max(shape.height * shape.width) <= PIXELS
        && shape.kernel_height * shape.kernel_width <= PIXELS
}

/// Up to sixteen rows of pixels, `step` elements apart, and for each a partner.
#[derive(Clone, Copy)]
pub(super) struct RowPairs {
    pub(super) at: *const bf16,
    pub(super) step: usize,
    pub(super) count: usize,
    /// Elements from a row to its partner; zeros stand for none.
    pub(super) partner: Option<usize>,
    pub(super) pixels: usize,
}

impl RowPairs {
    /// Writes a vector for each pixel, `step` words apart: a row in each lane, its element below its partner's. Zeros in
    /// other lanes.
    ///
    /// # Safety
    /// The features of `V`; the rows can be read, the vectors written.
    #[inline(always)]
    pub(super) unsafe fn spread<V: Vector>(self, to: *mut u32, step: usize) {
        for first in (0..self.pixels).step_by(LANES) {
            let count = (self.pixels - first).min(LANES);
            let mask = first_lanes(count);
            // SAFETY: the caller's; the mask has no more elements than a row.
            unsafe {
                let mut rows = [V::zero(); LANES];
                for (i, row) in rows.iter_mut().enumerate().take(self.count) {
                    let at = self.at.wrapping_add(i * self.step + first);
                    *row = V::load_bf16(at, mask).shift_down();
                    if let Some(partner) = self.partner {
                        *row = row.or(V::load_bf16(at.wrapping_add(partner), mask));
                    }
                }
                for (i, pixel) in V::transpose(rows).iter().enumerate().take(count) {
                    pixel.store(to.wrapping_add((first + i) * step).cast());
                }
            }
        }
    }
}
