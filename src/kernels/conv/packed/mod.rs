//! NCHW convolutions by packed GEMM, on processors with AVX2.
//!
//! The weights are the left matrix, packed once per pass. The right matrix is im2col of the image, and a thread makes
//! it block by block. It takes some output pixels, and packs the input rows that they need into row panels that
//! stay in its second-level cache.
//!
//! A row panel holds one input channel as one *column* of the kernel sees it. Rows of the kernel need no copies of
//! their own: they read the same row panels, starting at another input row. That divides the copying by the
//! kernel's height. The micro-kernel takes the rows as segments of one sum, so every output element is summed in
//! registers over all taps and rounded once.
//!
//! dgrad, the gradient with respect to the input, is the same loop over the output's gradient. With a stride, input
//! pixels fall into up to `stride²` phases that meet different taps. Each is a convolution; their results are
//! interleaved. wgrad, the gradient with respect to the weight, has loops of its own.
//!
//! [`winograd`], [`few_channels`] and [`lanes`] are faster for some shapes, and give up what is not finite.
#![allow(unsafe_code)]

pub(super) mod few_channels;
mod kernels;
pub(super) mod lanes;
mod layout;
pub(super) mod nhwc;
mod pass;
mod rows;
mod source;
mod store;
mod weights;
mod wgrad;
pub(super) mod winograd;

use std::mem::MaybeUninit;

use candle_core::{DType, Result, Tensor};

use super::shape::Shape;
use crate::kernels::cpu::dtype::tensor;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::prefetch::is_far;
use crate::kernels::cpu::simd::vectorise;
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::micro::InstructionSet::{self, AmxBf16x3};
use crate::kernels::gemm::micro::{KeptWords, PackedGemm, Rounded, with_words};
use layout::{Cut, Part, RowPanels, Taps};
use pass::ConvPass;
pub(super) use rows::Stored;
use rows::with_stored;
use source::NchwImages;
use store::{NchwStore, OutputImages, Runs};
pub(super) use weights::Order;
pub(super) use wgrad::{RunSums, reads_in_place as reads_wgrad_in_place, wgrad};

/// The instruction set for these operands; `None` where this module does not convolve them.
pub(super) fn isa(pass: PassKind, operands: [&Tensor; 2], shape: &Shape) -> Option<InstructionSet> {
    let double = operands.iter().any(|operand| operand.dtype() == DType::F64);
    // One channel leaves most of a tile empty.
    let suits = shape.group_in().min(shape.group_out()) > 1
        && shape.batch > 0
        && shape.image() > 0
        && shape.pixels() > 0;
    if double || !suits {
        return None;
    }
    let isa = InstructionSet::of(operands)?;
    Some(if nhwc::prefers_terms(pass, shape, isa) { AmxBf16x3 } else { isa })
}

/// See [`super::forward`]; contiguous operands, no F64.
pub(super) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Tensor> {
    let bias = bias.map(weights::widened).transpose()?;
    let taps = Taps::forward(shape);
    let weight = weights::pack(weight, shape, &taps, Order::Forward, isa)?;
    let pass = ConvPass::forward(shape, isa);
    let data = pass.run::<O>(x, &[Phase { at: (0, 0), taps, weight }], bias.as_deref())?;
    Ok(tensor(data, &shape.out_dims()))
}

/// See [`super::dgrad`]; contiguous operands, no F64. `None` where an infinite weight would meet padding that im2col has
/// not: see [`weights::meets_padding`].
pub(super) fn dgrad<O: Rounded>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    if weights::meets_padding(weight, shape)? {
        return Ok(None);
    }
    let bias = bias.map(weights::widened).transpose()?;
    let phases = Taps::backward(shape).into_iter().map(|(at, taps)| {
        let weight = weights::pack(weight, shape, &taps, Order::Backward, isa)?;
        Ok(Phase { at, taps, weight })
    });
    let phases = phases.collect::<Result<Vec<_>>>()?;
    let pass = ConvPass::backward(shape, isa);
    let data = pass.run::<O>(grad, &phases, bias.as_deref())?;
    Ok(Some(tensor(data, &shape.input_dims())))
}

/// The output pixels that meet the same taps: every `out_step`th from `at` on, in both directions.
struct Phase {
    at: (usize, usize),
    taps: Taps,
    weight: KeptWords,
}

