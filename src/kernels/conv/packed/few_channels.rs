//! First layers: convolutions of two to four channels by three by three weights at stride 1. A single channel does not
//! come here: [`super::isa`] leaves it to other algorithms. Products are in F32, for BF16 too: where sums are so short,
//! AVX512-BF16's pairs are no gain. AMX is faster, so it multiplies BF16 by packed GEMM.
//!
//! Their sums have 18 to 36 terms. To pack operands for so few, or to transform tiles, takes as long as the products.
//! Here a thread widens some rows of an image into a *strip*, padding included, which stays in its nearest cache. Each
//! tap reads the strip at an offset of its own: a vector is sixteen neighbouring pixels, from any pixel on.
//!
//! Forward keeps the sums of some output channels in registers over all taps. wgrad has a lane for each pixel, and
//! keeps the sums of some output channels and taps in registers over a strip; lanes are added up once per run of
//! images.
//!
//! Lanes beyond a row see what lies beside it. They are not written, and wgrad multiplies them by zero, which makes NaN
//! of an infinity. So a pass whose results are not all finite is repeated by another algorithm.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};

use super::rows::{Stored, bits, with_stored};
use super::store::OutputImages;
use super::{weights, winograd};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::tensor;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_ftz_vectors, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, PackedWords, Rounded, with_words};
use crate::kernels::tensors::format::Format;

/// Output channels of a block of forward's weights.
const BLOCK: usize = 8;
/// Elements of a strip: with a row of each output channel of a block, no more than a nearest cache of 32 KiB has.
const STRIP: usize = 5120;

/// Whether the convolution is such a first layer, and its rows fill most lanes.
pub(in crate::kernels::conv) fn suits(shape: &Shape, isa: InstructionSet) -> bool {
    let lanes = shape.out_width.next_multiple_of(16);
    !isa.is_amx()
        && winograd::is_plain(shape)
        && shape.geometry.format == Format::ChannelsFirst
        && shape.c_in <= 4
        && shape.c_out >= BLOCK
        && 4 * shape.out_width >= 3 * lanes
}

/// See [`super::super::forward`]; `None` where a result is not finite.
pub(in crate::kernels::conv) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let weight = pack(&weights::widened(weight)?, shape);
    let bias = bias.map(weights::widened).transpose()?;
    let bias = bias.as_deref();
    let pass = Forward { strips: Strips::new(shape), weight: weight.as_slice(), bias };
    let len = shape.batch * shape.out_image();
    let data = with_stored!(x, O, x => {
        try_uninit_vec(len, |out: &mut [MaybeUninit<O>]| pass.run(&x, out, isa))
    });
    Ok(data.map(|data| tensor(data, &shape.out_dims())))
}

/// Weights as `(block of output channels, channel, tap, output channel)`; zeros for those beyond the last.
fn pack(weight: &[f32], shape: &Shape) -> PackedWords {
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

/// How images are cut.
struct Strips<'a> {
    shape: &'a Shape,
    /// Output rows of a strip; the last one of an image may have fewer.
    rows: usize,
    /// Elements from a row of a strip to the next: vectors of a row, and one more that the last taps reach into.
    pitch: usize,
}

impl<'a> Strips<'a> {
    fn new(shape: &'a Shape) -> Self {
        let pitch = shape.out_width.next_multiple_of(16) + 16;
        let most = (STRIP / (shape.c_in * pitch)).saturating_sub(2).max(8);
        let count = shape.out_height.div_ceil(most);
        Self { shape, rows: shape.out_height.div_ceil(count), pitch }
    }

    fn an_image(&self) -> usize {
        self.shape.out_height.div_ceil(self.rows)
    }

    /// The output rows of a strip of an image.
    fn rows(&self, strip: usize) -> Range<usize> {
        let first = strip * self.rows;
        first..self.shape.out_height.min(first + self.rows)
    }

    /// Elements of a channel.
    fn plane(&self) -> usize {
        (self.rows + 2) * self.pitch
    }

    /// Elements of a strip.
    fn len(&self) -> usize {
        self.shape.c_in * self.plane()
    }

