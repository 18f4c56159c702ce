//! First layers with channels first: a vector is sixteen neighbouring pixels of a channel, from any pixel on.
//!
//! Forward keeps the sums of some output channels in registers over all taps. wgrad has a lane for each pixel, and
//! keeps the sums of some output channels and taps in registers over a strip; lanes are added up once per run of
//! images. Lanes beyond a row see what lies beside it: they are not written, and wgrad multiplies them by zero.
#![allow(unsafe_code)]

use std::ops::Range;

use super::strips::{Forward, Strips, Wgrad, put};
use crate::kernels::conv::packed::rows::Stored;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::vector::{Vector, first_lanes};
use crate::kernels::gemm::micro::{PackedWords, Rounded};

/// Output channels of a block of forward's weights.
pub(super) const BLOCK: usize = 8;

/// Weights as `(block of output channels, channel, tap, output channel)`; zeros for those beyond the last.
pub(super) fn pack(weight: &[f32], shape: &Shape) -> PackedWords {
    let taps = shape.taps();
    let mut packed = PackedWords::new(shape.c_out.next_multiple_of(BLOCK) * taps);
    let words = packed.as_mut_slice();
    for (out, weight) in weight.chunks_exact(taps).enumerate() {
        for (tap, weight) in weight.iter().enumerate() {
            words[(out / BLOCK * taps + tap) * BLOCK + out % BLOCK] = weight.to_bits();
        }
    }
    packed
}

impl Forward<'_> {
    /// Convolves a strip. Whether the results are finite.
    ///
    /// # Safety
    /// As [`Forward`]'s strip.
    #[inline(always)]
    pub(super) unsafe fn planes<V: Vector, O: Rounded, const FTZ: bool>(
        &self,
        strip: *const f32,
        rows: &Range<usize>,
        out: *mut O,
    ) -> bool {
        let shape = self.strips.shape;
        // SAFETY: the features.
        let mut check = unsafe { V::zero() };
        for first in (0..shape.c_out).step_by(BLOCK) {
            for (row, y) in rows.clone().enumerate() {
                let line = strip.wrapping_add(row * self.strips.pitch);
                let out = out.wrapping_add(first * shape.pixels() + y * shape.out_width);
                let mut column = 0;
                while column < shape.out_width {
                    let (at, out) = (line.wrapping_add(column), out.wrapping_add(column));
                    let (left, half) = (shape.out_width - column, BLOCK / 2);
                    let next = out.wrapping_add(half * shape.pixels());
                    // SAFETY: the caller's; vectors up to the last that has a pixel.
                    unsafe {
                        if V::WIDE && left > 16 {
                            self.tile::<V, O, BLOCK, 2, FTZ>(at, first, left, out, &mut check);
                        } else if V::WIDE {
                            self.tile::<V, O, BLOCK, 1, FTZ>(at, first, left, out, &mut check);
                        } else {
                            self.tile::<V, O, 4, 1, FTZ>(at, first, left, out, &mut check);
                            self.tile::<V, O, 4, 1, FTZ>(at, first + half, left, next, &mut check);
                        }
                    }
                    column += if V::WIDE { 32 } else { 16 };
                }
            }
        }
        // SAFETY: the features.
        unsafe { check.is_finite(u16::MAX) }
    }

    /// `COUNT` vectors of pixels, of which there are `left`, of `ROWS` output channels from `first` on. What is not
    /// finite makes `check` so.
    ///
    /// # Safety
    /// As [`Forward`]'s strip; the pixels at `line` in the strip, and at `out` in an output plane, if there is one.
    #[inline(always)]
    unsafe fn tile<
        V: Vector,
        O: Rounded,
        const ROWS: usize,
        const COUNT: usize,
        const FTZ: bool,
    >(
        &self,
        line: *const f32,
        first: usize,
        left: usize,
        out: *mut O,
        check: &mut V,
    ) {
        let (strips, shape) = (&self.strips, self.strips.shape);
        let block = first / BLOCK * shape.taps() * BLOCK + first % BLOCK;
        let mut weight = self.weight.as_ptr().cast::<f32>().wrapping_add(block);
        // SAFETY: the features; taps reach one vector beyond the last in a strip, and weights have whole blocks. Only
        // the pixels of output channels that exist are written.
        unsafe {
            let mut sums = [[V::zero(); COUNT]; ROWS];
            for (row, sums) in sums.iter_mut().enumerate() {
                // Of a channel beyond the last, nothing is written.
                let bias = match self.bias {
                    Some(bias) if first + row < shape.c_out => bias[first + row],
                    _ => 0.0,
                };
                *sums = [V::splat(bias); COUNT];
            }
            for channel in 0..shape.c_in {
                let plane = line.wrapping_add(channel * strips.plane());
                for row in 0..3 {
                    for column in 0..3 {
                        let at = plane.wrapping_add(row * strips.pitch + column);
                        let mut x = [V::zero(); COUNT];
                        for (n, x) in x.iter_mut().enumerate() {
                            *x = V::load(at.wrapping_add(16 * n));
                        }
                        for (row, sums) in sums.iter_mut().enumerate() {
                            let weight = V::splat(*weight.wrapping_add(row));
                            for (sum, x) in sums.iter_mut().zip(x) {
                                *sum = x.mul_add(weight, *sum);
                            }
                        }
                        weight = weight.wrapping_add(BLOCK);
                    }
                }
            }
            for (row, sums) in sums.into_iter().enumerate() {
                if first + row >= shape.c_out {
                    break;
                }
                for (n, sum) in sums.into_iter().enumerate() {
                    let at = out.wrapping_add(row * shape.pixels() + 16 * n);
                    let mask = first_lanes(left - 16 * n);
                    put::<V, O, FTZ>(at, mask, sum, check);
                }
            }
        }
    }
}

