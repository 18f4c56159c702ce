//! NCHW convolutions of small images in BF16, with an image in each lane.
//!
//! A row of a small image fills few lanes, and many of its taps are padding: 31 % of those of a 3 × 3 kernel on 4 × 4
//! pixels. So sixteen images are transposed: a word of two channels for each pixel, an image in each lane. A pixel of
//! the result is then a product of its own, weights × images. Its sum has a segment for each tap that meets a pixel, and
//! none for padding. dgrad is the same with other pixels. For wgrad see [`wgrad`].
//!
//! A weight that is not finite makes NaN of padding, so that [`convolve`] leaves it to im2col.
#![allow(unsafe_code)]

mod images;
mod wgrad;

use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};
use half::bf16;

use super::layout::Taps;
use super::store::OutputImages;
use super::weights::{self, Order};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::{Elements, tensor};
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::vectorise;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cpu::vector::{Vector, first_lanes, with_bf16_vectors, with_ftz_vectors};
use crate::kernels::gemm::micro::{InstructionSet, KeptWords, PackedGemm, Rounded, with_words};
use images::{LANES, ROWS, RowPairs, is_small};
pub(in super::super) use wgrad::{suits as wgrad_suits, wgrad};

/// Vectors of a tile, of pixels or of blocks of images.
const VECTORS: usize = 3;
/// Words of an image, at most: more are streamed by im2col just as well.
const WORDS: usize = 1 << 14;
/// Output channels of a task.
const TASK: usize = 32;
/// Words of a channel that a task transposes.
const PACKED: usize = 16;

/// Whether forward or dgrad of this shape is faster this way: if empty lanes waste less work than multiplying padding
/// would.
pub(in super::super) fn suits(shape: &Shape, order: Order, isa: InstructionSet) -> bool {
    let [from, _] = sizes(shape, order);
    let lanes = shape.batch.next_multiple_of(LANES);
    let taps = shape.kernel_height * shape.kernel_width;
    is_small(shape, isa)
        && from * shape.group_in().max(shape.group_out()).div_ceil(2) <= WORDS
        && 20 * lanes * shape.meetings(|_, _, _| ()) <= 19 * shape.batch * taps * shape.pixels()
}

/// Pixels that are read, and written.
fn sizes(shape: &Shape, order: Order) -> [usize; 2] {
    let [input, output] = [shape.height * shape.width, shape.pixels()];
    if order == Order::Forward { [input, output] } else { [output, input] }
}

/// See [`super::super::forward`], or [`super::super::dgrad`], of contiguous BF16; `None` where a weight is not finite.
pub(in super::super) fn convolve<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    order: Order,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let bias = bias.map(weights::widened).transpose()?;
    let bias = bias.as_deref();
    let weight = weights::pack(weight, shape, &Taps::forward(shape), order, isa)?;
    let x: &[bf16] = &Elements::of(x)?;
    let [from, to] = sizes(shape, order);
    let (ins, outs) = match order {
        Order::Forward => (shape.c_in, shape.c_out),
        Order::Backward => (shape.c_out, shape.c_in),
    };
    let words = ins.div_ceil(2);
    let mut met = vec![Vec::new(); to];
    shape.meetings(|tap, input, output| match order {
        Order::Forward => met[output].push((tap, input)),
        Order::Backward => met[input].push((tap, output)),
    });
    let sums = alike(&met, words);
    let images = InputImages { pixels: from, channels: ins, batch: shape.batch };
    let packed = images.pack(x);
    let taps = shape.kernel_height * shape.kernel_width;
    let pass = TaskInputs {
        isa,
        weight: weight.as_slice(),
        block: ROWS * taps * words,
        packed: packed.as_slice(),
        step: from * words * LANES,
        words,
        outs,
        to,
        sums: &sums,
        bias,
    };
    let blocks = shape.batch.div_ceil(LANES);
    // Blocks of images that make a tile, as equal as can be.
    let together = blocks.div_ceil(blocks.div_ceil(VECTORS));
    let (groups, parts) = (blocks.div_ceil(together), outs.div_ceil(TASK));
    let finite = AtomicBool::new(true);
    let data = try_uninit_vec(shape.batch * outs * to, |out: &mut [MaybeUninit<O>]| {
        let out = OutputImages { at: out.as_mut_ptr().cast::<O>(), len: out.len() };
        parallel::for_each(groups * parts, |task| {
            let first = task / parts * together * LANES;
            let images = first..shape.batch.min(first + together * LANES);
            let rows = task % parts * TASK..outs.min((task % parts + 1) * TASK);
            if !pass.run(images, rows, &out) {
                finite.store(false, Ordering::Relaxed);
            }
        });
        finite.load(Ordering::Relaxed)
    });
    let dims = if order == Order::Forward { shape.out_dims() } else { shape.input_dims() };
    Ok(data.map(|data| tensor(data, &dims)))
}

