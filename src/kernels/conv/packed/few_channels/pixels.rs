//! First layers with channels last: a vector is sixteen output channels of a pixel.
//!
//! Each element of the strip is multiplied by the weights of its tap, or the gradients of its pixel, for all of them. Forward
//! keeps the sums of some pixels in registers over all taps, and wgrad those of some taps over a row of pixels.
#![allow(unsafe_code)]

use std::ops::Range;

use super::strips::{Forward, Strips, Wgrad, put};
use crate::kernels::conv::packed::rows::Stored;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::vector::{Vector, first_lanes};
use crate::kernels::gemm::micro::{PackedWords, Rounded};

/// Weights as `(output channel / 16, row and column of the tap, channel, output channel % 16)`; zeros for those beyond the last.
pub(super) fn pack(weight: &[f32], shape: &Shape) -> PackedWords {
    let (ins, taps) = (shape.c_in, shape.taps());
    let mut packed = PackedWords::new(shape.c_out.next_multiple_of(16) * taps);
    let words = packed.as_mut_slice();
    for (out, weight) in weight.chunks_exact(taps).enumerate() {
        for (n, weight) in weight.iter().enumerate() {
            let (channel, tap) = (n / 9, n % 9);
            words[(out / 16 * taps + tap * ins + channel) * 16 + out % 16] = weight.to_bits();
        }
    }
    packed
}

impl Forward<'_> {
    /// Convolves a strip of `INS` channels. Whether the results are finite.
    ///
    /// # Safety
    /// As [`Forward`]'s strip.
    #[inline(always)]
    pub(super) unsafe fn pixels<V: Vector, O: Rounded, const FTZ: bool, const INS: usize>(
        &self,
        strip: *const f32,
        rows: &Range<usize>,
        out: *mut O,
    ) -> bool {
        let shape = self.strips.shape;
        // SAFETY: the features.
        let mut check = unsafe { V::zero() };
        for (row, y) in rows.clone().enumerate() {
            let line = strip.wrapping_add(row * self.strips.pitch);
            let out = out.wrapping_add(y * shape.out_width * shape.c_out);
            let mut pixel = 0;
            while pixel < shape.out_width {
                let at = line.wrapping_add(pixel * INS);
                let out = out.wrapping_add(pixel * shape.c_out);
                let left = shape.out_width - pixel;
                // SAFETY: the caller's; so many pixels are left.
                pixel += unsafe {
                    if V::WIDE && left >= 16 {
                        self.neighbours::<V, O, FTZ, INS, 16>(at, out, &mut check)
                    } else if left >= 4 {
                        self.neighbours::<V, O, FTZ, INS, 4>(at, out, &mut check)
                    } else {
                        self.neighbours::<V, O, FTZ, INS, 1>(at, out, &mut check)
                    }
                };
            }
        }
        // SAFETY: the features.
        unsafe { check.is_finite(u16::MAX) }
    }

    /// `PIXELS` pixels, which it returns, of all output channels. What is not finite makes `check` so.
    ///
    /// # Safety
    /// As [`Forward`]'s strip; the pixels at `line` in the strip, and at `out`.
    #[inline(always)]
    unsafe fn neighbours<
        V: Vector,
        O: Rounded,
        const FTZ: bool,
        const INS: usize,
        const PIXELS: usize,
    >(
        &self,
        line: *const f32,
        out: *mut O,
        check: &mut V,
    ) -> usize {
        let (pitch, outs) = (self.strips.pitch, self.strips.shape.c_out);
        let mut weight = self.weight.as_ptr().cast::<f32>();
        for first in (0..outs).step_by(16) {
            let mask = first_lanes(outs - first);
            // SAFETY: the features; weights and biases of output channels that exist, or zeros; elements that the taps of
            // these pixels meet, which are in the strip.
            unsafe {
                let bias = match self.bias {
                    Some(bias) => V::load_masked(bias.as_ptr().wrapping_add(first), mask),
                    None => V::zero(),
                };
                let mut sums = [bias; PIXELS];
                for row in 0..3 {
                    for tap in 0..3 * INS {
                        let w = V::load(weight);
                        let x = line.wrapping_add(row * pitch + tap);
                        for (pixel, sum) in sums.iter_mut().enumerate() {
                            *sum = w.mul_add(V::splat(*x.wrapping_add(pixel * INS)), *sum);
                        }
                        weight = weight.wrapping_add(16);
                    }
                }
                for (pixel, sum) in sums.into_iter().enumerate() {
                    let at = out.wrapping_add(pixel * outs + first);
                    put::<V, O, FTZ>(at, mask, sum, check);
                }
            }
        }
        PIXELS
    }
}

