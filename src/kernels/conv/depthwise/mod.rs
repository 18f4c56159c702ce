//! Depthwise NCHW convolutions, by sums of shifted planes: every input channel is a group of its own.
//!
//! A plane is one channel of one image. Where rows keep their padding, an output plane at stride 1 is a sum of shifted
//! copies of the input plane, one for each tap. A loop goes over the whole plane at once, so it is a long loop,
//! however narrow the image. What it computes at the end of each row, from two rows, is dropped.
//!
//! With a stride, a tap meets only the pixels whose row and column leave one remainder: a *phase* of the plane. Phases
//! are stored apart, and each is then shifted like a plane at stride 1.
//!
//! dgrad is the same loop: the planes of the output's gradient, shifted the other way, make each phase. wgrad is a dot
//! product of the gradient with the phase for each tap. Planes stay in the first-level cache. Sums are in F32, and of
//! blocks in F64, in an order that does not depend on the number of threads.
//!
//! On processors with vectors that they know, [`rows`] takes the usual ones of stride 1, and [`lanes`] small planes and
//! strides. What is left are large planes, other kernels, and weights that are not finite.

pub(super) mod lanes;
pub(super) mod rows;

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::shape::Shape;
use crate::kernels::cpu::dtype::{Element, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::{BLOCK, GRAIN, vectorise};
use crate::kernels::cpu::uninit::{uninit_vec, zeroed};
use crate::kernels::gemm::{Arithmetic, narrow};
use crate::kernels::reduce::channels::block_sums;

/// Elements that the inner loop takes at a time. It may read and write as many beyond the end.
const LANES: usize = 64;

/// Whether this module convolves such a shape.
pub(super) fn suits(shape: &Shape) -> bool {
    shape.depthwise() && shape.group_in() == 1
}

/// See [`super::forward`]; contiguous operands, no F64.
pub(super) fn forward<O: Lane<Acc = f32>>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
) -> Result<Tensor> {
    let (weight, bias) = (widened(weight)?, bias.map(widened).transpose()?);
    let (x, phases) = (f32::open(x)?, Phases::new(shape));
    let (plane, outs, pixels) = (phases.image, shape.group_out(), shape.pixels());
    let per_task = GRAIN.div_ceil(outs * pixels);
    let run = |task: usize, out: &mut [MaybeUninit<O>]| {
        let sizes = [plane, phases.len() + LANES, phases.reach + LANES];
        with_parts(sizes, |[image, split, sums]| {
            split.fill(0.0);
            for (i, out) in out.chunks_exact_mut(outs * pixels).enumerate() {
                let at = task * per_task + i;
                phases.split(x.read(at * plane..(at + 1) * plane, image), 0, 1, split);
                let first = at % shape.c_in * outs;
                for (channel, out) in (first..).zip(out.chunks_exact_mut(pixels)) {
                    let weight = &weight[channel * phases.taps.len()..];
                    let starts = phases.taps.iter().map(|tap| phases.start(tap));
                    let terms: Vec<_> = starts.zip(weight.iter().copied()).collect();
                    let bias = bias.as_ref().map_or(0.0, |bias| bias[channel]);
                    sum_of_shifts(sums, split, &terms, bias);
                    phases.narrow(sums, out);
                }
            }
        });
    };
    let out = uninit_vec(shape.batch * shape.out_image(), |out| {
        parallel::for_each_chunk(out, per_task * outs * pixels, run);
    });
    Ok(tensor(out, &shape.out_dims()))
}

