//! Depthwise NCHW convolutions with a channel in each lane: small planes, and strides.
//!
//! Rows of a small plane fill few lanes of a vector, and with a stride neighbours in a row do not meet the same tap. So
//! sixteen planes of an image are transposed: a vector for each pixel, a channel in each lane. All three passes are then
//! sums of products of two such vectors, and differ only in which products a sum has:
//!
//! ```text
//! forward   output pixel  =  sum of  input pixel  × tap
//! dgrad     input pixel   =  sum of  output pixel × tap
//! wgrad     tap           =  sum of  input pixel  × output pixel
//! ```
//!
//! A list has these pairs, the same for every channel, and none of padding. Sums are in F32, in the order of the taps;
//! those of wgrad are of at most [`TERMS`] terms, or an image's, before they are added up in F64. No order depends on the
//! number of threads.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::super::packed::Stored;
use super::super::shape::Shape;
use super::widened;
use crate::kernels::cpu::dtype::{Elements, tensor, with_near, with_single};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::prefetch::prefetch_at;
use crate::kernels::cpu::simd::GRAIN;
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::{KeptWords, Rounded, with_words};

/// Lanes of a vector: the channels of a block.
const LANES: usize = 16;
/// Pixels of a plane, at most, whose vectors stay in a second-level cache.
const PIXELS: usize = 4096;
/// Pairs in the list, at most.
const PAIRS: usize = 1 << 15;
/// Terms that a lane of wgrad adds up in F32, unless one image has more.
const TERMS: usize = 128;
/// Columns of the output from which on rows fill most lanes.
const NARROW: usize = 8;

/// The vectors to use for this shape; `None` if this module or the CPU does not support it.
pub(in super::super) fn vectors(shape: &Shape) -> Option<Vectors> {
    let pairs = shape.pixels().saturating_mul(shape.kernel_height * shape.kernel_width);
    let suits = super::suits(shape)
        && shape.group_out() == 1
        && (shape.geometry.stride > 1 || shape.out_width <= NARROW)
        && (shape.height * shape.width).max(shape.pixels()) <= PIXELS
        && pairs <= PAIRS;
    Vectors::widest().filter(|_| suits)
}

/// See [`super::super::forward`]; operands as [`super::forward`] takes them. `None` where a weight is not finite: times the
/// zeros of the padding it is NaN.
pub(in super::super) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    vectors: Vectors,
) -> Result<Option<Tensor>> {
    let list = PairList::new(shape, shape.pixels(), |x, tap, y| (y, x, tap));
    let sizes = [shape.height * shape.width, shape.pixels()];
    let data = convolve::<O>(x, weight, bias, &list, sizes, vectors)?;
    Ok(data.map(|data| tensor(data, &shape.out_dims())))
}

/// See [`super::super::dgrad`]; operands as [`super::dgrad`] takes them. `None` as [`forward`].
pub(in super::super) fn dgrad<O: Rounded>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    vectors: Vectors,
) -> Result<Option<Tensor>> {
    let pixels = shape.height * shape.width;
    let list = PairList::new(shape, pixels, |x, tap, y| (x, y, tap));
    let data = convolve::<O>(grad, weight, bias, &list, [shape.pixels(), pixels], vectors)?;
    Ok(data.map(|data| tensor(data, &shape.input_dims())))
}

/// Sums over planes of `from` pixels, times weights, to planes of `to` pixels.
fn convolve<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    list: &PairList,
    [from, to]: [usize; 2],
    vectors: Vectors,
) -> Result<Option<Vec<O>>> {
    let (channels, weight) = (weight.dims()[0], widened(weight)?);
    if !weight.iter().all(|weight| weight.is_finite()) {
        return Ok(None);
    }
    let bias = match bias {
        Some(bias) => widened(bias)?,
        None => vec![0.0; channels],
    };
    let taps = weight.len() / channels;
    let step = LANES * taps.next_multiple_of(LANES);
    let blocks = channels.div_ceil(LANES);
    let mut weights = KeptWords::new(blocks * step);
    let (weights_of, biases) = (weight.chunks(LANES * taps), bias.chunks(LANES));
    for (weight, places) in weights_of.zip(weights.as_mut_slice().chunks_exact_mut(step)) {
        spread(weight, taps, LANES * taps, places, vectors);
    }
    let weights: Vec<_> = weights.as_slice().chunks_exact(step).zip(biases).collect();
    with_near!(x.dtype(), O, S => {
        let x: &[S] = &Elements::<S>::of(x)?;
        // Whole blocks, or whole images where a block would have channels of two.
        let unit = if channels.is_multiple_of(LANES) { LANES } else { channels };
        let planes = unit * GRAIN.div_ceil(unit * to);
        Ok(Some(uninit_vec(x.len() / from * to, |out: &mut [MaybeUninit<O>]| {
            parallel::for_each_chunk(out, planes * to, |task, out| {
                let sizes = [from, to].map(|pixels| LANES * pixels.next_multiple_of(LANES));
                with_words(sizes, |[left, result]| {
                    let (mut at, end) = (task * planes, task * planes + out.len() / to);
                    let mut rest = out;
                    while at < end {
                        let (weight, bias) = weights[at % channels / LANES];
                        let count = bias.len();
                        spread(&x[at * from..][..count * from], from, count * from, left, vectors);
                        list.run(left, weight, bias, result, vectors);
                        let out = rest.split_off_mut(..count * to).unwrap_or_default();
                        gather(result, to, out, vectors);
                        at += count;
                    }
                });
            });
        })))
    })
}

