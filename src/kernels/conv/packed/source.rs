//! im2col: packs the rows of NCHW images into row panels.
//!
//! A row of an image becomes a few masked vectors. [`rows::moves`] computes once, for a kernel column, which pixels
//! each vector loads, which of them are padding, and where it goes. The same list then serves every channel and
//! every input row, so the loop over channels is loads and stores only.
#![allow(unsafe_code)]

use std::ops::Range;

use half::bf16;

use super::layout::{Part, Strips, Taps};
use super::rows::{self, Halves, Move, Pairs, Stored, Strip, Widened};

/// The images that strips are filled from.
pub(super) struct Source<'a, S> {
    pub(super) x: &'a [S],
    pub(super) size: (usize, usize),
    pub(super) channels: Range<usize>,
    /// Elements of an image.
    pub(super) image: usize,
}

impl<S: Stored + 'static> Source<'_, S> {
    /// Fills strips with cells: elements widened to F32, or pairs of channels where `pairs`.
    pub(super) fn fill(
        &self,
        taps: &Taps,
        part: &Part,
        strips: &Strips,
        pairs: bool,
        out: &mut [u32],
    ) {
        match (pairs, halves(self.x)) {
            (true, Some(x)) => self.lay::<Pairs>(x, taps, part, strips, 2, out),
            _ => self.lay::<Widened<S>>(self.x, taps, part, strips, 1, floats(out)),
        }
    }

    /// As [`Self::fill`], but neighbouring elements of a row stay neighbours: widened to F32, or with `halved` kept
    /// as BF16, two in a word. wgrad sums over them. The padding of lines is zero.
    pub(super) fn copy(
        &self,
        taps: &Taps,
        part: &Part,
        strips: &Strips,
        halved: bool,
        out: &mut [u32],
    ) {
        match (halved, halves(self.x)) {
            (true, Some(x)) => self.lay::<Halves>(x, taps, part, strips, 1, pairs(out)),
            _ => self.lay::<Widened<S>>(self.x, taps, part, strips, 1, floats(out)),
        }
    }

    /// Fills strips of `per` channels each.
    fn lay<L: Strip>(
        &self,
        x: &[L::Source],
        taps: &Taps,
        part: &Part,
        strips: &Strips,
        per: usize,
        out: &mut [L::Place],
    ) {
        let (len, (height, width)) = (part.columns.len(), self.size);
        let cells = self.channels.len().div_ceil(per);
        // A move for each vector of a line, an image after the other, and those of the padding.
        let mut moves = vec![Vec::new(); part.images + 1];
        for (column, &(offset, _)) in taps.columns.iter().enumerate() {
            let first = (part.columns.start * taps.step) as isize + offset;
            let place = |position: usize| {
                column * cells * strips.strip + position / 16 * strips.block + position % 16
            };
            for (image, moves) in moves.iter_mut().enumerate() {
                let (width, count) = match image < part.images {
                    true => (width, len),
                    false => (0, strips.line - image * len),
                };
                let row = (first, taps.step, width);
                rows::moves(row, (image * len, count), L::LANES, place, moves);
            }
        }
        assert!(strips.len(taps.columns.len() * cells) <= out.len());
        assert!(part.images * self.image <= x.len());
        let images = (x.as_ptr(), self.image, height * width);
        let strips = (strips.slots.as_slice(), strips.strip, strips.slot);
        let shape = (self.channels.clone(), per, self.size, taps.step);
        // SAFETY: a `Unit` needs the features. Rows lie in the images of `x`, lines in the strips of
        // `out`, as asserted.
        unsafe { lay::<L>(images, shape, strips, &moves, out.as_mut_ptr()) };
    }
}

/// See [`Source::lay`].
///
/// # Safety
/// AVX-512 F, BW and VL; rows and lines in bounds.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
#[allow(clippy::type_complexity)]
unsafe fn lay<L: Strip>(
    (x, image, channel): (*const L::Source, usize, usize),
    (channels, per, (height, width), step): (Range<usize>, usize, (usize, usize), usize),
    (slots, strip, line): (&[isize], usize, usize),
    moves_of: &[Vec<Move>],
    out: *mut L::Place,
) {
    for (cell, first) in channels.clone().step_by(per).enumerate() {
        for (slot, &y) in slots.iter().enumerate() {
            let y = usize::try_from(y).ok().filter(|&y| y < height);
            let dst = out.wrapping_add(cell * strip + slot * line);
            for (index, moves) in moves_of.iter().enumerate() {
                let (Some(y), true) = (y, index + 1 < moves_of.len()) else {
                    for &by in moves {
                        // SAFETY: the caller's.
                        unsafe { L::clear(by, dst) };
                    }
                    continue;
                };
                let row = |c: usize| x.wrapping_add(index * image + c * channel + y * width);
                let second = (per == 2 && first + 1 < channels.end).then(|| row(first + 1));
                let rows = [Some(row(first)), second];
                // One loop for each kind of load, so that `step` is a constant in it.
                macro_rules! carry {
                    ($step:expr) => {
                        for &by in moves {
                            // SAFETY: the caller's.
                            unsafe { L::carry(rows, by, $step, dst) };
                        }
                    };
                }
                match step {
                    1 => carry!(1),
                    2 => carry!(2),
                    step => carry!(step),
                }
            }
        }
    }
}

/// The elements, where they are BF16.
pub(super) fn halves<S: 'static>(x: &[S]) -> Option<&[bf16]> {
    let same = std::any::TypeId::of::<S>() == std::any::TypeId::of::<bf16>();
    // SAFETY: it is the same type.
    same.then(|| unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) })
}

/// Cells as the BF16 they hold.
pub(super) fn pairs(cells: &mut [u32]) -> &mut [bf16] {
    // SAFETY: a cell is two BF16, any bits of them valid.
    unsafe { std::slice::from_raw_parts_mut(cells.as_mut_ptr().cast(), 2 * cells.len()) }
}

/// Cells as the F32 they hold.
pub(super) fn floats(cells: &mut [u32]) -> &mut [f32] {
    // SAFETY: both are 32 bits, any of them valid.
    unsafe { std::slice::from_raw_parts_mut(cells.as_mut_ptr().cast(), cells.len()) }
}
