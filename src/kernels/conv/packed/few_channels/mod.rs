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
mod strips;

use std::mem::MaybeUninit;
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};

use super::rows::{Stored, with_stored};
use super::store::OutputImages;
use super::{weights, winograd};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::tensor;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cpu::vector::{Vector, with_ftz_vectors, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, Rounded, with_words};
use crate::kernels::tensors::format::Format;
pub(super) use strips::Wgrad;
use strips::{Forward, Strips};

/// Input channels of a first layer.
const CHANNELS: RangeInclusive<usize> = 2..=4;

/// Whether the convolution is such a first layer, and fills most lanes.
pub(in crate::kernels::conv) fn suits(shape: &Shape, isa: InstructionSet) -> bool {
    let (lanes, least) = match shape.geometry.format {
        Format::ChannelsFirst => (shape.out_width, planes::BLOCK),
        Format::ChannelsLast => (shape.c_out, 1),
    };
    !isa.is_amx()
        && winograd::is_plain(shape)
        && CHANNELS.contains(&shape.c_in)
        && shape.c_out >= least
        && 4 * lanes >= 3 * lanes.next_multiple_of(16)
}

/// See [`super::super::forward`]; `None` where a result is not finite.
pub(in crate::kernels::conv) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let strips = Strips::new(shape);
    let weight = weights::widened(weight)?;
    let weight = match shape.geometry.format {
        Format::ChannelsFirst => planes::pack(&weight, shape),
        Format::ChannelsLast => pixels::pack(&weight, shape),
    };
    let bias = bias.map(weights::widened).transpose()?;
    let bias = bias.as_deref();
    let pass = Forward { strips, weight: weight.as_slice(), bias };
    let len = shape.batch * shape.out_image();
    let data = with_stored!(x, O, x => {
        try_uninit_vec(len, |out: &mut [MaybeUninit<O>]| pass.run(&x, out, isa))
    });
    Ok(data.map(|data| tensor(data, &shape.out_dims())))
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
        assert!(CHANNELS.contains(&shape.c_in));
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
                (Format::ChannelsLast, 2) => self.pixels::<V, O, FTZ, 2>(strip, rows, out),
                (Format::ChannelsLast, 3) => self.pixels::<V, O, FTZ, 3>(strip, rows, out),
                (Format::ChannelsLast, _) => self.pixels::<V, O, FTZ, 4>(strip, rows, out),
            }
        }
    }
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
        assert!(CHANNELS.contains(&shape.c_in));
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