/// See [`super::super::wgrad`]; operands as [`super::wgrad`] takes them. `None` where a sum is not finite: padding may
/// have met an infinity. Nor where an output pixel meets padding alone, as no sum would show its infinity.
pub(in super::super) fn wgrad(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    vectors: Vectors,
) -> Result<Option<Tensor>> {
    let taps = shape.kernel_height * shape.kernel_width;
    let list = PairList::new(shape, taps, |x, tap, y| (tap, x, y));
    let (image, pixels, channels) = (shape.height * shape.width, shape.pixels(), shape.c_in);
    let mut met = vec![false; pixels];
    list.pairs.iter().for_each(|pair| met[usize::from(pair[1])] = true);
    if met.contains(&false) {
        return Ok(None);
    }
    let blocks = channels.div_ceil(LANES);
    // Of few channels, images are cut into runs too.
    let run = shape.batch.div_ceil((RUNS / blocks).max(1));
    let runs = shape.batch.div_ceil(run);
    let _held = hold([x, grad]);
    let sums: Vec<Vec<f64>> = with_single!(x.dtype(), S => {
        let (x, grad): (&[S], &[S]) = (&Elements::<S>::of(x)?, &Elements::<S>::of(grad)?);
        parallel::map(blocks * runs, |task| {
            let channel = task / runs * LANES;
            let count = LANES.min(channels - channel);
            let images = task % runs * run..shape.batch.min((task % runs + 1) * run);
            let mut total = vec![0.0; LANES * taps];
            let sizes = [image, pixels, taps].map(|pixels| LANES * pixels.next_multiple_of(LANES));
            with_words(sizes, |[left, right, lanes]| {
                let mut terms = 0;
                lanes.fill(0);
                for plane in images.map(|image| image * channels + channel) {
                    let (own, next) = (&x[plane * image..][..count * image], channels * image);
                    spread(own, image, next, left, vectors);
                    let own = &grad[plane * pixels..][..count * pixels];
                    spread(own, pixels, channels * pixels, right, vectors);
                    if terms + pixels > TERMS {
                        add_up(lanes, &mut total);
                        terms = 0;
                    }
                    terms += pixels;
                    list.add_to(left, right, lanes, vectors);
                }
                add_up(lanes, &mut total);
            });
            total
        })
    });
    let mut weights = vec![0.0; channels * taps];
    for (block, weights) in weights.chunks_mut(LANES * taps).enumerate() {
        for (lane, weights) in weights.chunks_mut(taps).enumerate() {
            for (tap, weight) in weights.iter_mut().enumerate() {
                let runs = &sums[block * runs..(block + 1) * runs];
                *weight = runs.iter().map(|run| run[tap * LANES + lane]).sum::<f64>() as f32;
            }
        }
    }
    let finite = weights.iter().all(|weight| weight.is_finite());
    Ok(finite.then(|| tensor(weights, &shape.weight_dims())))
}

/// Tasks of wgrad, at least, where there are as many images.
const RUNS: usize = 8;

/// Adds F32 lanes to sums, and leaves zeros.
fn add_up(lanes: &mut [u32], sums: &mut [f64]) {
    for (sum, lane) in sums.iter_mut().zip(&mut *lanes) {
        *sum += f64::from(f32::from_bits(*lane));
    }
    lanes.fill(0);
}

/// Which products each sum has: of a vector on the left and one on the right.
struct PairList {
    /// Where the pairs of each sum end.
    ends: Vec<usize>,
    pairs: Vec<[u16; 2]>,
    /// One more than the largest number of a pair, left and right.
    least: [usize; 2],
}

impl PairList {
    /// Of so many sums; `place` says of an input pixel, tap and output pixel that meet which sum has their product, and
    /// which vectors it multiplies.
    fn new(
        shape: &Shape,
        count: usize,
        place: impl Fn(usize, usize, usize) -> (usize, usize, usize),
    ) -> Self {
        let mut lists = vec![Vec::new(); count];
        shape.meetings(|tap, input, output| {
            let (sum, left, right) = place(input, tap, output);
            lists[sum].push([left as u16, right as u16]);
        });
        let ends = lists.iter().scan(0, |end, list| {
            *end += list.len();
            Some(*end)
        });
        let ends = ends.collect();
        let pairs = lists.concat();
        let least = [0, 1].map(|side| pairs.iter().map(|pair| usize::from(pair[side]) + 1).max());
        Self { ends, pairs, least: least.map(Option::unwrap_or_default) }
    }

