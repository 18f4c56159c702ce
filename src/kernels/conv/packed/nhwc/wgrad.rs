//! wgrad, the gradient with respect to the weight, of NHWC images.
//!
//! For each row of the kernel it is one product: `gradᵀ (outs × positions) × x (positions × kw · channels)`. As for
//! NCHW, threads take runs of images with sums of their own, which are then added in a fixed order.
//!
//! The depth is the positions, but in NHWC neighbours in memory are channels. So both operands are transposed while
//! they are packed. Three versions differ in how:
//!
//! | version | operands |
//! |---|---|
//! | `of_bf16` | BF16. Each image is a segment of one sum. Rows without a gap are packed straight from the tensors. |
//! | `of_bf16x3` | F32 and F16 as BF16x3. A line joins rows of several small images, so that registers are full. |
//! | `of_f32` | F32 with AVX-512, whose kernel reads any stride: nothing is transposed. |
//!
//! A row of the kernel reads the same packed `x`, starting at another input row. If a BF16x3 sum is not finite,
//! everything is computed again in F32.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{Result, Tensor};
use half::bf16;

use super::lines::Lines;
use super::rows::{NhwcImage, copy};
use crate::kernels::conv::packed::kernels::runs;
use crate::kernels::conv::packed::kernels::write_kernels;
use crate::kernels::conv::packed::layout::{Cut, Part, RowPanels, Taps};
use crate::kernels::conv::packed::rows::{Stored, widen, with_stored};
use crate::kernels::conv::packed::source::{as_bf16, as_bf16_mut};
use crate::kernels::conv::packed::weights;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::{Elements, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::cpu::vector::{Vectors, with_vectors};
use crate::kernels::gemm::micro::{
    Bf16Terms, InstructionSet, KeptWords, MatrixView, PackedGemm, Tile, as_f32_mut, with_words,
};

/// See [`super::super::wgrad`]; `None` where a sum of BF16x3 is not finite.
pub(in crate::kernels::conv) fn wgrad(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let run = shape.batch.div_ceil(runs(shape.c_out * shape.taps())).max(1);
    let runs = shape.batch.div_ceil(run);
    let groups = shape.geometry.groups;
    let (taps, wide) = (Taps::forward(shape), shape.group_in().next_multiple_of(16));
    let _held = hold([x, grad]);
    // Memory that this thread keeps: that of threads that come and go would be fresh each time.
    let room = shape.kernel_height * shape.group_out() * shape.kernel_width * wide;
    let count = runs * groups * room;
    let mut words = KeptWords::new(count);
    let sums = &mut as_f32_mut(words.as_mut_slice())[..count];
    with_stored!(x, x => {
        // Of one dtype.
        let [x, grad] = &[x, Elements::of(grad)?];
        let (x, grad): (&[_], &[_]) = (x, grad);
        parallel::for_each_chunk(sums, room, |task, sums| {
            let first = task % runs * run;
            let wgrad = Wgrad { shape, taps: &taps, isa, wide, group: task / runs };
            wgrad.run(x, grad, first..shape.batch.min(first + run), sums);
        });
    });
    let sums: Vec<_> = sums.chunks(room).collect();
    let (outs, width) = (shape.group_out(), shape.kernel_width * wide);
    let tap = |row: usize| (0..shape.kernel_width).map(move |tap| row * outs * width + tap * wide);
    let offsets: Vec<_> = (0..shape.kernel_height).flat_map(tap).collect();
    let gather = |out: usize, places: &mut [MaybeUninit<f32>]| {
        let (group, out) = (out / outs, out % outs);
        let sums = &sums[group * runs..][..runs];
        let vectors = Vectors::known();
        with_vectors!(vectors, V => {
            let kernels = places.chunks_mut(16 * offsets.len()).enumerate();
            for (block, kernels) in kernels {
                let (base, count) = (out * width + block * 16, kernels.len() / offsets.len());
                // SAFETY: the features of the vectors.
                unsafe {
                    write_kernels::<V>(sums, &offsets, base, count, kernels, offsets.len());
                }
            }
        });
    };
    let count = shape.c_out * shape.taps();
    let total: Vec<f32> = uninit_vec(count, |total| match count * runs > weights::SHORT {
        true => parallel::for_each_chunk(total, shape.taps(), gather),
        false => {
            let outs = total.chunks_mut(shape.taps()).enumerate();
            outs.for_each(|(out, places)| gather(out, places));
        }
    });
    let exact = isa != InstructionSet::AmxBf16x3 || total.iter().all(|sum| sum.is_finite());
    Ok(exact.then(|| tensor(total, &shape.weight_dims())))
}

/// The gradient of one group.
struct Wgrad<'a> {
    shape: &'a Shape,
    taps: &'a Taps,
    isa: InstructionSet,
    /// Input channels of a group, in whole vectors.
    wide: usize,
    group: usize,
}

