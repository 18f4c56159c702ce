//! wgrad, the gradient with respect to the weight, of NCHW images:
//! `x (taps × positions) × gradᵀ (positions × channels)`.
//!
//! The depth of this product is the positions of all images: long, where the result is small. So threads take runs
//! of images, each with sums of its own, and the sums are added in a fixed order. The number of runs depends on
//! shapes alone, so the result does not depend on the number of threads.
//!
//! A run goes block by block. `x` is packed with neighbouring pixels in a word, and the gradient is transposed, straight
//! from the tensor if its elements are words already. A pointwise convolution reads `x` in place too, as one row an image.
//! As in the forward pass, a kernel row reads the row panels of `x` from another input row on.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use super::kernels::{runs, write_kernels};
use super::layout::{Cut, Part, RowPanels, Taps};
use super::rows::{Stored, with_stored};
use super::source::{NchwImages, as_bf16, as_f32_words};
use super::{few_channels, winograd};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::{Elements, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::{as_uninit, uninit_vec};
use crate::kernels::cpu::vector::{Vectors, with_vectors};
use crate::kernels::gemm::micro::{
    InstructionSet, KeptWords, PackedGemm, as_f32_mut, transpose, with_words,
};

/// Output channels of a task: a multiple of the columns of all tiles. Each task packs the image, so that there are more
/// where tasks are enough.
fn block(outs: usize) -> usize {
    if outs >= 512 { 128 } else { 64 }
}

/// See [`super::super::wgrad`]; contiguous operands of one dtype, no F64; in F32. `None` where tiles or strips make a sum
/// that is not finite.
pub(in crate::kernels::conv) fn wgrad(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    sums: RunSums,
) -> Result<Option<Tensor>> {
    let total = total(x, grad, shape, sums)?;
    let exact = matches!(sums, RunSums::RowPanels(_));
    let done = exact || total.iter().all(|sum| sum.is_finite());
    Ok(done.then(|| tensor(total, &shape.weight_dims())))
}

/// Whether a pointwise convolution's operands are read in place, and its images have enough pixels to be segments of the sum.
pub(in crate::kernels::conv) fn reads_in_place(operands: [&Tensor; 2], shape: &Shape) -> bool {
    const FEWEST_PIXELS: usize = 17;
    let reads = |isa: InstructionSet| {
        let dtype = if isa.is_f32() { DType::F32 } else { DType::BF16 };
        // Where BF16 of three terms multiplies F32, a product is faster.
        let by_terms = isa.is_f32() && InstructionSet::AmxBf16x3.is_available();
        !isa.is_amx()
            && !by_terms
            && operands.iter().all(|x| x.dtype() == dtype)
            && shape.pixels().is_multiple_of(isa.per_word())
            && is_whole(shape, isa)
    };
    shape.pixels() >= FEWEST_PIXELS
        && shape.c_in.min(shape.c_out) > 1
        && InstructionSet::of(operands).is_some_and(reads)
}

/// Whether packed GEMM can take the input channels of a pointwise convolution for the rows of its left matrix.
fn is_whole(shape: &Shape, isa: InstructionSet) -> bool {
    shape.pointwise() && shape.group_in().is_multiple_of(isa.rows())
}

/// How the sums of a run are made.
#[derive(Clone, Copy)]
pub(in crate::kernels::conv) enum RunSums {
    RowPanels(InstructionSet),
    /// Winograd's, of either format.
    Tiles(Vectors),
    /// The same of 16-bit operands, by larger tiles.
    LargeTiles(Vectors),
    /// By strips of first layers.
    Strips(Vectors),
}

fn total(x: &Tensor, grad: &Tensor, shape: &Shape, sums: RunSums) -> Result<Vec<f32>> {
    let one_row = shape.in_one_row().filter(|_| matches!(sums, RunSums::RowPanels(_)));
    let shape = one_row.as_ref().unwrap_or(shape);
    let taps = Taps::forward(shape);
    let (ins, outs) = (shape.group_in(), shape.group_out());
    let run = match sums {
        RunSums::RowPanels(_) | RunSums::Strips(_) => {
            // Blocks of channels are tasks too: fewer runs are fewer sums to add up.
            let blocks = shape.geometry.groups * outs.div_ceil(block(outs));
            let runs = runs(shape.c_out * shape.taps()).min((16 / blocks).max(2));
            shape.batch.div_ceil(runs)
        }
        RunSums::Tiles(_) => winograd::Wgrad::run_images(shape, false),
        RunSums::LargeTiles(_) => winograd::Wgrad::run_images(shape, true),
    };
    let run = run.max(1);
    let runs = shape.batch.div_ceil(run);
    let blocks: Vec<_> = (0..shape.geometry.groups)
        .flat_map(|group| {
            let blocks = (0..outs).step_by(block(outs));
            blocks.map(move |first| (group, first..outs.min(first + block(outs))))
        })
        .collect();
    let _held = hold([x, grad]);
    // Memory that this thread keeps: that of threads that come and go would be fresh each time.
    let room = block(outs).min(outs) * shape.taps();
    let count = runs * blocks.len() * room;
    let mut words = KeptWords::new(count);
    let all = &mut as_f32_mut(words.as_mut_slice())[..count];
    with_stored!(x, x => {
        // Of one dtype.
        let [x, grad] = &[x, Elements::of(grad)?];
        let (x, grad): (&[_], &[_]) = (x, grad);
        parallel::for_each_chunk(all, room, |task, own| {
            let (group, channels) = blocks[task / runs].clone();
            let first = task % runs * run;
            let images = first..shape.batch.min(first + run);
            let own = &mut own[..channels.len() * shape.taps()];
            match sums {
                RunSums::RowPanels(isa) => {
                    Wgrad { shape, taps: &taps, isa, group, channels }.run(x, grad, images, own)
                }
                RunSums::Tiles(vectors) | RunSums::LargeTiles(vectors) => {
                    let large = matches!(sums, RunSums::LargeTiles(_));
                    winograd::Wgrad { shape, channels, vectors, large }.run(x, grad, images, own)
                }
                RunSums::Strips(vectors) => {
                    few_channels::Wgrad { shape, channels, vectors }.run(x, grad, images, own)
                }
            }
        });
    });
    let kernel = shape.kernel_height * shape.kernel_width;
    Ok(uninit_vec(shape.c_out * shape.taps(), |total: &mut [MaybeUninit<f32>]| {
        let mut places = Vec::with_capacity(blocks.len());
        let mut rest = total;
        for (_, channels) in &blocks {
            let (own, after) = rest.split_at_mut(channels.len() * shape.taps());
            places.push(own);
            rest = after;
        }
        let tasks = places.into_iter().zip(all.chunks(runs * room));
        parallel::for_each_item(tasks, |(places, sums)| {
            let sums: Vec<_> = sums.chunks(room).collect();
            regroup(&sums, [kernel, ins, places.len() / shape.taps()], places);
        });
    }))
}

/// Adds runs up, of `(tap, channel, output channel)`, so many each, into weights `(output channel, channel, tap)`.
fn regroup(runs: &[&[f32]], [taps, ins, outs]: [usize; 3], weights: &mut [MaybeUninit<f32>]) {
    assert!(weights.len() == taps * ins * outs);
    // Of one tap, the channels are what lies together.
    let [taps, ins] = if taps == 1 { [ins, 1] } else { [taps, ins] };
    let offsets: Vec<_> = (0..taps).map(|tap| tap * ins * outs).collect();
    let vectors = Vectors::known();
    with_vectors!(vectors, V => {
        for out in (0..outs).step_by(16) {
            for channel in 0..ins {
                let base = channel * outs + out;
                let kernels = &mut weights[(out * ins + channel) * taps..];
                let count = (outs - out).min(16);
                // SAFETY: the features of the vectors.
                unsafe { write_kernels::<V>(runs, &offsets, base, count, kernels, ins * taps) };
            }
        }
    });
}

/// A group's sums for some of its output channels.
struct Wgrad<'a> {
    shape: &'a Shape,
    taps: &'a Taps,
    isa: InstructionSet,
    group: usize,
    channels: Range<usize>,
}

