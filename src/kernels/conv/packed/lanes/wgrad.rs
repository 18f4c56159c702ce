//! wgrad of small images: for each tap one product, `grad (channels × pixels) × x (pixels × channels)`.
//!
//! The sum of a tap is over the (input, output) pixel pairs it connects, and for each over pairs of images, which are
//! the words. Padding adds no terms. Pairs that are neighbours in both images are one segment of the sum, see [`runs`].
//!
//! Both operands are packed alike, once for all tasks: `(channel / 16, pixel, image / 2, channel % 16)`. Images are
//! packed in groups, so that the blocks which a tile reads stay in a second-level cache while it goes through all taps.
//!
//! A task has some output channels, all taps and all images. So no sums are added across threads, and they stay in a
//! cache until they are written as weights. With few output channels there would be too few tasks, see [`suits`].

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{Result, Tensor};
use half::bf16;

use super::images::{LANES, ROWS, RowPairs, is_small};
use crate::kernels::conv::packed::kernels::write_kernels;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::{Elements, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::vectorise;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cpu::vector::with_bf16_vectors;
use crate::kernels::gemm::micro::{
    InstructionSet, KeptWords, PackedGemm, as_f32_mut, equal_parts, with_words,
};

/// Output channels of a task.
const OUTS: usize = 64;
/// Tasks, at least: images are not cut, so that there are no more.
const TASKS: usize = 4;
/// Pixels of a channel in all images of a group, whose blocks stay in a second-level cache of 1 MiB.
const NEAR: usize = 2048;

/// Whether this module computes such a gradient.
pub(in super::super::super) fn suits(shape: &Shape, isa: InstructionSet) -> bool {
    is_small(shape, isa) && shape.c_out >= TASKS * OUTS
}

/// See [`super::super::wgrad`]; `None` where a sum is not finite, as padding may have met an infinity. Also where a
/// pixel of `grad` meets padding alone, as no sum would show its infinity.
pub(in super::super::super) fn wgrad(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let taps = shape.kernel_height * shape.kernel_width;
    let [from, to] = [shape.height * shape.width, shape.pixels()];
    let (mut pairs, mut met) = (vec![Vec::new(); taps], vec![false; to]);
    shape.meetings(|tap, input, output| {
        pairs[tap].push((input, output));
        met[output] = true;
    });
    if met.contains(&false) {
        return Ok(None);
    }
    let runs: Vec<_> = pairs.iter().map(|pairs| runs(pairs)).collect();
    let images = (NEAR / from.max(to)).clamp(2, shape.batch.max(2));
    let group = images.next_multiple_of(2);
    let _held = hold([x, grad]);
    let (x, grad): (&[bf16], &[bf16]) = (&Elements::of(x)?, &Elements::of(grad)?);
    let layout = |pixels, channels| OperandLayout { pixels, channels, group, batch: shape.batch };
    let (left, right) = (layout(to, shape.c_out), layout(from, shape.c_in));
    let (grad, x) = (left.pack(grad), right.pack(x));
    let tasks = Tasks { isa, left, right, grad: grad.as_slice(), x: x.as_slice(), runs: &runs };
    let count = shape.c_out * shape.taps();
    let weights = try_uninit_vec(count, |weights: &mut [MaybeUninit<f32>]| {
        let finite = AtomicBool::new(true);
        parallel::for_each_chunk(weights, OUTS * shape.taps(), |task, weights| {
            if !tasks.run(task * OUTS, weights) {
                finite.store(false, Ordering::Relaxed);
            }
        });
        finite.into_inner()
    });
    Ok(weights.map(|weights| tensor(weights, &shape.weight_dims())))
}

/// Pairs of pixels, input and output, as runs of neighbours on both sides, all of one length: where they start, and that.
fn runs(pairs: &[(usize, usize)]) -> (Vec<(usize, usize)>, usize) {
    let follows = |at: usize| pairs[at] == (pairs[at - 1].0 + 1, pairs[at - 1].1 + 1);
    let starts: Vec<_> = (0..pairs.len()).filter(|&at| at == 0 || !follows(at)).collect();
    let ends = starts.iter().skip(1).copied().chain([pairs.len()]);
    let len = starts.iter().zip(ends).map(|(start, end)| end - start).reduce(greatest_divisor);
    let len = len.unwrap_or(1);
    (pairs.iter().copied().step_by(len).collect(), len)
}

fn greatest_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}

/// How the images of one operand of the products are packed, in groups of `group`.
#[derive(Clone, Copy)]
struct OperandLayout {
    pixels: usize,
    channels: usize,
    group: usize,
    batch: usize,
}

impl OperandLayout {
    /// Words of a pixel, in all groups but perhaps the last.
    fn words(&self) -> usize {
        self.group / 2
    }

    /// Words of a block of channels.
    fn block(&self) -> usize {
        self.pixels * self.words() * LANES
    }

    fn blocks(&self) -> usize {
        self.channels.div_ceil(LANES)
    }

    /// Images of each group.
    fn groups(self) -> impl Iterator<Item = usize> {
        (0..self.batch).step_by(self.group).map(move |first| self.group.min(self.batch - first))
    }