impl Wgrad<'_> {
    /// Adds a strip of these rows to `lanes`: `(tap, channel, output channel, lane)`.
    ///
    /// # Safety
    /// The features of `V`; `strip` filled for these rows, and an image of the gradient at `grad`.
    #[inline(always)]
    pub(super) unsafe fn planes<V: Vector, G: Stored>(
        &self,
        strips: &Strips,
        strip: *const f32,
        grad: *const G,
        rows: &Range<usize>,
        lanes: *mut f32,
    ) {
        let row = self.channels.start * self.shape.pixels() + rows.start * self.shape.out_width;
        let (grad, rows) = (grad.wrapping_add(row), rows.len());
        let (ins, outs) = (self.shape.c_in, self.channels.len());
        let step = if V::WIDE { 3 } else { 2 };
        for out in (0..outs).step_by(step) {
            for channel in 0..ins {
                let plane = strip.wrapping_add(channel * strips.plane());
                let lanes = lanes.wrapping_add(channel * outs * 16);
                // SAFETY: the caller's.
                unsafe {
                    if V::WIDE {
                        tile::<V, G, 3, 3>(strips, plane, grad, rows, lanes, out..outs);
                    } else {
                        for row in 0..3 {
                            let plane = plane.wrapping_add(row * strips.pitch);
                            let lanes = lanes.wrapping_add(3 * row * ins * outs * 16);
                            tile::<V, G, 2, 1>(strips, plane, grad, rows, lanes, out..outs);
                        }
                    }
                }
            }
        }
    }
}