impl Wgrad<'_> {
    /// The sum over some images, written.
    fn run<S: Stored + 'static, G: Stored + 'static>(
        &self,
        x: &[S],
        grad: &[G],
        images: Range<usize>,
        sums: &mut [f32],
    ) {
        let shape = self.shape;
        let words = (shape.group_in() * shape.kernel_width * shape.geometry.stride
            + self.channels.len())
        .div_ceil(self.isa.per_word());
        let cut = Cut::new(self.taps.grid, images.len(), words);
        let mut before = false;
        for first in images.clone().step_by(cut.images) {
            let count = cut.images.min(images.end - first);
            let x = &x[first * shape.image()..][..count * shape.image()];
            let grad = &grad[first * shape.out_image()..][..count * shape.out_image()];
            for part in cut.parts(self.taps.grid, count) {
                self.run_part(x, grad, &part, before, sums);
                before = true;
            }
        }
        assert!(before, "a run has images, and these have pixels");
    }

    /// Adds the sums of a part to those of parts before, if there are any.
    fn run_part<S: Stored + 'static, G: Stored + 'static>(
        &self,
        x: &[S],
        grad: &[G],
        part: &Part,
        before: bool,
        sums: &mut [f32],
    ) {
        if let Some((x, grad)) = self.in_place(x, grad, part) {
            return self.run_in_place(x, grad, part, before, sums);
        }
        let (shape, isa) = (self.shape, self.isa);
        let (ins, outs) = (shape.group_in(), self.channels.len());
        let per_word = isa.per_word();
        let words = self.gradient_in_place(grad, part);
        // A kernel row starts at a word, and for tile registers on a cache line if it can.
        let multiple = if isa == InstructionSet::AmxBf16 { 32 } else { per_word };
        let of_x = RowPanels::long(self.taps, part, multiple);
        let of_grad = RowPanels::long(&Taps::identity(self.taps.grid), part, multiple);
        let x = NchwImages {
            x,
            size: (shape.height, shape.width),
            channels: self.group * ins..(self.group + 1) * ins,
            image: shape.image(),
        };
        let first = self.group * shape.group_out() + self.channels.start;
        let grad = NchwImages {
            x: grad,
            size: (shape.out_height, shape.out_width),
            channels: first..first + outs,
            image: shape.out_image(),
        };
        let rows = shape.kernel_width * ins;
        let depth = (part.rows.len() * of_grad.line).div_ceil(per_word);
        let (x_step, grad_step) = (of_x.row_panel / per_word, of_grad.row_panel / per_word);
        let block = 16 * depth.next_multiple_of(16);
        let copied = if words.is_some() { 0 } else { outs * grad_step + 16 };
        let sizes = [rows.next_multiple_of(16) * x_step + 16, copied, self.transposed_words(block)];
        with_words(sizes, |[left, straight, right]| {
            x.copy(self.taps, part, &of_x, isa, left);
            match words {
                Some(words) => self.transpose_part(words, part, block, right),
                None => {
                    grad.copy(&Taps::identity(self.taps.grid), part, &of_grad, isa, straight);
                    for (first, right) in (0..outs).step_by(16).zip(right.chunks_mut(block)) {
                        let from = &straight[first * grad_step..];
                        let rows = (outs - first).min(16);
                        transpose(from, rows, grad_step, depth, right, isa.vectors());
                    }
                }
            }
            for (row, start) in of_x.starts.iter().enumerate() {
                let sums = &mut sums[row * rows * outs..][..rows * outs];
                let gemm = PackedGemm {
                    left: &left[start / per_word..],
                    left_block: isa.rows() * x_step,
                    left_row: x_step,
                    left_step: 1,
                    left_starts: &[0],
                    right,
                    right_block: block,
                    right_step: 16,
                    right_starts: &[0],
                    rows,
                    columns: outs,
                    depth,
                    terms: 1,
                    row_panels: false,
                };
                self.put(gemm, before, sums);
            }
        });
    }

    /// The words of both operands, where they can be read in place.
    fn in_place<'d, S: 'static, G: 'static>(
        &self,
        x: &'d [S],
        grad: &'d [G],
        part: &Part,
    ) -> Option<(&'d [u32], &'d [u32])> {
        let whole = is_whole(self.shape, self.isa);
        let grad = self.gradient_in_place(grad, part).filter(|_| whole)?;
        Some((as_words(x, self.isa.per_word())?, grad))
    }

    /// The gradient as words, if it has their type and no word spans two rows of the part.
    fn gradient_in_place<'d, G: 'static>(&self, grad: &'d [G], part: &Part) -> Option<&'d [u32]> {
        let (width, per_word) = (self.shape.out_width, self.isa.per_word());
        let sizes = [width, part.columns.start, part.columns.len()];
        let whole = !self.isa.is_amx() && sizes.iter().all(|size| size.is_multiple_of(per_word));
        if whole { as_words(grad, per_word) } else { None }
    }

    /// Words of a part's gradient, transposed: blocks of 16 channels of `block` words, and a tile more, as the last tile
    /// writes zeros beyond its run.
    fn transposed_words(&self, block: usize) -> usize {
        self.channels.len().div_ceil(16) * block + 256
    }

    /// Transposes the gradient from where it lies: `(channel / 16, row, image, column, channel % 16)`.
    fn transpose_part(&self, grad: &[u32], part: &Part, block: usize, right: &mut [u32]) {
        let (shape, per_word) = (self.shape, self.isa.per_word());
        let columns = part.columns.len();
        // Whole rows of one image are one run.
        let whole = part.images == 1 && columns == shape.out_width;
        let together = if whole { part.rows.len() } else { 1 };
        let run = together * columns / per_word;
        for (number, channel) in self.channels.clone().step_by(16).enumerate() {
            let (rows, mut to) = ((self.channels.end - channel).min(16), number * block);
            let channel = (self.group * shape.group_out() + channel) * shape.pixels();
            for row in part.rows.clone().step_by(together) {
                for image in 0..part.images {
                    let pixel = row * shape.out_width + part.columns.start;
                    let from = (image * shape.out_image() + channel + pixel) / per_word;
                    let step = shape.pixels() / per_word;
                    // The zeros of a tile, beyond the run, are overwritten by the next.
                    transpose(&grad[from..], rows, step, run, &mut right[to..], self.isa.vectors());
                    to += 16 * run;
                }
            }
        }
    }

    /// [`Self::run_part`] of operands [in place](Self::in_place), whose images [`total`] has made one row: only the gradient is
    /// copied, as it is transposed. A sum has a segment for each image.
    fn run_in_place(&self, x: &[u32], grad: &[u32], part: &Part, before: bool, sums: &mut [f32]) {
        let (shape, isa) = (self.shape, self.isa);
        let per_word = isa.per_word();
        let (ins, row) = (shape.group_in(), shape.pixels() / per_word);
        debug_assert!(part.rows == (0..1));
        let (start, depth) = (part.columns.start / per_word, part.columns.len() / per_word);
        let block = 16 * part.images * depth;
        with_words([self.transposed_words(block)], |[right]| {
            self.transpose_part(grad, part, block, right);
            let channel = self.group * ins * row + start;
            let left_starts: Vec<_> =
                (0..part.images).map(|image| image * shape.image() / per_word + channel).collect();
            let right_starts: Vec<_> = (0..part.images).map(|image| image * depth * 16).collect();
            let gemm = PackedGemm {
                left: x,
                left_block: isa.rows() * row,
                left_row: row,
                left_step: 1,
                left_starts: &left_starts,
                right,
                right_block: block,
                right_step: 16,
                right_starts: &right_starts,
                rows: ins,
                columns: self.channels.len(),
                depth,
                terms: 1,
                row_panels: false,
            };
            self.put(gemm, before, sums);
        });
    }

    /// Adds a product to sums, or writes it.
    fn put(&self, gemm: PackedGemm<'_>, before: bool, sums: &mut [f32]) {
        match before {
            true => gemm.add_to(self.isa, sums, gemm.columns),
            // SAFETY: sums are what it writes.
            false => gemm.write_to(self.isa, unsafe { as_uninit(sums) }, gemm.columns),
        }
    }
}

/// Elements as words: F32, or BF16, two a word. `None` for other types, and for pairs that are not aligned.
fn as_words<T: 'static>(data: &[T], per_word: usize) -> Option<&[u32]> {
    match per_word {
        // SAFETY: two BF16 are a word of their bits, the lower one first.
        2 => match unsafe { as_bf16(data)?.align_to::<u32>() } {
            ([], words, []) => Some(words),
            _ => None,
        },
        _ => as_f32_words(data),
    }
}