/// See [`super::dgrad`]; contiguous operands, no F64. `None` where zeros between rows would make NaN of a weight that is
/// not finite: im2col has none there.
pub(super) fn dgrad<O: Element<Acc = f32>>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
) -> Result<Option<Tensor>> {
    let (weight, bias) = (widened(weight)?, bias.map(widened).transpose()?);
    if shape.transposed().is_none() && !weight.iter().all(|weight| weight.is_finite()) {
        return Ok(None);
    }
    let (grad, phases) = (f32::open(grad)?, Phases::new(shape));
    let (plane, outs, pixels) = (phases.image, shape.group_out(), shape.pixels());
    // As many zeros before the gradient as a tap shifts it back, so that every shift starts within.
    let lead = phases.taps.iter().map(|tap| tap.shift).max().unwrap_or(0);
    let spread_len = lead + phases.plane();
    let per_task = GRAIN.div_ceil(plane);
    let run = |task: usize, out: &mut [MaybeUninit<O>]| {
        let out = zeroed(out);
        let sizes = [outs * pixels, outs * spread_len + LANES, phases.plane() + LANES, plane];
        with_parts(sizes, |[planes, spread, sums, image]| {
            spread.fill(0.0);
            for (i, out) in out.chunks_exact_mut(plane).enumerate() {
                let at = task * per_task + i;
                let range = at * outs * pixels..(at + 1) * outs * pixels;
                let planes = grad.read(range, planes).chunks_exact(pixels);
                for (spread, plane) in spread.chunks_exact_mut(spread_len).zip(planes) {
                    phases.spread(plane, &mut spread[lead..]);
                }
                let channel = at % shape.c_in;
                let bias = bias.as_ref().map_or(0.0, |bias| bias[channel]);
                image.fill(bias);
                for phase in 0..phases.corners.len() {
                    let mut terms = Vec::with_capacity(outs * phases.taps.len());
                    for of in 0..outs {
                        let weight = &weight[(channel * outs + of) * phases.taps.len()..];
                        let taps = phases.taps.iter().zip(weight).filter(|(t, _)| t.phase == phase);
                        let start = of * spread_len + lead;
                        terms.extend(taps.map(|(tap, &weight)| (start - tap.shift, weight)));
                    }
                    sum_of_shifts(sums, spread, &terms, bias);
                    phases.join(phase, sums, image);
                }
                narrow(image, out);
            }
        });
    };
    let out = uninit_vec(shape.batch * shape.image(), |out| {
        parallel::for_each_chunk(out, per_task * plane, run);
    });
    Ok(Some(tensor(out, &shape.input_dims())))
}

/// See [`super::wgrad`]; contiguous operands, no F64.
pub(super) fn wgrad(x: &Tensor, grad: &Tensor, shape: &Shape) -> Result<Tensor> {
    let _held = hold([x, grad]);
    let (x, grad, phases) = (f32::open(x)?, f32::open(grad)?, Phases::new(shape));
    let (plane, outs, pixels) = (phases.image, shape.group_out(), shape.pixels());
    // Small planes of several images are one.
    let together = BLOCK.div_ceil(phases.plane()).min(shape.batch);
    let sizes = [plane, together * phases.len(), outs * pixels, together * phases.plane()];
    let channels = parallel::map(shape.c_in, |channel| {
        let mut sums = vec![0.0; outs * phases.taps.len()];
        with_parts(sizes, |[image, split, planes, spread]| {
            for first in (0..shape.batch).step_by(together) {
                let images = first..shape.batch.min(first + together);
                let count = images.len();
                let split = &mut split[..count * phases.len()];
                if first == 0 || count != together {
                    split.fill(0.0);
                    spread.fill(0.0);
                }
                for (i, at) in images.clone().enumerate() {
                    let start = (at * shape.c_in + channel) * plane;
                    phases.split(x.read(start..start + plane, image), i, count, split);
                }
                for (of, sums) in sums.chunks_exact_mut(phases.taps.len()).enumerate() {
                    for (i, at) in images.clone().enumerate() {
                        let start = ((at * shape.c_in + channel) * outs + of) * pixels;
                        let plane = grad.read(start..start + pixels, &mut planes[..pixels]);
                        phases.spread(plane, &mut spread[i * phases.plane()..]);
                    }
                    let spread = &spread[..(count - 1) * phases.plane() + phases.reach];
                    for (tap, sum) in phases.taps.iter().zip(sums) {
                        let x = &split[tap.phase * phases.plane() * count + tap.shift..];
                        *sum += phases.dot(spread, x);
                    }
                }
            }
        });
        sums
    });
    let sums = channels.into_iter().flatten().map(|sum| sum as f32).collect();
    Ok(tensor(sums, &shape.weight_dims()))
}