impl ConvPass {
    /// Convolves by phases. Pixels of no phase are the bias, or zeros.
    fn run<O: Rounded>(
        &self,
        x: &Tensor,
        phases: &[Phase],
        bias: Option<&[f32]>,
    ) -> Result<Vec<O>> {
        let out_image = self.groups * self.outs * self.out_size.0 * self.out_size.1;
        with_stored!(x, O, x => {
            let x: &[_] = &x;
            let image = self.groups * self.ins * self.size.0 * self.size.1;
            Ok(uninit_vec(self.batch * out_image, |out: &mut [MaybeUninit<O>]| {
                // Tasks of the images that the smallest grid is cut by, so that all parts of an
                // image are one thread's.
                let cuts: Vec<_> = phases.iter().map(|phase| self.cut(&phase.taps)).collect();
                let images = cuts.iter().map(|cut| cut.images).max().unwrap_or(1);
                let fair = self.batch.div_ceil(parallel::threads());
                let images = images.min(fair).max(1);
                parallel::for_each_chunk(out, images * out_image, |i, out| {
                    let x = &x[i * images * image..][..out.len() / out_image * image];
                    match (phases, cuts.as_slice()) {
                        ([phase], [cut]) if phase.taps.out_step == 1 => {
                            self.images(x, &[(phase, OutputImages::of(out))], *cut, bias);
                        }
                        _ => self.interleaved(x, phases, &cuts, bias, out),
                    }
                });
            }))
        })
    }

    fn words(&self) -> usize {
        self.ins.div_ceil(self.isa.per_word())
    }

    fn cut(&self, taps: &Taps) -> Cut {
        Cut::new(taps.grid, self.batch, self.words() * taps.columns.len() * taps.step)
    }