impl Wgrad<'_> {
    /// The sums over some images, written: `(kernel row, out, kernel column, channel)`.
    fn run<S: Stored + 'static, G: Stored + 'static>(
        &self,
        x: &[S],
        grad: &[G],
        images: Range<usize>,
        sums: &mut [f32],
    ) {
        let shape = self.shape;
        let columns = shape.kernel_width * self.wide;
        sums.fill(0.0);
        let words =
            (columns * shape.geometry.stride + shape.group_out()).div_ceil(self.isa.per_word());
        let cut = Cut::new(self.taps.grid, images.len(), words * self.isa.terms());
        let count = cut.images.max(self.together(images.len()));
        for first in images.clone().step_by(count) {
            let end = images.end.min(first + count);
            let x = &x[first * shape.image()..end * shape.image()];
            let grad = &grad[first * shape.out_image()..end * shape.out_image()];
            for part in cut.parts(self.taps.grid, 1) {
                self.run_part(x, grad, &part, sums);
            }
        }
    }

    fn run_part<S: Stored + 'static, G: Stored + 'static>(
        &self,
        x: &[S],
        grad: &[G],
        part: &Part,
        sums: &mut [f32],
    ) {
        match (self.isa, as_bf16(x), as_bf16(grad)) {
            (InstructionSet::AmxBf16x3, ..) => self.of_bf16x3(x, grad, part, sums),
            (InstructionSet::Avx512Bf16 | InstructionSet::AmxBf16, Some(x), Some(grad)) => {
                self.of_bf16(x, grad, part, sums);
            }
            _ => {
                let images = x.chunks_exact(self.shape.image().max(1));
                let grads = grad.chunks_exact(self.shape.out_image().max(1));
                images.zip(grads).for_each(|(x, grad)| self.of_f32(x, grad, part, sums));
            }
        }
    }

    /// The layout of lines that join a row of each of `images` images.
    fn row_panels(&self, part: &Part, images: usize) -> RowPanels {
        let mut row_panels = RowPanels::new(self.taps, part, 1);
        // A line starts with a word, or with a register of each term.
        let whole = if self.isa == InstructionSet::AmxBf16x3 { 32 } else { self.isa.per_word() };
        row_panels.line = (images * part.columns.len()).next_multiple_of(whole);
        row_panels
    }

    /// How many images a line joins: the number that leaves the least of a register empty.
    fn together(&self, images: usize) -> usize {
        let width = self.shape.out_width;
        let nothing = |&images: &usize| {
            let line = (images * width).max(1);
            (1000 * line.next_multiple_of(32) / line, images)
        };
        let most = if self.isa == InstructionSet::AmxBf16x3 { images.clamp(1, 8) } else { 1 };
        (1..=most).min_by_key(nothing).unwrap_or(1)
    }

    /// BF16. All images are segments of one sum: one small image has few terms, and the sums would be loaded and
    /// stored for each.
    fn of_bf16(&self, x: &[bf16], grad: &[bf16], part: &Part, sums: &mut [f32]) {
        let (shape, row_panels) = (self.shape, self.row_panels(part, 1));
        let (ins, outs) = (shape.group_in(), shape.group_out());
        let positions = part.rows.len() * row_panels.line;
        let met = row_panels.slots.len() * row_panels.line;
        let x_words = view::<bf16>(&[], ins, met).words();
        let lines = Lines::new(self.taps, part, ins.div_ceil(2));
        // Rows without a gap are packed straight from the tensor.
        let whole = part.columns.len() == shape.out_width && row_panels.line == shape.out_width;
        let pack = |i: usize, stride: usize, [straight, left, right]: [&mut [u32]; 3]| {
            let x = &x[i * shape.image()..][..shape.image()];
            let grad = &grad[i * shape.out_image()..][..shape.out_image()];
            if whole {
                let first = part.rows.start * shape.out_width * shape.c_out + self.group * outs;
                let of_grad = view(&grad[first..], outs, positions);
                MatrixView { depth_stride: shape.c_out, ..of_grad }.pack_lines(stride, left);
            } else {
                let places = &mut as_bf16_mut(straight)[..positions * outs];
                self.pack_grad(grad, part, &row_panels, copy, places);
                view(places, outs, positions).pack_lines(stride, left);
            }
            if whole && self.taps.step == 1 && shape.out_width >= 16 {
                let of_image = NhwcImage {
                    x,
                    size: (shape.height, shape.width),
                    channels: self.group * ins..(self.group + 1) * ins,
                    all: shape.c_in,
                };
                of_image.fill(&lines, self.isa, straight);
                self.pack_shifted(&lines, as_bf16_mut(straight), x_words, right);
            } else {
                for column in 0..shape.kernel_width {
                    let places = &mut as_bf16_mut(straight)[..met * ins];
                    self.pack_x(x, part, &row_panels, column, copy, places);
                    view(places, ins, met).pack_blocks(&mut right[column * self.wide * x_words..]);
                }
            }
        };
        let straight = (met * ins).max(positions * outs).div_ceil(2).max(lines.len());
        self.add::<bf16>(x.len() / shape.image().max(1), part, &row_panels, straight, pack, sums);
    }

    /// As [`Self::of_bf16`], as BF16x3. A line joins a row of several images.
    fn of_bf16x3<S: Stored + 'static, G: Stored + 'static>(
        &self,
        x: &[S],
        grad: &[G],
        part: &Part,
        sums: &mut [f32],
    ) {
        let shape = self.shape;
        let images = x.len() / shape.image().max(1);
        let together = self.together(images);
        let row_panels = self.row_panels(part, together);
        let (ins, outs) = (shape.group_in(), shape.group_out());
        let positions = part.rows.len() * row_panels.line;
        let met = row_panels.slots.len() * row_panels.line;
        let x_words = view::<f32>(&[], ins, met).words();
        let pack = |i: usize, stride: usize, [straight, left, right]: [&mut [u32]; 3]| {
            let (first, end) = (i * together, images.min((i + 1) * together));
            let x = &x[first * shape.image()..end * shape.image()];
            let grad = &grad[first * shape.out_image()..end * shape.out_image()];
            let places = &mut as_f32_mut(straight)[..positions * outs];
            self.pack_grad(grad, part, &row_panels, widen, places);
            view(places, outs, positions).pack_lines(stride, left);
            for column in 0..shape.kernel_width {
                let places = &mut as_f32_mut(straight)[..met * ins];
                self.pack_x(x, part, &row_panels, column, widen, places);
                view(places, ins, met).pack_blocks(&mut right[column * self.wide * x_words..]);
            }
        };
        let straight = (met * ins).max(positions * outs);
        self.add::<f32>(images.div_ceil(together), part, &row_panels, straight, pack, sums);
    }

    /// Adds the product over all segments to `sums`. `pack` packs one segment: into the left operand, with a stride,
    /// and into the right one. It may use `straight` as scratch.
    fn add<T: Bf16Terms>(
        &self,
        segments: usize,
        part: &Part,
        row_panels: &RowPanels,
        straight: usize,
        pack: impl Fn(usize, usize, [&mut [u32]; 3]),
        sums: &mut [f32],
    ) {
        let shape = self.shape;
        let (ins, outs) = (shape.group_in(), shape.group_out());
        let positions = part.rows.len() * row_panels.line;
        let met = row_panels.slots.len() * row_panels.line;
        let x_words = view::<T>(&[], ins, met).words();
        let words = view::<T>(&[], outs, positions).words();
        let stride = match segments * words {
            words if words.is_multiple_of(256) => words + 16,
            words => words,
        };
        let (block, depth) = (16 * x_words, positions.div_ceil(2) * T::COUNT);
        let each = shape.kernel_width * self.wide * x_words;
        let sizes = [
            straight,
            outs.next_multiple_of(16) * stride + segments * words,
            segments * each + block,
        ];
        with_words(sizes, |[straight, left, right]| {
            for i in 0..segments {
                // A segment's last tile may reach beyond its end; the next segment overwrites that.
                pack(i, stride, [&mut *straight, &mut left[i * words..], &mut right[i * each..]]);
            }
            let columns = shape.kernel_width * self.wide;
            let left_starts: Vec<_> = (0..segments).map(|i| i * words).collect();
            for (row, start) in row_panels.starts.iter().enumerate() {
                let sums = &mut sums[row * outs * columns..][..outs * columns];
                let start = start * row_panels.line / 2 * 16 * T::COUNT;
                let right_starts: Vec<_> = (0..segments).map(|i| i * each + start).collect();
                let gemm = PackedGemm {
                    left,
                    left_block: self.isa.rows() * stride,
                    left_row: stride,
                    left_step: 1,
                    left_starts: &left_starts,
                    right,
                    right_block: block,
                    right_step: 16,
                    right_starts: &right_starts,
                    rows: outs,
                    columns,
                    depth,
                    terms: T::COUNT,
                    row_panels: false,
                };
                gemm.add_to(self.isa, sums, columns);
            }
        });
    }

    /// Packs `x` for every kernel column from one padded copy, shifted. The last tile of a line may reach beyond it,
    /// into what is written next.
    fn pack_shifted(&self, lines: &Lines, x: &[bf16], words: usize, out: &mut [u32]) {
        let (ins, width) = (self.shape.group_in(), self.shape.out_width);
        let own = 2 * lines.words;
        for (column, &(offset, _)) in self.taps.columns.iter().enumerate() {
            let shift = (offset - lines.column) as usize;
            for first in (0..ins).step_by(16) {
                for slot in 0..lines.slots.len() {
                    let data = &x[(slot * lines.pixels + shift) * own..];
                    let all = MatrixView { depth_stride: own, ..view(data, ins, width) };
                    let block = (column * self.wide + first) * words + slot * width / 2 * 16;
                    all.submatrix(first, (ins - first).min(16), 0, width)
                        .pack_blocks(&mut out[block..]);
                }
            }
        }
    }

    fn of_f32<S: Stored + 'static, G: Stored + 'static>(
        &self,
        x: &[S],
        grad: &[G],
        part: &Part,
        sums: &mut [f32],
    ) {
        let (shape, row_panels) = (self.shape, self.row_panels(part, 1));
        let (ins, outs) = (shape.group_in(), shape.group_out());
        let positions = part.rows.len() * row_panels.line;
        let met = row_panels.slots.len() * row_panels.line;
        // Whole tiles are read, beyond the last channel too.
        let sizes = [positions * outs + 16, met * ins + self.wide];
        with_words(sizes, |[left, right]| {
            let places = &mut as_f32_mut(left)[..positions * outs];
            self.pack_grad(grad, part, &row_panels, widen, places);
            let columns = shape.kernel_width * self.wide;
            for column in 0..shape.kernel_width {
                let places = &mut as_f32_mut(right)[..met * ins];
                self.pack_x(x, part, &row_panels, column, widen, places);
                for (row, start) in row_panels.starts.iter().enumerate() {
                    let sums = &mut sums[row * outs * columns..][..outs * columns];
                    let gemm = PackedGemm {
                        left,
                        left_block: self.isa.rows(),
                        left_row: 1,
                        left_step: outs,
                        left_starts: &[0],
                        right,
                        right_block: 16,
                        right_step: ins,
                        right_starts: &[start * row_panels.line * ins],
                        rows: outs,
                        columns: ins,
                        depth: positions,
                        terms: 1,
                        row_panels: false,
                    };
                    gemm.multiply(self.isa, |tile| {
                        let column = column * self.wide + tile.column;
                        Tile { column, ..tile }.add_to(sums, columns);
                    });
                }
            }
        });
    }

    /// Copies the gradient at each position of some images: `(line, image, position, out)`.
    fn pack_grad<G, P: Copy + Default>(
        &self,
        grad: &[G],
        part: &Part,
        row_panels: &RowPanels,
        convert: impl Fn(&[G], &mut [P]),
        out: &mut [P],
    ) {
        let outs = self.shape.group_out();
        let packer = RowPacker {
            width: self.shape.out_width,
            all: self.shape.c_out,
            channels: self.group * outs..(self.group + 1) * outs,
            step: 1,
        };
        let pixels = part.columns.start as isize;
        for (y, line) in part.rows.clone().zip(out.chunks_exact_mut(row_panels.line * outs)) {
            let grads = grad.chunks_exact(self.shape.out_image());
            let mut lines = line.chunks_exact_mut(part.columns.len() * outs);
            for (grad, line) in grads.zip(&mut lines) {
                packer.pack(grad, y, pixels, &convert, line);
            }
            lines.by_ref().for_each(|line| line.fill(P::default()));
            lines.into_remainder().fill(P::default());
        }
    }

    /// Copies the pixels that a kernel column meets at each position of some images: `(line, image, position,
    /// channel)`.
    fn pack_x<S, P: Copy + Default>(
        &self,
        x: &[S],
        part: &Part,
        row_panels: &RowPanels,
        column: usize,
        convert: impl Fn(&[S], &mut [P]),
        out: &mut [P],
    ) {
        let (shape, ins) = (self.shape, self.shape.group_in());
        let packer = RowPacker {
            width: shape.width,
            all: shape.c_in,
            channels: self.group * ins..(self.group + 1) * ins,
            step: self.taps.step,
        };
        let first = (part.columns.start * self.taps.step) as isize + self.taps.columns[column].0;
        for (&y, line) in row_panels.slots.iter().zip(out.chunks_exact_mut(row_panels.line * ins)) {
            let Some(y) = usize::try_from(y).ok().filter(|&y| y < shape.height) else {
                line.fill(P::default());
                continue;
            };
            let mut lines = line.chunks_exact_mut(part.columns.len() * ins);
            for (x, line) in x.chunks_exact(shape.image()).zip(&mut lines) {
                packer.pack(x, y, first, &convert, line);
            }
            lines.by_ref().for_each(|line| line.fill(P::default()));
            lines.into_remainder().fill(P::default());
        }
    }
}

