//! Copies rows of NHWC images, with their padding, into scratch that the micro-kernel reads.
//!
//! In NHWC, channels follow each other, and sums go along them. So there is no im2col: a block copies each input row
//! that it meets once, and all taps read that copy. The copy has zeros for padding, so the micro-kernel needs no
//! bounds. Its words are those of the instruction set:
//!
//! ```text
//! F32                F32, widened from F32, F16 or BF16
//! AVX512-BF16, AMX   BF16 as they are, two channels in a word
//! AMX-BF16x3         three BF16 terms per element: 32 channels of the first term, then those of the others
//! ```
//!
//! Pixels are filled up with zeros to whole words, and to whole registers for BF16x3. Where the group has all
//! channels and nothing is filled up, a row of the image is one copy. A few channels go channel by channel, as a call
//! for each pixel would take longer than its copy. The thread that copies a block also multiplies it: as it is in
//! forward and dgrad, while wgrad transposes it first.
#![allow(unsafe_code)]

use std::ops::Range;

use half::bf16;

use super::lines::Lines;
use crate::kernels::conv::packed::rows::{Stored, widen};
use crate::kernels::conv::packed::source::{as_bf16, as_bf16_mut};
use crate::kernels::cpu::vector::{Vector, with_bf16_vectors};
use crate::kernels::gemm::micro::{InstructionSet, as_f32_mut, split};

/// An image that lines are filled from.
pub(super) struct NhwcImage<'a, S> {
    pub(super) x: &'a [S],
    pub(super) size: (usize, usize),
    pub(super) channels: Range<usize>,
    /// Channels of a pixel.
    pub(super) all: usize,
}

impl<S: Stored + 'static> NhwcImage<'_, S> {
    /// Fills lines with words: elements widened to F32, or pairs, of BF16 or of terms; the odd
    /// channel's partner is zero.
    pub(super) fn fill(&self, lines: &Lines, isa: InstructionSet, out: &mut [u32]) {
        let len = lines.len();
        match (isa, as_bf16(self.x)) {
            (InstructionSet::AmxBf16x3, _) => {
                let own = 2 * lines.words;
                let out = &mut as_bf16_mut(out)[..2 * len];
                self.pack(lines, own, bf16::ZERO, |row, line| self.terms(row, own, line), out);
            }
            (InstructionSet::Avx512Bf16 | InstructionSet::AmxBf16, Some(x)) => {
                let of = NhwcImage {
                    x,
                    size: self.size,
                    channels: self.channels.clone(),
                    all: self.all,
                };
                let each = |x: bf16| x;
                let (own, out) = (2 * lines.words, &mut as_bf16_mut(out)[..2 * len]);
                let convert = |row: &[bf16], line: &mut [bf16]| {
                    of.convert(row, own, bf16::ZERO, (copy, each), line);
                };
                of.pack(lines, own, bf16::ZERO, convert, out);
            }
            _ => {
                let convert = |row: &[S], line: &mut [f32]| {
                    self.convert(row, lines.words, 0.0, (widen, S::widen), line);
                };
                self.pack(lines, lines.words, 0.0, convert, &mut as_f32_mut(out)[..len]);
            }
        }
    }

    /// Fills lines whose pixels have `own` elements, with what `convert` makes of rows of pixels.
    fn pack<P: Copy>(
        &self,
        lines: &Lines,
        own: usize,
        zero: P,
        convert: impl Fn(&[S], &mut [P]),
        out: &mut [P],
    ) {
        let (height, width) = self.size;
        let before = ((-lines.column).max(0) as usize).min(lines.pixels);
        // A line may begin beyond the image.
        let first = (lines.column.max(0) as usize).min(width);
        let inside = width.saturating_sub(first).min(lines.pixels - before);
        for (&y, line) in lines.slots.iter().zip(out.chunks_exact_mut(lines.pixels * own)) {
            let Some(y) = usize::try_from(y).ok().filter(|&y| y < height) else {
                line.fill(zero);
                continue;
            };
            let (left, rest) = line.split_at_mut(before * own);
            let (line, right) = rest.split_at_mut(inside * own);
            left.fill(zero);
            right.fill(zero);
            convert(&self.x[(y * width + first) * self.all..][..inside * self.all], line);
        }
    }