    /// Convolves the phases, those that meet the same columns together, then takes their pixels in turn.
    fn interleaved<S: Stored + 'static, O: Rounded>(
        &self,
        x: &[S],
        phases: &[Phase],
        cuts: &[Cut],
        bias: Option<&[f32]>,
        out: &mut [MaybeUninit<O>],
    ) {
        let (height, width) = self.out_size;
        let channels = self.groups * self.outs;
        let images = out.len() / (channels * height * width).max(1);
        // The value of pixels that belong to no phase.
        let background = |channel: usize| {
            MaybeUninit::new(O::narrowed(bias.map_or(0.0, |bias| bias[channel % channels])))
        };
        let Some(Phase { at: (first, _), taps: Taps { out_step: stride, .. }, .. }) =
            phases.first()
        else {
            for (channel, out) in out.chunks_mut(height * width).enumerate() {
                out.fill(background(channel));
            }
            return;
        };
        let stride = *stride;
        let across = phases.iter().take_while(|phase| phase.at.0 == *first).count();
        let down: Vec<_> = phases.iter().step_by(across).map(|phase| phase.at.0).collect();
        with_words([out.len()], |[scratch]| {
            let mut rest = &mut as_elements::<O>(scratch)[..out.len()];
            let mut pixels = Vec::with_capacity(phases.len());
            for Phase { taps, .. } in phases {
                let (rows, columns) = taps.grid;
                let len = images * channels * rows * columns;
                let (own, after) = rest.split_at_mut(len);
                rest = after;
                pixels.push(own);
            }
            for column in 0..across {
                // Where images are of odd height, the first phases have a row more than the others.
                let alike = |a: &usize, b: &usize| phases[*a].taps.grid == phases[*b].taps.grid;
                let places: Vec<_> = (column..phases.len()).step_by(across).collect();
                for places in places.chunk_by(alike) {
                    let of =
                        |&place: &usize| (&phases[place], OutputImages::of(&mut *pixels[place]));
                    let together: Vec<_> = places.iter().map(of).collect();
                    let pass = ConvPass { out_size: phases[places[0]].taps.grid, ..*self };
                    pass.images(x, &together, cuts[places[0]], bias);
                }
            }
            vectorise(
                #[inline(always)]
                || {
                    for (channel, out) in out.chunks_mut(height * width).enumerate() {
                        let background = background(channel);
                        for (y, out) in out.chunks_mut(width).enumerate() {
                            let Ok(first) = down.binary_search(&(y % stride)) else {
                                out.fill(background);
                                continue;
                            };
                            let of_row = first * across..(first + 1) * across;
                            let rows = phases[of_row.clone()].iter().zip(&pixels[of_row]);
                            let rows = rows.map(|(Phase { at, taps, .. }, pixels)| {
                                let (rows, columns) = taps.grid;
                                let start = (channel * rows + y / stride) * columns;
                                (at.1, &pixels[start..start + columns])
                            });
                            interleave(stride, rows, background, out);
                        }
                    }
                },
            );
        });
    }

    /// Convolves images by phases of one grid that meet the same columns, each into its own.
    fn images<S: Stored + 'static, O: Rounded>(
        &self,
        x: &[S],
        phases: &[(&Phase, OutputImages<O>)],
        cut: Cut,
        bias: Option<&[f32]>,
    ) {
        let Some((Phase { taps, .. }, _)) = phases.first() else { return };
        if self.out_size.0 * self.out_size.1 == 0 {
            return;
        }
        // What all of them meet.
        let rows = phases.iter().flat_map(|(phase, _)| phase.taps.rows.iter().copied());
        let taps = Taps { rows: rows.collect(), ..taps.clone() };
        // Rows of whole vectors are copied as well, and where planes are far apart, the next is prefetched row by row.
        let (height, width) = self.size;
        let by_rows = width.is_multiple_of(16) && is_far::<S>(height * width);
        if let Some(taps) = taps.in_one_row(self.size).filter(|_| !by_rows) {
            let pass = ConvPass { size: taps.grid, out_size: taps.grid, ..*self };
            return pass.by_parts(x, &taps, phases, pass.cut(&taps), bias);
        }
        self.by_parts(x, &taps, phases, cut, bias);
    }

    /// [`Self::images`], given the taps of all phases together.
    fn by_parts<S: Stored + 'static, O: Rounded>(
        &self,
        x: &[S],
        taps: &Taps,
        phases: &[(&Phase, OutputImages<O>)],
        cut: Cut,
        bias: Option<&[f32]>,
    ) {
        let image = self.groups * self.ins * self.size.0 * self.size.1;
        let out_image = self.groups * self.outs * self.out_size.0 * self.out_size.1;
        for (i, x) in x.chunks(cut.images * image).enumerate() {
            let out = i * cut.images * out_image;
            let parts = cut.parts(taps.grid, x.len() / image);
            let tasks =
                parts.flat_map(|part| (0..self.groups).map(move |group| (part.clone(), group)));
            let work = |(part, group): (Part, usize)| {
                self.run_part(x, taps, phases, &part, group, (bias, out));
            };
            // Few images do not keep all threads busy by themselves.
            if self.batch < parallel::threads() {
                parallel::for_each_item(tasks, work);
            } else {
                tasks.for_each(work);
            }
        }
    }

    /// Convolves one block of output pixels of one group: packs its row panels, multiplies the weights of each phase by
    /// them, and rounds the sums into its images from `out` on.
    fn run_part<S: Stored + 'static, O: Rounded>(
        &self,
        x: &[S],
        taps: &Taps,
        phases: &[(&Phase, OutputImages<O>)],
        part: &Part,
        group: usize,
        (bias, out): (Option<&[f32]>, usize),
    ) {
        let (words, rows) = (self.words(), self.isa.rows());
        let depth = if taps.is_empty() { 0 } else { words * taps.columns.len() };
        let row_panels = RowPanels::blocked(taps, part, depth);
        let source = NchwImages {
            x,
            size: self.size,
            channels: group * self.ins..(group + 1) * self.ins,
            image: self.groups * self.ins * self.size.0 * self.size.1,
        };
        let (height, width) = self.out_size;
        let columns = part.columns.len();
        let positions = part.rows.len() * row_panels.line;
        // The block covers whole rows of one image, which are contiguous: one run instead of one per row.
        let whole = part.images == 1 && columns == width && row_panels.line == width;
        let runs = Runs {
            run: if whole { positions } else { columns },
            images: part.images,
            line: if whole { positions } else { row_panels.line },
            start: part.rows.start * width + part.columns.start,
            row: width,
            image: self.groups * self.outs * height * width,
        };
        let places = NchwStore::new(&runs, positions, height * width);
        let blocks = self.outs.div_ceil(rows);
        let bias = bias.map(|bias| &bias[group * self.outs..]);
        let segment = if self.isa.is_amx() { depth } else { rows * depth };
        with_words([row_panels.slots.len() * row_panels.slot + 16], |[right]| {
            source.fill(taps, part, &row_panels, self.isa, right);
            let mut starts = row_panels.starts.as_slice();
            for (Phase { taps, weight, .. }, images) in phases {
                let (own, rest) = starts.split_at(taps.rows.len());
                starts = rest;
                let left_starts: Vec<_> = (0..own.len()).map(|row| row * segment).collect();
                let block = rows * depth * own.len();
                let out = images.from(out + group * self.outs * height * width);
                let gemm = PackedGemm {
                    left: &weight.as_slice()[group * blocks * block..],
                    left_block: block,
                    left_row: if self.isa.is_amx() { depth * own.len() } else { 1 },
                    left_step: if self.isa.is_amx() { 1 } else { rows },
                    left_starts: &left_starts,
                    right,
                    right_block: row_panels.block,
                    right_step: row_panels.row_panel,
                    right_starts: own,
                    rows: self.outs,
                    columns: positions,
                    depth,
                    terms: 1,
                    row_panels: true,
                };
                gemm.multiply(self.isa, |tile| {
                    // SAFETY: `store` checks that the places lie in `out`; other parts, groups and phases have others.
                    unsafe { places.store::<O>(self.isa, &tile, bias, out.at, out.len) }
                });
            }
        });
    }
}