/// Pixels of `lines` channels as a matrix: a line for each channel, to be summed over pixels.
fn view<T>(data: &[T], lines: usize, depth: usize) -> MatrixView<'_, T> {
    MatrixView { data, lines, depth, line_stride: 1, depth_stride: lines }
}

/// Packs some channels of an image's rows.
struct RowPacker {
    width: usize,
    /// Channels of a pixel.
    all: usize,
    /// Those that are packed.
    channels: Range<usize>,
    /// Pixels from a position to the next.
    step: usize,
}

impl RowPacker {
    /// The channels of every `step`th pixel of row `y` from `first` on; zeros beside the image.
    fn pack<S, P: Copy + Default>(
        &self,
        x: &[S],
        y: usize,
        first: isize,
        convert: &impl Fn(&[S], &mut [P]),
        line: &mut [P],
    ) {
        let row = &x[y * self.width * self.all..][..self.width * self.all];
        let own = self.channels.len();
        if self.step == 1 && own == self.all {
            let count = line.len() / own;
            let before = ((-first).max(0) as usize).min(count);
            let from = (first.max(0) as usize).min(self.width);
            let inside = (self.width - from).min(count - before);
            let (left, rest) = line.split_at_mut(before * own);
            let (middle, right) = rest.split_at_mut(inside * own);
            left.fill(P::default());
            right.fill(P::default());
            convert(&row[from * own..][..inside * own], middle);
            return;
        }
        for (position, place) in line.chunks_exact_mut(own).enumerate() {
            let at = first + (position * self.step) as isize;
            match usize::try_from(at).ok().filter(|&at| at < self.width) {
                Some(at) => convert(&row[at * self.all..][self.channels.clone()], place),
                None => place.fill(P::default()),
            }
        }
    }
}