/// Result pixels that one tile computes: they use the same taps, and read pixels at one constant distance.
#[derive(Debug)]
struct Alike {
    pixels: Vec<usize>,
    /// Words from what one pixel reads to what the next one does.
    apart: usize,
    /// Where the segments of the first one's sum start: in the weights of a block of rows, and in images.
    left: Vec<usize>,
    right: Vec<usize>,
}

/// Groups all result pixels into [`Alike`]s. `met` has, for each, its (tap, pixel read) pairs.
fn alike(met: &[Vec<(usize, usize)>], words: usize) -> Vec<Alike> {
    let mut classes = BTreeMap::<Vec<usize>, Vec<usize>>::new();
    for (pixel, met) in met.iter().enumerate() {
        let taps = met.iter().map(|&(tap, _)| tap).collect();
        classes.entry(taps).or_default().push(pixel);
    }
    // The distance between what two pixels read; `None` if it is negative or differs between taps.
    let further = |from: usize, to: usize| {
        let mut steps = met[from].iter().zip(&met[to]).map(|(from, to)| to.1.checked_sub(from.1));
        let first = steps.next().unwrap_or(Some(0))?;
        steps.all(|step| step == Some(first)).then_some(first)
    };
    let mut all = Vec::new();
    for (taps, mut pixels) in classes.iter().map(|(taps, pixels)| (taps, pixels.as_slice())) {
        while let [first, rest @ ..] = pixels {
            let step = rest.first().and_then(|next| further(*first, *next));
            let steps = pixels.windows(2).take(VECTORS - 1);
            let more = steps.take_while(|two| step.is_some() && further(two[0], two[1]) == step);
            let (own, after) = pixels.split_at(1 + more.count());
            pixels = after;
            all.push(Alike {
                pixels: own.to_vec(),
                apart: step.unwrap_or(0) * words * LANES,
                left: taps.iter().map(|tap| tap * words * ROWS).collect(),
                right: met[*first].iter().map(|&(_, read)| read * words * LANES).collect(),
            });
        }
    }
    all
}

/// Images that are read.
struct InputImages {
    pixels: usize,
    channels: usize,
    batch: usize,
}

impl InputImages {
    /// `(image / 16, pixel, channel / 2, image % 16)`, words of two channels.
    fn pack(&self, x: &[bf16]) -> KeptWords {
        let &Self { pixels, channels, batch } = self;
        assert!(x.len() >= batch * channels * pixels, "every image is there");
        let (words, blocks) = (channels.div_ceil(2), batch.div_ceil(LANES));
        let mut packed = KeptWords::new(blocks * pixels * words * LANES);
        let places = &mut packed.as_mut_slice()[..blocks * pixels * words * LANES];
        let places = OutputImages { at: places.as_mut_ptr(), len: places.len() };
        let parts = words.div_ceil(PACKED);
        parallel::for_each(blocks * parts, |task| {
            let (block, first) = (task / parts, task % parts * PACKED);
            let (image, places) = (block * LANES, places.from(block * pixels * words * LANES));
            with_bf16_vectors!(V => {
                for word in first..words.min(first + PACKED) {
                    let rows = RowPairs {
                        at: x.as_ptr().wrapping_add((image * channels + 2 * word) * pixels),
                        step: channels * pixels,
                        count: (batch - image).min(LANES),
                        partner: (2 * word + 1 < channels).then_some(pixels),
                        pixels,
                    };
                    let to = places.at.wrapping_add(word * LANES);
                    // SAFETY: the features. The rows lie in `x`, whose length was asserted; the vectors of this word
                    // and block lie in `places`, and no other task has them.
                    unsafe { rows.spread::<V>(to, words * LANES) };
                }
            });
        });
        packed
    }
}

/// What all tasks of a pass read.
struct TaskInputs<'a> {
    isa: InstructionSet,
    /// Blocks of rows, each `block` words: `(tap, channel / 2, row)`.
    weight: &'a [u32],
    block: usize,
    /// Blocks of images, each `step` words: see [`InputImages::pack`].
    packed: &'a [u32],
    step: usize,
    /// Words of a tap.
    words: usize,
    outs: usize,
    /// Pixels that are written.
    to: usize,
    sums: &'a [Alike],
    bias: Option<&'a [f32]>,
}