    fn check(&self, left: &[u32], right: &[u32], sums: &[u32]) {
        let sizes = [left.len(), right.len()];
        assert!(sizes.iter().zip(self.least).all(|(size, least)| least * LANES <= *size));
        assert!(self.ends.len() * LANES <= sums.len());
    }

    /// Writes all sums, plus the lanes of `first`.
    fn run(&self, left: &[u32], right: &[u32], first: &[f32], sums: &mut [u32], vectors: Vectors) {
        self.check(left, right, sums);
        let (left, right) = (left.as_ptr().cast::<f32>(), right.as_ptr().cast::<f32>());
        let sums = sums.as_mut_ptr().cast::<f32>();
        with_vectors!(vectors, V => {
            let mut start = 0;
            // SAFETY: the features; vectors of pairs and sums lie in the buffers, as checked.
            unsafe {
                let first = V::load_masked(first.as_ptr(), first_lanes(first.len()));
                for (number, &end) in self.ends.iter().enumerate() {
                    let mut sum = first;
                    for &[i, j] in &self.pairs[start..end] {
                        let right = V::load(right.add(LANES * usize::from(j)));
                        sum = V::load(left.add(LANES * usize::from(i))).mul_add(right, sum);
                    }
                    sum.store(sums.add(LANES * number));
                    start = end;
                }
            }
        });
    }

    /// Adds to all sums; of each, the even products and the odd ones are added up apart.
    fn add_to(&self, left: &[u32], right: &[u32], sums: &mut [u32], vectors: Vectors) {
        self.check(left, right, sums);
        let (left, right) = (left.as_ptr().cast::<f32>(), right.as_ptr().cast::<f32>());
        let sums = sums.as_mut_ptr().cast::<f32>();
        with_vectors!(vectors, V => {
            let mut start = 0;
            // SAFETY: as in `run`.
            unsafe {
                for (number, &end) in self.ends.iter().enumerate() {
                    let (pairs, last) = self.pairs[start..end].as_chunks::<2>();
                    let (mut sum, mut other) = (V::load(sums.add(LANES * number)), V::zero());
                    for &[[i, j], [k, l]] in pairs {
                        let right_of = V::load(right.add(LANES * usize::from(j)));
                        sum = V::load(left.add(LANES * usize::from(i))).mul_add(right_of, sum);
                        let right_of = V::load(right.add(LANES * usize::from(l)));
                        other = V::load(left.add(LANES * usize::from(k))).mul_add(right_of, other);
                    }
                    for &[i, j] in last {
                        let right_of = V::load(right.add(LANES * usize::from(j)));
                        sum = V::load(left.add(LANES * usize::from(i))).mul_add(right_of, sum);
                    }
                    sum.add(other).store(sums.add(LANES * number));
                    start = end;
                }
            }
        });
    }
}

/// Writes a vector for each pixel of at most sixteen planes: a plane in each lane, and zeros in others. Asks for those
/// `next` elements further, which are read after them.
fn spread<S: Stored>(planes: &[S], pixels: usize, next: usize, to: &mut [u32], vectors: Vectors) {
    let count = planes.len() / pixels;
    assert!(count <= LANES && LANES * pixels.next_multiple_of(LANES) <= to.len());
    let (planes, to) = (planes.as_ptr(), to.as_mut_ptr().cast::<f32>());
    with_vectors!(vectors, V => {
        for first in (0..pixels).step_by(LANES) {
            let mask = first_lanes(pixels - first);
            // SAFETY: the features. Lanes of the mask lie in a plane, and 16 vectors in the buffer, as asserted.
            unsafe {
                let mut rows = [V::zero(); LANES];
                for (channel, row) in rows.iter_mut().enumerate().take(count) {
                    let pixels = planes.add(channel * pixels + first);
                    prefetch_at(pixels.wrapping_add(next), 1);
                    *row = S::load(pixels, mask);
                }
                for (pixel, vector) in V::transpose(rows).iter().enumerate() {
                    vector.store(to.add((first + pixel) * LANES));
                }
            }
        }
    });
}

/// The reverse of [`spread`], rounded.
fn gather<O: Rounded>(
    from: &[u32],
    pixels: usize,
    planes: &mut [MaybeUninit<O>],
    vectors: Vectors,
) {
    let count = planes.len() / pixels;
    assert!(count <= LANES && LANES * pixels.next_multiple_of(LANES) <= from.len());
    let (from, planes) = (from.as_ptr().cast::<f32>(), planes.as_mut_ptr().cast::<O>());
    with_vectors!(vectors, V => {
        for first in (0..pixels).step_by(LANES) {
            let mask = first_lanes(pixels - first);
            // SAFETY: as in `spread`.
            unsafe {
                let mut columns = [V::zero(); LANES];
                for (pixel, column) in columns.iter_mut().enumerate() {
                    *column = V::load(from.add((first + pixel) * LANES));
                }
                for (channel, row) in V::transpose(columns).iter().enumerate().take(count) {
                    O::store(planes.add(channel * pixels + first), mask, *row);
                }
            }
        }
    });
}