    /// Converts the channels of a row's pixels: all of a pixel by `many`, or one by one by `each` if they are few.
    fn convert<P: Copy>(
        &self,
        row: &[S],
        own: usize,
        zero: P,
        (many, each): (impl Fn(&[S], &mut [P]), impl Fn(S) -> P),
        line: &mut [P],
    ) {
        /// Channels from which on a pixel is worth a call.
        const MANY: usize = 8;
        if self.channels.len() == self.all && own == self.all {
            return many(row, line);
        }
        if self.channels.len() < MANY {
            for channel in 0..own {
                let places = line.iter_mut().skip(channel).step_by(own);
                match self.channels.clone().nth(channel) {
                    Some(channel) => {
                        let pixels = row.iter().skip(channel).step_by(self.all);
                        places.zip(pixels).for_each(|(place, &x)| *place = each(x));
                    }
                    None => places.for_each(|place| *place = zero),
                }
            }
            return;
        }
        for (pixel, place) in row.chunks_exact(self.all).zip(line.chunks_exact_mut(own)) {
            let (place, odd) = place.split_at_mut(self.channels.len());
            many(&pixel[self.channels.clone()], place);
            odd.fill(zero);
        }
    }

    /// Splits the channels of some pixels: 32 numbers of a term, then those of the others.
    fn terms(&self, row: &[S], own: usize, line: &mut [bf16]) {
        /// # Safety
        /// The features of `V`.
        #[inline(always)]
        unsafe fn run<S: Stored, V: Vector>(from: &[S], to: &mut [[bf16; 32]]) {
            for (from, to) in from.chunks(32).zip(to.as_chunks_mut::<3>().0) {
                let mask = (1u64 << from.len()) - 1;
                // SAFETY: the caller's; the masks have no more elements than there are.
                let [first, last] = unsafe {
                    let next = from.as_ptr().wrapping_add(16);
                    let [first, last]: [V; 2] =
                        [S::load(from.as_ptr(), mask as u16), S::load(next, (mask >> 16) as u16)];
                    [split(first), split(last)]
                };
                for (term, to) in to.iter_mut().enumerate() {
                    // SAFETY: the caller's; 32 places.
                    unsafe {
                        let both = first[term].upper_halves(last[term]);
                        both.store_pairs(to.as_mut_ptr(), u32::MAX);
                    }
                }
            }
        }
        with_bf16_vectors!(V => {
            for (pixel, places) in row.chunks_exact(self.all).zip(line.chunks_exact_mut(own)) {
                let (from, to) = (&pixel[self.channels.clone()], places.as_chunks_mut::<32>().0);
                // SAFETY: the features of the vectors.
                unsafe { run::<S, V>(from, to) };
            }
        });
    }
}

pub(super) fn copy(from: &[bf16], to: &mut [bf16]) {
    to.copy_from_slice(from);
}

#[cfg(test)]
mod tests {
    use super::super::super::layout::{Part, Taps};
    use super::*;

    /// Lines that begin before the image, in it and beyond its last column, by any step.
    #[test]
    fn lines_are_rows_with_their_padding() {
        let (height, width, channels) = (2, 3, 2);
        let x: Vec<f32> = (1..=height * width * channels).map(|x| x as f32).collect();
        for first in -5..=5 {
            for (columns, step) in [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3), (1, 100_000)] {
                let taps = Taps {
                    rows: vec![(-1, 0), (0, 1), (1, 2)],
                    columns: vec![(first, 0), (first + 1, 1)],
                    step,
                    grid: (1, columns),
                    out_step: 1,
                };
                let part = Part { images: 1, rows: 0..1, columns: 0..columns };
                let lines = Lines::new(&taps, &part, channels);
                assert!(lines.len() <= 3 * (columns * step.min(3) + 3) * channels);
                let source = NhwcImage {
                    x: &x,
                    size: (height, width),
                    channels: 0..channels,
                    all: channels,
                };
                let mut out = vec![-1f32; lines.len()];
                let copied = |row: &[f32], line: &mut [f32]| line.copy_from_slice(row);
                source.pack(&lines, channels, 0.0, copied, &mut out);
                for (slot, y) in lines.slots.iter().enumerate() {
                    for position in 0..columns {
                        for tap in 0..2 {
                            let at = first + (position * step + tap) as isize;
                            let inside = *y >= 0
                                && (*y as usize) < height
                                && (0..width as isize).contains(&at);
                            for channel in 0..channels {
                                let place = slot * lines.pixels * channels
                                    + position * lines.step
                                    + tap * channels
                                    + channel;
                                let pixel = *y * width as isize + at;
                                let expected = if inside {
                                    x[pixel as usize * channels + channel]
                                } else {
                                    0.0
                                };
                                assert_eq!(out[place], expected, "{first} {columns} {step} {slot}");
                            }
                        }
                    }
                }
            }
        }
    }
}