/// A tap of the kernel: the phase it meets, and how far it is shifted there.
struct Tap {
    phase: usize,
    shift: usize,
}

/// The phases of a padded plane, all of the same size.
struct Phases<'a> {
    shape: &'a Shape,
    /// Row and column, modulo the stride, of those that a tap meets. There may be far fewer than the stride squared.
    corners: Vec<(usize, usize)>,
    /// Row by row.
    taps: Vec<Tap>,
    /// Rows of a phase, and elements of a row.
    rows: usize,
    pitch: usize,
    /// Elements of a plane of the output whose rows are `pitch` apart.
    reach: usize,
    /// Elements of a plane of the input.
    image: usize,
}

impl<'a> Phases<'a> {
    fn new(shape: &'a Shape) -> Self {
        let (stride, dilation) = (shape.geometry.stride, shape.geometry.dilation);
        let pitch = shape.padded_width().div_ceil(stride);
        let (mut corners, mut taps) = (Vec::new(), Vec::new());
        for row in (0..shape.kernel_height).map(|row| row * dilation) {
            for column in (0..shape.kernel_width).map(|column| column * dilation) {
                let corner = (row % stride, column % stride);
                let known = corners.iter().position(|known| *known == corner);
                let phase = known.unwrap_or(corners.len());
                if known.is_none() {
                    corners.push(corner);
                }
                taps.push(Tap { phase, shift: row / stride * pitch + column / stride });
            }
        }
        Self {
            shape,
            corners,
            taps,
            rows: shape.padded_height().div_ceil(stride),
            pitch,
            reach: (shape.out_height - 1) * pitch + shape.out_width,
            image: shape.height * shape.width,
        }
    }

    /// Elements of a phase.
    fn plane(&self) -> usize {
        self.rows * self.pitch
    }

    /// Elements of all phases.
    fn len(&self) -> usize {
        self.corners.len() * self.plane()
    }

    /// Where a shifted phase starts.
    fn start(&self, tap: &Tap) -> usize {
        tap.phase * self.plane() + tap.shift
    }