impl Wgrad<'_> {
    /// Adds a strip of these rows to `sums`: `(tap, channel, output channel)`.
    ///
    /// # Safety
    /// The features of `V`; `strip` filled for these rows, an image of the gradient at `grad`, and all sums.
    #[inline(always)]
    pub(super) unsafe fn pixels<V: Vector, G: Stored>(
        &self,
        strips: &Strips,
        strip: *const f32,
        grad: *const G,
        rows: &Range<usize>,
        sums: *mut f32,
    ) {
        let Shape { c_in, c_out, out_width, .. } = *self.shape;
        let outs = self.channels.len();
        for (row, y) in rows.clone().enumerate() {
            let grad = grad.wrapping_add(y * out_width * c_out + self.channels.start);
            for first in (0..outs).step_by(16) {
                for tap in 0..3 {
                    let line = strip.wrapping_add((row + tap) * strips.pitch);
                    let sums = sums.wrapping_add(tap * 3 * c_in * outs + first);
                    let part = Part {
                        grad: grad.wrapping_add(first),
                        left: outs - first,
                        outs,
                        line,
                        sums,
                    };
                    // SAFETY: the caller's; the columns of a row of taps, each once.
                    unsafe {
                        match (V::WIDE, c_in) {
                            (_, 2) => self.add::<V, G, 6>(&part, 0),
                            (true, 3) => self.add::<V, G, 9>(&part, 0),
                            (true, _) => self.add::<V, G, 12>(&part, 0),
                            (false, 3) => {
                                self.add::<V, G, 5>(&part, 0);
                                self.add::<V, G, 4>(&part, 5);
                            }
                            (false, _) => {
                                self.add::<V, G, 6>(&part, 0);
                                self.add::<V, G, 6>(&part, 6);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Adds a row of pixels to the sums of `COUNT` elements of a row of taps, from `start` on, and of sixteen output channels.
    ///
    /// # Safety
    /// As [`Self::pixels`]'.
    #[inline(always)]
    unsafe fn add<V: Vector, G: Stored, const COUNT: usize>(&self, part: &Part<G>, start: usize) {
        // AVX2 needs registers to make a mask.
        match first_lanes(part.left) {
            // SAFETY: the caller's.
            u16::MAX => unsafe { self.add_lanes::<V, G, COUNT>(part, start, u16::MAX) },
            // SAFETY: the caller's.
            mask => unsafe { self.add_lanes::<V, G, COUNT>(part, start, mask) },
        }
    }

    /// [`Self::add`] of the output channels of `mask`.
    ///
    /// # Safety
    /// As [`Self::pixels`]'.
    #[inline(always)]
    unsafe fn add_lanes<V: Vector, G: Stored, const COUNT: usize>(
        &self,
        part: &Part<G>,
        start: usize,
        mask: u16,
    ) {
        let Shape { c_in, c_out, out_width, .. } = *self.shape;
        // SAFETY: the features; elements that the taps of a row's pixels meet, which are in the strip, and the gradients and
        // sums of output channels that exist.
        unsafe {
            let mut sums = [V::zero(); COUNT];
            let mut x = part.line.wrapping_add(start);
            let mut grad = part.grad;
            for _ in 0..out_width {
                let g = G::load::<V>(grad, mask);
                for (n, sum) in sums.iter_mut().enumerate() {
                    *sum = g.mul_add(V::splat(*x.wrapping_add(n)), *sum);
                }
                x = x.wrapping_add(c_in);
                grad = grad.wrapping_add(c_out);
            }
            for (n, sum) in sums.into_iter().enumerate() {
                let at = part.sums.wrapping_add((start + n) * part.outs);
                V::load_masked(at, mask).add(sum).store_masked(at, mask);
            }
        }
    }
}

/// What a row of taps meets in a row of pixels.
struct Part<G> {
    /// The gradients of the first pixel, from some output channel on.
    grad: *const G,
    /// Output channels from that one on, and all of the run.
    left: usize,
    outs: usize,
    /// The row of the strip.
    line: *const f32,
    /// The sums of the row's first tap, from the same output channel on.
    sums: *mut f32,
}
