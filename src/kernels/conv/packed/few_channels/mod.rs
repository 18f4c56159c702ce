//! First layers: convolutions of two to four channels by three by three weights at stride 1. A single channel does not
//! come here: [`super::isa`] leaves it to other algorithms. Products are in F32, for BF16 too: where sums are so short,
//! AVX512-BF16's pairs are no gain. AMX is faster, so it multiplies BF16 by packed GEMM.
//!
//! Their sums have 18 to 36 terms. To pack operands for so few, or to transform tiles, takes as long as the products.
//! Here a thread widens some rows of an image into a *strip*, padding included, which stays in its nearest cache, and each
//! tap reads the strip at an offset of its own. With channels first a vector is sixteen pixels of a row ([`planes`]), with
//! channels last sixteen output channels of a pixel ([`pixels`]).
//!
//! Zeros of the padding, and lanes that nobody writes, make NaN of an infinity. So a pass whose results are not all finite is
//! repeated by another algorithm.
#![allow(unsafe_code)]

mod pixels;
mod planes;

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
use crate::kernels::cpu::vector::{Vector, Vectors, with_ftz_vectors, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, PackedWords, Rounded, with_words};
use crate::kernels::tensors::format::Format;

/// Elements of a strip: with a row of each output channel of a block, no more than a nearest cache of 32 KiB has.
const STRIP: usize = 5120;

/// Whether the convolution is such a first layer, and fills most lanes.
pub(in crate::kernels::conv) fn suits(shape: &Shape, isa: InstructionSet) -> bool {
    let (lanes, least) = match shape.geometry.format {
        Format::ChannelsFirst => (shape.out_width, planes::BLOCK),
        Format::ChannelsLast => (shape.c_out, 1),
    };
    !isa.is_amx()
        && winograd::is_plain(shape)
        && (LEAST..=MOST).contains(&shape.c_in)
        && shape.c_out >= least
        && 4 * lanes >= 3 * lanes.next_multiple_of(16)
}

/// Input channels of a first layer.
const LEAST: usize = 2;
const MOST: usize = 4;

/// See [`super::super::forward`]; `None` where a result is not finite.
pub(in crate::kernels::conv) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let strips = Strips::new(shape);
    let weight = strips.pack(&weights::widened(weight)?);
    let bias = bias.map(weights::widened).transpose()?;
    let bias = bias.as_deref();
    let pass = Forward { strips, weight: weight.as_slice(), bias };
    let len = shape.batch * shape.out_image();
    let data = with_stored!(x, O, x => {
        try_uninit_vec(len, |out: &mut [MaybeUninit<O>]| pass.run(&x, out, isa))
    });
    Ok(data.map(|data| tensor(data, &shape.out_dims())))
}

/// How images are cut.
struct Strips<'a> {
    shape: &'a Shape,
    /// Channels that lie apart.
    planes: usize,
    /// Elements of a pixel in a plane.
    pixel: usize,
    /// Output rows of a strip; the last one of an image may have fewer.
    rows: usize,
    /// Elements from a row of a strip to the next: vectors of a row, and one more that the last taps reach into.
    pitch: usize,
}

impl<'a> Strips<'a> {
    fn new(shape: &'a Shape) -> Self {
        let (planes, pixel) = match shape.geometry.format {
            Format::ChannelsFirst => (shape.c_in, 1),
            Format::ChannelsLast => (1, shape.c_in),
        };
        let pitch = (shape.out_width * pixel).next_multiple_of(16) + 16;
        let most = (STRIP / (planes * pitch)).saturating_sub(2).max(8);
        let count = shape.out_height.div_ceil(most);
        Self { shape, planes, pixel, rows: shape.out_height.div_ceil(count), pitch }
    }

    /// Weights as [`Forward`] reads them.
    fn pack(&self, weight: &[f32]) -> PackedWords {
        match self.shape.geometry.format {
            Format::ChannelsFirst => planes::pack(weight, self.shape),
            Format::ChannelsLast => pixels::pack(weight, self.shape),
        }
    }

    /// Strips of an image.
    fn an_image(&self) -> usize {
        self.shape.out_height.div_ceil(self.rows)
    }

    /// The output rows of a strip of an image.
    fn rows(&self, strip: usize) -> Range<usize> {
        let first = strip * self.rows;
        first..self.shape.out_height.min(first + self.rows)
    }

    /// Elements of a plane.
    fn plane(&self) -> usize {
        (self.rows + 2) * self.pitch
    }

    /// Elements of a strip.
    fn len(&self) -> usize {
        self.planes * self.plane()
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
        assert!((LEAST..=MOST).contains(&shape.c_in));
        assert_eq!(x.len(), shape.batch * shape.image());
        assert_eq!(out.len(), shape.batch * shape.out_image());
        let outs = match shape.geometry.format {
            Format::ChannelsFirst => shape.c_out.next_multiple_of(planes::BLOCK),
            Format::ChannelsLast => shape.c_out.next_multiple_of(16),
        };
        assert!(outs * shape.taps() <= self.weight.len());
        assert!(self.bias.is_none_or(|bias| bias.len() == shape.c_out));
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
        // SAFETY: the caller's; images have as many channels.
        unsafe {
            match (self.strips.shape.geometry.format, self.strips.shape.c_in) {
                (Format::ChannelsFirst, _) => self.planes::<V, O, FTZ>(strip, rows, out),
                (Format::ChannelsLast, LEAST) => self.pixels::<V, O, FTZ, LEAST>(strip, rows, out),
                (Format::ChannelsLast, 3) => self.pixels::<V, O, FTZ, 3>(strip, rows, out),
                (Format::ChannelsLast, _) => self.pixels::<V, O, FTZ, MOST>(strip, rows, out),
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
        assert!((LEAST..=MOST).contains(&shape.c_in));
        assert!(images.end * shape.image() <= x.len());
        assert!(images.end * shape.out_image() <= grad.len());
        assert!(self.channels.end <= shape.c_out && !self.channels.is_empty());
        let strips = Strips::new(shape);
        assert_eq!(sums.len(), shape.taps() * outs);
        let first = shape.geometry.format == Format::ChannelsFirst;
        let lanes = if first { shape.taps() * outs * 16 } else { 0 };
        with_words([strips.len(), lanes], |[strip, lanes]| {
            lanes.fill(0);
            sums.fill(0.0);
            let strip = strip.as_mut_ptr().cast::<f32>();
            let lanes = lanes.as_mut_ptr().cast::<f32>();
            for (image, part) in
                images.flat_map(|image| (0..strips.an_image()).map(move |part| (image, part)))
            {
                let rows = strips.rows(part);
                let x = x.as_ptr().wrapping_add(image * shape.image());
                let grad = grad.as_ptr().wrapping_add(image * shape.out_image());
                // SAFETY: the features of the vectors; whole images, as asserted, and scratch and sums of these sizes.
                with_vectors!(self.vectors, V => unsafe {
                    strips.fill::<V, S>(x, &rows, strip);
                    match first {
                        true => self.planes::<V, G>(&strips, strip, grad, &rows, lanes),
                        false => self.pixels::<V, G>(&strips, strip, grad, &rows, sums.as_mut_ptr()),
                    }
                });
            }
            if first {
                // SAFETY: as above.
                with_vectors!(self.vectors, V => unsafe { planes::add_up::<V>(lanes, outs, sums) });
            }
        });
    }
}