    /// The pixels of a phase: for each of its rows in the image, where it starts there and in the phase. Pixels are
    /// the stride apart in the image, and neighbours in the phase.
    fn pixels(&self, phase: usize) -> impl Iterator<Item = (usize, usize)> + use<'_> {
        let stride = self.shape.geometry.stride;
        let (above, left) = self.shape.geometry.padding;
        let first =
            move |corner: usize, padding: usize| (corner + stride - padding % stride) % stride;
        let (row, column) = self.corners[phase];
        let (first_row, first_column) = (first(row, above), first(column, left));
        let rows = if first_column < self.shape.width { self.shape.height } else { 0 };
        (first_row..rows).step_by(stride).map(move |row| {
            let in_phase = (row + above) / stride * self.pitch + (first_column + left) / stride;
            (row * self.shape.width + first_column, in_phase)
        })
    }

    /// Writes the phases of plane `at` of `count`, the first phase of all planes first, and leaves what is there for the
    /// padding.
    fn split(&self, image: &[f32], at: usize, count: usize, phases: &mut [f32]) {
        let (stride, width) = (self.shape.geometry.stride, self.shape.width);
        for phase in 0..self.corners.len() {
            let to = &mut phases[(phase * count + at) * self.plane()..][..self.plane()];
            for (from, start) in self.pixels(phase) {
                let row = &image[from..from - from % width + width];
                if stride == 1 {
                    to[start..start + row.len()].copy_from_slice(row);
                } else {
                    let pixels = row.iter().step_by(stride);
                    to[start..].iter_mut().zip(pixels).for_each(|(to, pixel)| *to = *pixel);
                }
            }
        }
    }

    /// Writes the pixels of a phase to the image.
    fn join(&self, phase: usize, from: &[f32], image: &mut [f32]) {
        let (stride, width) = (self.shape.geometry.stride, self.shape.width);
        for (to, start) in self.pixels(phase) {
            let row = &mut image[to..to - to % width + width];
            if stride == 1 {
                row.copy_from_slice(&from[start..start + row.len()]);
            } else {
                let pixels = row.iter_mut().step_by(stride);
                pixels.zip(&from[start..]).for_each(|(pixel, from)| *pixel = *from);
            }
        }
    }

    /// Writes a plane of the output with rows `pitch` apart, and leaves what is between them and after.
    fn spread(&self, plane: &[f32], out: &mut [f32]) {
        let width = self.shape.out_width;
        let out = &mut out[..self.plane()];
        for (row, out) in plane.chunks_exact(width).zip(out.chunks_exact_mut(self.pitch)) {
            out[..width].copy_from_slice(row);
        }
    }

    /// Writes a plane of the output whose rows are `pitch` apart, rounded, without what is between them.
    fn narrow<O: Lane<Acc = f32>>(&self, sums: &[f32], out: &mut [MaybeUninit<O>]) {
        let width = self.shape.out_width;
        vectorise(
            #[inline(always)]
            || {
                let rows = sums.chunks(self.pitch).zip(out.chunks_exact_mut(width));
                for (sums, out) in rows {
                    for (out, sum) in out.iter_mut().zip(&sums[..width]) {
                        out.write(O::narrowed(*sum));
                    }
                }
            },
        );
    }

    /// The dot product of spread planes of the output with a shifted phase.
    fn dot(&self, spread: &[f32], phase: &[f32]) -> f64 {
        let sum = dot(spread, phase);
        if sum.is_finite() {
            return sum;
        }
        // Zeros between the rows may have met pixels that this tap does not, and that are not finite.
        let starts = (0..spread.len()).step_by(self.pitch);
        let within = |start: &usize| start % self.plane() < self.shape.out_height * self.pitch;
        let rows = starts.filter(within).map(|start| start..start + self.shape.out_width);
        rows.map(|row| dot(&spread[row.clone()], &phase[row])).sum()
    }
}

/// Sums of products, as long as `a`.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let mut sum = 0.0;
    vectorise(
        #[inline(always)]
        || {
            // Longer than a block: the sums of lanes have a hundred terms, and few are added up.
            for (a, b) in a.chunks(4 * BLOCK).zip(b[..a.len()].chunks(4 * BLOCK)) {
                sum += block_sums(
                    [a, b],
                    #[inline(always)]
                    |[a, b]| [a * b],
                )[0];
            }
        },
    );
    sum
}

/// Writes `first` plus the sum, over the terms, of the source from their start on, times their weight. The last
/// elements, fewer than [`LANES`], are left.
fn sum_of_shifts(out: &mut [f32], source: &[f32], terms: &[(usize, f32)], first: f32) {
    vectorise(
        #[inline(always)]
        || {
            for (number, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let mut sums = [first; LANES];
                for &(start, weight) in terms {
                    let mut x = [0.0; LANES];
                    x.copy_from_slice(&source[start + number * LANES..][..LANES]);
                    for lane in 0..LANES {
                        sums[lane] = x[lane].mul_add(weight, sums[lane]);
                    }
                }
                *out = sums;
            }
        },
    );
}

/// A small tensor's elements, widened.
fn widened(tensor: &Tensor) -> Result<Vec<f32>> {
    let mut data = vec![0.0; tensor.elem_count()];
    f32::open(tensor)?.widen(0, &mut data);
    Ok(data)
}

/// Calls `f` with memory of these sizes and unspecified values.
fn with_parts<const N: usize>(sizes: [usize; N], f: impl FnOnce([&mut [f32]; N])) {
    f32::with_scratch(sizes.iter().sum(), |mut rest| {
        f(sizes.map(|size| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(size);
            rest = after;
            part
        }));
    });
}