    /// Widens what the taps of these output rows meet, and zeros around it.
    ///
    /// # Safety
    /// The features of `V`; an image at `image`; [`Self::len`] elements at `strip`.
    #[inline(always)]
    unsafe fn fill<V: Vector, S: Stored>(
        &self,
        image: *const S,
        rows: &Range<usize>,
        strip: *mut f32,
    ) {
        let Shape { height, width, geometry, .. } = *self.shape;
        let (top, left) = geometry.padding;
        for channel in 0..self.shape.c_in {
            for row in 0..rows.len() + 2 {
                let y = (rows.start + row).checked_sub(top).filter(|y| *y < height);
                let line = image.wrapping_add((channel * height + y.unwrap_or(0)) * width);
                let to = strip.wrapping_add(channel * self.plane() + row * self.pitch);
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

struct Forward<'a> {
    strips: Strips<'a>,
    weight: &'a [u32],
    bias: Option<&'a [f32]>,
}

impl Forward<'_> {
    /// Whether all results are finite: then all are written.
    fn run<S: Stored, O: Rounded>(
        &self,
        x: &[S],
        out: &mut [MaybeUninit<O>],
        isa: InstructionSet,
    ) -> bool {
        let (strips, shape) = (&self.strips, self.strips.shape);
        assert_eq!(x.len(), shape.batch * shape.image());
        assert_eq!(out.len(), shape.batch * shape.out_image());
        assert!(shape.c_out.next_multiple_of(BLOCK) * shape.taps() <= self.weight.len());
        let out = &OutputImages::of(out);
        let finite = AtomicBool::new(true);
        parallel::for_each(shape.batch * strips.an_image(), |task| {
            if !finite.load(Ordering::Relaxed) {
                return;
            }
            let (image, rows) = (task / strips.an_image(), strips.rows(task % strips.an_image()));
            with_words([strips.len()], |[strip]| {
                let strip = strip.as_mut_ptr().cast::<f32>();
                let x = x.as_ptr().wrapping_add(image * shape.image());
                let out = out.at.wrapping_add(image * shape.out_image());
                // SAFETY: the features of the vectors; images of the batch, and a strip as long as they fill.
                let all = unsafe {
                    match isa.rounds_ftz() {
                        true => with_ftz_vectors!(V => {
                            strips.fill::<V, S>(x, &rows, strip);
                            self.strip::<V, O, true>(strip, &rows, out)
                        }),
                        false => with_vectors!(isa.vectors(), V => {
                            strips.fill::<V, S>(x, &rows, strip);
                            self.strip::<V, O, false>(strip, &rows, out)
                        }),
                    }
                };
                if !all {
                    finite.store(false, Ordering::Relaxed);
                }
            });
        });
        finite.into_inner()
    }

    /// Convolves a strip. Whether the results are finite.
    ///
    /// # Safety
    /// The features of `V`, within `with_ftz_vectors!` if `FTZ`; `strip` filled for these rows, and an image at `out`,
    /// which nobody else writes these rows of.
    #[inline(always)]
    unsafe fn strip<V: Vector, O: Rounded, const FTZ: bool>(
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
    /// As [`Self::strip`]'s; the pixels at `line` in the strip, and at `out` in an output plane, if there is one.
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
                    if FTZ {
                        O::store_ftz(at, mask, sum)
                    } else {
                        O::store(at, mask, sum)
                    };
                    *check = sum.mul_add(V::zero(), *check);
                }
            }
        }
    }
}

/// wgrad: all sums of some output channels over some images.
pub(super) struct Wgrad<'a> {
    pub(super) shape: &'a Shape,
    pub(super) channels: Range<usize>,
    pub(super) vectors: Vectors,
}

impl Wgrad<'_> {
    /// The sums, `(tap, channel, output channel)`.
    pub(super) fn run<S: Stored, G: Stored>(
        &self,
        x: &[S],
        grad: &[G],
        images: Range<usize>,
        sums: &mut [f32],
    ) {
        let (shape, outs) = (self.shape, self.channels.len());
        assert!(images.end * shape.image() <= x.len());
        assert!(images.end * shape.out_image() <= grad.len());
        assert!(self.channels.end <= shape.c_out && !self.channels.is_empty());
        let strips = Strips::new(shape);
        assert_eq!(sums.len(), shape.taps() * outs);
        with_words([strips.len(), shape.taps() * outs * 16], |[strip, lanes]| {
            lanes.fill(0);
            let strip = strip.as_mut_ptr().cast::<f32>();
            let lanes = lanes.as_mut_ptr().cast::<f32>();
            for (image, part) in
                images.flat_map(|image| (0..strips.an_image()).map(move |part| (image, part)))
            {
                let rows = strips.rows(part);
                let x = x.as_ptr().wrapping_add(image * shape.image());
                let row = self.channels.start * shape.pixels() + rows.start * shape.out_width;
                let grad = grad.as_ptr().wrapping_add(image * shape.out_image() + row);
                // SAFETY: the features of the vectors; whole images, as asserted, and scratch of these sizes.
                with_vectors!(self.vectors, V => unsafe {
                    strips.fill::<V, S>(x, &rows, strip);
                    self.strip::<V, G>(&strips, strip, grad, rows.len(), lanes);
                });
            }
            // SAFETY: as above.
            with_vectors!(self.vectors, V => unsafe { add_up::<V>(lanes, outs, sums) });
        });
    }

    /// Adds a strip of `rows` rows to `lanes`: `(tap, channel, output channel, lane)`.
    ///
    /// # Safety
    /// The features of `V`; `strip` filled for so many rows, and output planes with so many rows at `grad`.
    #[inline(always)]
    unsafe fn strip<V: Vector, G: Stored>(
        &self,
        strips: &Strips,
        strip: *const f32,
        grad: *const G,
        rows: usize,
        lanes: *mut f32,
    ) {
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
/// As [`Wgrad::strip`]'s.
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
/// As [`Wgrad::strip`]'s; such a pixel in the row of the strip, and pixels of the mask in those of the gradients.
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
unsafe fn add_up<V: Vector>(lanes: *const f32, outs: usize, sums: &mut [f32]) {
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