/// Adds a strip of one channel to the lanes of `OUTS` output channels and `TAPS` rows of taps. Output channels beyond
/// the last are the last once more, and not stored.
///
/// # Safety
/// As [`Wgrad::planes`]'s.
#[inline(always)]
unsafe fn tile<V: Vector, G: Stored, const OUTS: usize, const TAPS: usize>(
    strips: &Strips,
    plane: *const f32,
    grad: *const G,
    rows: usize,
    lanes: *mut f32,
    outs: Range<usize>,
) {
    let Shape { c_in, out_width, .. } = *strips.shape;
    let count = outs.len().min(OUTS);
    // SAFETY: the features; vectors of lanes of output channels that exist, rows of the strip, and of the gradient the
    // pixels of the mask.
    unsafe {
        let mut grads = [grad; OUTS];
        for (out, grad) in grads.iter_mut().enumerate() {
            let channel = outs.start + out.min(count - 1);
            *grad = grad.wrapping_add(channel * strips.shape.pixels());
        }
        let mut sums = [[[V::zero(); OUTS]; 3]; TAPS];
        // Whole vectors without a mask: AVX2 needs registers to make one, and would keep a sum in memory instead.
        let whole = out_width / 16 * 16;
        for row in 0..rows {
            let line = plane.wrapping_add(row * strips.pitch);
            let grads = grads.map(|grad| grad.wrapping_add(row * out_width));
            for pixel in (0..whole).step_by(16) {
                add_pixels(strips, line, grads, pixel, u16::MAX, &mut sums);
            }
            if whole < out_width {
                add_pixels(strips, line, grads, whole, first_lanes(out_width - whole), &mut sums);
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (column, sums) in sums.into_iter().enumerate() {
                for (out, sum) in sums.into_iter().enumerate().take(count) {
                    let at = (3 * row + column) * c_in * outs.end + outs.start + out;
                    let at = lanes.wrapping_add(16 * at);
                    V::load(at).add(sum).store(at);
                }
            }
        }
    }
}

/// Adds products with the pixels of `mask` from `pixel` on, in a row of each gradient, to the sums of each tap.
///
/// # Safety
/// As [`Wgrad::planes`]'s; such a pixel in the row of the strip, and pixels of the mask in those of the gradients.
#[inline(always)]
unsafe fn add_pixels<V: Vector, G: Stored, const OUTS: usize, const TAPS: usize>(
    strips: &Strips,
    line: *const f32,
    grads: [*const G; OUTS],
    pixel: usize,
    mask: u16,
    sums: &mut [[[V; OUTS]; 3]; TAPS],
) {
    // SAFETY: the caller's; taps reach one vector beyond the last in a strip.
    unsafe {
        let mut g = [V::zero(); OUTS];
        for (g, grad) in g.iter_mut().zip(grads) {
            *g = G::load(grad.wrapping_add(pixel), mask);
        }
        for (tap, sums) in sums.iter_mut().enumerate() {
            for (column, sums) in sums.iter_mut().enumerate() {
                let x = V::load(line.wrapping_add(tap * strips.pitch + pixel + column));
                for (sum, g) in sums.iter_mut().zip(g) {
                    *sum = x.mul_add(g, *sum);
                }
            }
        }
    }
}

/// Adds up the lanes of each output channel.
///
/// # Safety
/// The features of `V`; a vector of lanes for each sum, `outs` to a tap.
#[inline(always)]
pub(super) unsafe fn add_up<V: Vector>(lanes: *const f32, outs: usize, sums: &mut [f32]) {
    for (tap, sums) in sums.chunks_exact_mut(outs).enumerate() {
        for (block, sums) in sums.chunks_mut(16).enumerate() {
            let lanes = lanes.wrapping_add((tap * outs + block * 16) * 16);
            // SAFETY: the features; vectors and sums of output channels that exist.
            unsafe {
                let mut vectors = [V::zero(); 16];
                for (out, vector) in vectors.iter_mut().enumerate().take(sums.len()) {
                    *vector = V::load(lanes.wrapping_add(out * 16));
                }
                let mut vectors = V::transpose(vectors);
                // By pairs: the error grows with their depth of four, not with sixteen.
                let mut half = 8;
                while half > 0 {
                    for lane in 0..half {
                        vectors[lane] = vectors[lane].add(vectors[lane + half]);
                    }
                    half /= 2;
                }
                vectors[0].store_masked(sums.as_mut_ptr(), first_lanes(sums.len()));
            }
        }
    }
}