/// `out[phase + i * stride] = row[i]` of each `(phase, row)`, which are in order, and the background elsewhere.
#[inline(always)]
fn interleave<'a, T: Copy + 'a>(
    stride: usize,
    mut rows: impl ExactSizeIterator<Item = (usize, &'a [T])>,
    background: T,
    out: &mut [T],
) {
    if stride == 2
        && rows.len() == 2
        && let (Some((_, even)), Some((_, odd))) = (rows.next(), rows.next())
    {
        let (pairs, last) = out.as_chunks_mut::<2>();
        for ((pair, even), odd) in pairs.iter_mut().zip(even).zip(odd) {
            *pair = [*even, *odd];
        }
        last.iter_mut().zip(even.last()).for_each(|(last, even)| *last = *even);
        return;
    }
    if stride == 2
        && rows.len() == 1
        && let Some((phase, row)) = rows.next()
    {
        let (pairs, last) = out.as_chunks_mut::<2>();
        for (pair, &element) in pairs.iter_mut().zip(row) {
            *pair = if phase == 0 { [element, background] } else { [background, element] };
        }
        last.fill(background);
        last.iter_mut().skip(phase).zip(row.last()).for_each(|(last, element)| *last = *element);
        return;
    }
    if rows.len() < stride {
        out.fill(background);
    }
    for (phase, row) in rows {
        out.iter_mut().skip(phase).step_by(stride).zip(row).for_each(|(out, e)| *out = *e);
    }
}

/// Scratch words as uninitialised elements of 32 bits or less.
fn as_elements<O>(words: &mut [u32]) -> &mut [MaybeUninit<O>] {
    const { assert!(size_of::<O>() <= 4 && 4 % align_of::<O>() == 0) };
    // SAFETY: a word has room for an element, and alignment.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), words.len()) }
}

#[cfg(test)]
mod tests {
    use super::interleave;

    #[test]
    fn rows_are_interleaved_where_they_belong() {
        for width in 1..9 {
            for stride in [1, 2, 3, 5, 100_000] {
                let phases: Vec<usize> = (0..stride.min(width)).collect();
                for kept in [
                    phases.clone(),
                    phases.iter().copied().step_by(2).collect(),
                    phases[1..].to_vec(),
                    vec![],
                ] {
                    let rows: Vec<Vec<usize>> = kept
                        .iter()
                        .map(|phase| {
                            (0..width).skip(*phase).step_by(stride).map(|x| x + 1).collect()
                        })
                        .collect();
                    let mut out = vec![0; width];
                    const BACKGROUND: usize = 100;
                    let rows = kept.iter().zip(&rows).map(|(&phase, row)| (phase, row.as_slice()));
                    interleave(stride, rows, BACKGROUND, &mut out);
                    for (x, out) in out.iter().enumerate() {
                        let expected =
                            if kept.contains(&(x % stride)) { x + 1 } else { BACKGROUND };
                        assert_eq!(*out, expected, "{width} by {stride}: {kept:?}");
                    }
                }
            }
        }
    }
}
