//! How images are cut into strips, and what the passes over them know.
#![allow(unsafe_code)]

use std::ops::Range;

use crate::kernels::conv::packed::rows::{Stored, bits};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::vector::{Vector, Vectors};
use crate::kernels::gemm::micro::Rounded;
use crate::kernels::tensors::format::Format;

/// Elements of a strip: with what is read and written beside it, no more than a nearest cache of 32 KiB has.
const STRIP: usize = 5120;

/// How images are cut.
pub(super) struct Strips<'a> {
    pub(super) shape: &'a Shape,
    /// Channels that lie apart.
    planes: usize,
    /// Elements of a pixel in a plane.
    pixel: usize,
    /// Output rows of a strip; the last one of an image may have fewer.
    rows: usize,
    /// Elements from a row of a strip to the next: vectors of a row, and one more that the last taps reach into.
    pub(super) pitch: usize,
}

impl<'a> Strips<'a> {
    pub(super) fn new(shape: &'a Shape) -> Self {
        let (planes, pixel) = match shape.geometry.format {
            Format::ChannelsFirst => (shape.c_in, 1),
            Format::ChannelsLast => (1, shape.c_in),
        };
        let pitch = (shape.out_width * pixel).next_multiple_of(16) + 16;
        let most = (STRIP / (planes * pitch)).saturating_sub(2).max(8);
        let count = shape.out_height.div_ceil(most);
        Self { shape, planes, pixel, rows: shape.out_height.div_ceil(count), pitch }
    }

    /// Strips of an image.
    pub(super) fn an_image(&self) -> usize {
        self.shape.out_height.div_ceil(self.rows)
    }

    /// The output rows of a strip of an image.
    pub(super) fn rows(&self, strip: usize) -> Range<usize> {
        let first = strip * self.rows;
        first..self.shape.out_height.min(first + self.rows)
    }

    /// Elements of a plane.
    pub(super) fn plane(&self) -> usize {
        (self.rows + 2) * self.pitch
    }

    /// Elements of a strip.
    pub(super) fn len(&self) -> usize {
        self.planes * self.plane()
    }

    /// Widens what the taps of these output rows meet, and zeros around it.
    ///
    /// # Safety
    /// The features of `V`; an image at `image`; [`Self::len`] elements at `strip`.
    #[inline(always)]
    pub(super) unsafe fn fill<V: Vector, S: Stored>(
        &self,
        image: *const S,
        rows: &Range<usize>,
        strip: *mut f32,
    ) {
        let Shape { height, width, geometry, .. } = *self.shape;
        let (top, left) = geometry.padding;
        let (width, left) = (width * self.pixel, left * self.pixel);
        for plane in 0..self.planes {
            for row in 0..rows.len() + 2 {
                let y = (rows.start + row).checked_sub(top).filter(|y| *y < height);
                let line = image.wrapping_add((plane * height + y.unwrap_or(0)) * width);
                let to = strip.wrapping_add(plane * self.plane() + row * self.pitch);
                for column in (0..self.pitch).step_by(16) {
                    let from = column as isize - left as isize;
                    let inside = if y.is_some() { bits(-from, width as isize - from) } else { 0 };
                    // SAFETY: the features; pixels of the mask are in the row, the vector in the strip.
                    unsafe {
                        let x = S::load::<V>(line.wrapping_offset(from), inside as u16);
                        x.store(to.wrapping_add(column));
                    }
                }
            }
        }
    }
}

/// The forward pass, but for the images: weights lie as either format has them.
pub(super) struct Forward<'a> {
    pub(super) strips: Strips<'a>,
    pub(super) weight: &'a [u32],
    pub(super) bias: Option<&'a [f32]>,
}

/// wgrad: all sums of some output channels over some images.
pub(in super::super) struct Wgrad<'a> {
    pub(in super::super) shape: &'a Shape,
    pub(in super::super) channels: Range<usize>,
    pub(in super::super) vectors: Vectors,
}

/// Writes the elements of `mask`, rounded. What is not finite makes `check` so.
///
/// # Safety
/// The features of `V`, within `with_ftz_vectors!` if `FTZ`; places for the elements of the mask.
#[inline(always)]
pub(super) unsafe fn put<V: Vector, O: Rounded, const FTZ: bool>(
    at: *mut O,
    mask: u16,
    sum: V,
    check: &mut V,
) {
    // SAFETY: the caller's.
    unsafe {
        if FTZ {
            O::store_ftz(at, mask, sum)
        } else {
            O::store(at, mask, sum)
        };
        *check = sum.mul_add(V::zero(), *check);
    }
}