    /// `(group, channel / 16, pixel, image / 2, channel % 16)`, words of two images.
    fn pack(&self, images: &[bf16]) -> KeptWords {
        let &Self { pixels, channels, group, batch } = self;
        assert!(images.len() >= batch * channels * pixels, "every image is there");
        let (blocks, block) = (self.blocks(), self.block());
        let len = batch.div_ceil(group) * blocks * block;
        let mut packed = KeptWords::new(len);
        parallel::for_each_chunk(&mut packed.as_mut_slice()[..len], block, |task, places| {
            let (first, channel) = (task / blocks * group, task % blocks * LANES);
            let count = group.min(batch - first);
            let words = count.div_ceil(2);
            assert!(pixels * words * LANES <= places.len());
            with_bf16_vectors!(V => {
                for word in 0..words {
                    let image = first + 2 * word;
                    let rows = RowPairs {
                        at: images.as_ptr().wrapping_add((image * channels + channel) * pixels),
                        step: pixels,
                        count: (channels - channel).min(LANES),
                        partner: (2 * word + 1 < count).then_some(channels * pixels),
                        pixels,
                    };
                    let to = places.as_mut_ptr().wrapping_add(word * LANES);
                    // SAFETY: the features. The rows lie in `images`, whose length was asserted; a vector for each pixel
                    // and word lies in `places`.
                    unsafe { rows.spread::<V>(to, words * LANES) };
                }
            });
        });
        packed
    }
}

/// What all tasks read.
struct Tasks<'a> {
    isa: InstructionSet,
    left: OperandLayout,
    right: OperandLayout,
    grad: &'a [u32],
    x: &'a [u32],
    /// Of each tap.
    runs: &'a [(Vec<(usize, usize)>, usize)],
}

impl Tasks<'_> {
    /// Writes the weights of output channels from `first` on; or returns false, where a sum is not finite.
    fn run(&self, first: usize, weights: &mut [MaybeUninit<f32>]) -> bool {
        let (ins, taps) = (self.right.channels, self.runs.len());
        let outs = weights.len() / (ins * taps);
        with_words([taps * outs * ins], |[sums]| {
            let sums = &mut as_f32_mut(sums)[..taps * outs * ins];
            for (group, images) in self.left.groups().enumerate() {
                // The vectors of a tile meet all taps while they are near.
                for vectors in equal_parts(self.right.blocks(), 3) {
                    for tap in 0..taps {
                        let sums = &mut sums[tap * outs * ins..][..outs * ins];
                        self.tap((group, images), (first, outs), vectors.clone(), tap, sums);
                    }
                }
            }
            let mut finite = true;
            vectorise(
                #[inline(always)]
                || finite = sums.iter().fold(true, |all, sum| all & sum.is_finite()),
            );
            if finite {
                let offsets: Vec<_> = (0..taps).map(|tap| tap * outs * ins).collect();
                with_bf16_vectors!(V => {
                    for (at, kernels) in (0..outs * ins).step_by(ins).zip(weights.chunks_mut(ins * taps)) {
                        for (block, kernels) in kernels.chunks_mut(LANES * taps).enumerate() {
                            let (base, count) = (at + block * LANES, kernels.len() / taps);
                            // SAFETY: the features of the vectors.
                            unsafe {
                                write_kernels::<V>(&[&*sums], &offsets, base, count, kernels, taps);
                            }
                        }
                    }
                });
            }
            finite
        })
    }

    /// The sums of a tap over a group of images, `(output channel, channel)`, of some vectors of channels: written for the
    /// first group, added for others.
    fn tap(
        &self,
        (group, images): (usize, usize),
        (first, outs): (usize, usize),
        vectors: Range<usize>,
        tap: usize,
        sums: &mut [f32],
    ) {
        let Self { left, right, .. } = self;
        let ins = right.channels;
        let words = images.div_ceil(2);
        let (starts, len) = &self.runs[tap];
        let at = |pixel: usize| pixel * words * LANES;
        let left_starts: Vec<_> = starts.iter().map(|&(_, output)| at(output)).collect();
        let right_starts: Vec<_> = starts.iter().map(|&(input, _)| at(input)).collect();
        let grad = &self.grad[(group * left.blocks() + first / LANES) * left.block()..];
        let x = &self.x[(group * right.blocks() + vectors.start) * right.block()..];
        let column = vectors.start * LANES;
        // A tile has half of a block's channels.
        for half in [0, ROWS] {
            let whole = outs / LANES * ROWS;
            let rows = whole + (outs % LANES).saturating_sub(half).min(ROWS);
            let gemm = PackedGemm {
                left: &grad[half..],
                left_block: left.block(),
                left_row: 1,
                left_step: LANES,
                left_starts: &left_starts,
                right: x,
                right_block: right.block(),
                right_step: LANES,
                right_starts: &right_starts,
                rows,
                columns: (vectors.len() * LANES).min(ins - column),
                depth: len * words,
                terms: 1,
                row_panels: false,
            };
            gemm.multiply(self.isa, |tile| {
                for (row, line) in tile.sums.iter().enumerate().take(tile.rows) {
                    let out = tile.row / ROWS * LANES + half + row;
                    let places = &mut sums[out * ins + column + tile.column..][..tile.columns];
                    if group == 0 {
                        places.copy_from_slice(&line[..tile.columns]);
                    } else {
                        places.iter_mut().zip(line).for_each(|(place, sum)| *place += sum);
                    }
                }
            });
        }
    }
}
