//! Lines, filled from images.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use super::lines::Lines;
use crate::kernels::conv2d::packed::rows::Stored;
use crate::kernels::conv2d::packed::source::{floats, halves, pairs};

/// An image that lines are filled from.
pub(super) struct Pixels<'a, S> {
    pub(super) x: &'a [S],
    pub(super) size: (usize, usize),
    pub(super) channels: Range<usize>,
    /// Channels of a pixel.
    pub(super) all: usize,
}

impl<S: Stored + 'static> Pixels<'_, S> {
    /// Fills lines with cells: elements widened to F32, or pairs of BF16 where `paired`; the odd
    /// channel's partner is zero.
    pub(super) fn fill(&self, lines: &Lines, paired: bool, out: &mut [u32]) {
        let len = lines.len();
        match (paired, halves(self.x)) {
            (true, Some(x)) => {
                let of =
                    Pixels { x, size: self.size, channels: self.channels.clone(), all: self.all };
                let each = |x: bf16| x;
                of.lay(
                    lines,
                    2 * lines.cells,
                    bf16::ZERO,
                    (copy, each),
                    &mut pairs(out)[..2 * len],
                );
            }
            _ => self.lay(lines, lines.cells, 0.0, (widen, S::widen), &mut floats(out)[..len]),
        }
    }

    /// Fills lines whose pixels have `own` elements, with what becomes of many, or of each.
    fn lay<P: Copy>(
        &self,
        lines: &Lines,
        own: usize,
        zero: P,
        (carry, each): (impl Fn(&[S], &mut [P]), impl Fn(S) -> P),
        out: &mut [P],
    ) {
        /// Channels from which on a pixel is worth a call.
        const MANY: usize = 8;
        let (height, width) = self.size;
        let before = ((-lines.column).max(0) as usize).min(lines.pixels);
        let first = lines.column.max(0) as usize;
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
            let row = &self.x[(y * width + first) * self.all..][..inside * self.all];
            if self.channels.len() == self.all && own == self.all {
                carry(row, line);
                continue;
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
                continue;
            }
            for (pixel, place) in row.chunks_exact(self.all).zip(line.chunks_exact_mut(own)) {
                let (place, odd) = place.split_at_mut(self.channels.len());
                carry(&pixel[self.channels.clone()], place);
                odd.fill(zero);
            }
        }
    }
}

pub(super) fn copy(from: &[bf16], to: &mut [bf16]) {
    to.copy_from_slice(from);
}

pub(super) fn widen<S: Stored>(from: &[S], to: &mut [f32]) {
    /// # Safety
    /// AVX-512 F, BW and VL; as many places as elements.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn run<S: Stored>(from: &[S], to: &mut [f32]) {
        for (from, to) in from.chunks(16).zip(to.chunks_mut(16)) {
            let mask = ((1u32 << from.len()) - 1) as u16;
            // SAFETY: the mask has no more elements than there are, on both sides.
            unsafe { _mm512_mask_storeu_ps(to.as_mut_ptr(), mask, S::load(from.as_ptr(), mask)) };
        }
    }
    assert!(from.len() == to.len());
    // SAFETY: a `Unit` has the features.
    unsafe { run(from, to) };
}