impl TaskInputs<'_> {
    /// Writes some channels of some images, the first of which is the first of a block; or returns false, where a weight
    /// is not finite.
    fn run<O: Rounded>(
        &self,
        images: Range<usize>,
        channels: Range<usize>,
        out: &OutputImages<O>,
    ) -> bool {
        let blocks = images.len().div_ceil(LANES);
        let packed = &self.packed[images.start / LANES * self.step..];
        let size = ROWS * self.to * LANES;
        with_words([blocks * size], |[sums]| {
            for row in channels.clone().step_by(ROWS) {
                let weight = &self.weight[row / ROWS * self.block..][..self.block];
                if !are_finite(weight) {
                    return false;
                }
                let rows = (channels.end - row).min(ROWS);
                for alike in self.sums {
                    // Vectors of a tile are pixels, or the blocks of one.
                    let one = alike.pixels.len() == 1;
                    for block in 0..if one { 1 } else { blocks } {
                        let gemm = PackedGemm {
                            left: weight,
                            left_block: self.block,
                            left_row: 1,
                            left_step: ROWS,
                            left_starts: &alike.left,
                            right: &packed[block * self.step..],
                            right_block: if one { self.step } else { alike.apart },
                            right_step: LANES,
                            right_starts: &alike.right,
                            rows,
                            columns: if one { blocks } else { alike.pixels.len() } * LANES,
                            depth: self.words,
                            terms: 1,
                            row_panels: false,
                        };
                        gemm.multiply(self.isa, |tile| {
                            for (row, line) in tile.sums.iter().enumerate().take(tile.rows) {
                                let vectors = line.as_chunks::<LANES>().0.iter();
                                let vectors = vectors.take(tile.columns / LANES).enumerate();
                                for (vector, lanes) in vectors {
                                    let (block, pixel) =
                                        if one { (vector, 0) } else { (block, vector) };
                                    let pixel = row * self.to + alike.pixels[pixel];
                                    let places = &mut sums[block * size + pixel * LANES..][..LANES];
                                    for (place, sum) in places.iter_mut().zip(lanes) {
                                        *place = sum.to_bits();
                                    }
                                }
                            }
                        });
                    }
                }
                for (block, sums) in sums.chunks_exact(size).enumerate() {
                    let first = images.start + block * LANES;
                    let count = (images.end - first).min(LANES);
                    // SAFETY: the features, and this task alone has these channels of these images.
                    with_ftz_vectors!(V => unsafe {
                        self.store::<O, V>(sums, row..row + rows, first, count, out);
                    });
                }
            }
            true
        })
    }

    /// Rounds sums `(row, pixel, lane)`, plus the bias of each row, to images from `first` on.
    ///
    /// # Safety
    /// Within `with_ftz_vectors!`; nobody else reads or writes these channels of these images.
    #[inline(always)]
    unsafe fn store<O: Rounded, V: Vector>(
        &self,
        sums: &[u32],
        rows: Range<usize>,
        first: usize,
        count: usize,
        out: &OutputImages<O>,
    ) {
        let (len, image) = (rows.len() * self.to, self.outs * self.to);
        let start = rows.start * self.to;
        assert!(count <= LANES && len * LANES <= sums.len() && rows.end <= self.outs);
        assert!((first + count) * image <= out.len);
        for at in (0..len).step_by(LANES) {
            let places = (len - at).min(LANES);
            // SAFETY: the features. So many vectors lie in `sums`, and places from there on in every image, as asserted.
            unsafe {
                let mut vectors = [V::zero(); LANES];
                for (i, vector) in vectors.iter_mut().enumerate().take(places) {
                    *vector = V::load(sums.as_ptr().add((at + i) * LANES).cast());
                    if let Some(bias) = self.bias {
                        let bias = bias[rows.start + (at + i) / self.to];
                        *vector = vector.add(V::splat(bias));
                    }
                }
                let vectors = V::transpose(vectors);
                for (lane, vector) in vectors.into_iter().enumerate().take(count) {
                    let to = out.at.wrapping_add((first + lane) * image + start + at);
                    O::store_ftz(to, first_lanes(places), vector);
                }
            }
        }
    }
}

/// Whether no BF16 of these words is infinite or NaN.
fn are_finite(words: &[u32]) -> bool {
    let mut finite = true;
    vectorise(
        #[inline(always)]
        || {
            let number =
                |word: u32| (word & 0x7f80 != 0x7f80) & (word & 0x7f80_0000 != 0x7f80_0000);
            finite = words.iter().fold(true, |all, &word| all & number(word));
        },
    );
    finite
}
