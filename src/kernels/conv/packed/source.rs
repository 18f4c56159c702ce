//! im2col: packs the rows of NCHW images into row panels.
//!
//! A row of an image becomes a few masked vectors. [`rows::moves`] computes once, for a kernel column, which pixels
//! each vector loads, which of them are padding, and where it goes. The same list then serves every channel and
//! every input row, so the loop over channels is loads and stores only.
#![allow(unsafe_code)]

use std::ops::Range;

use half::bf16;

use super::layout::{Part, RowPanels, Taps};
use super::rows::{self, Bf16Pairs, Bf16Rows, Move, RowPanel, Stored, Widened};
use crate::kernels::cpu::prefetch::{is_far, prefetch_at};
use crate::kernels::cpu::vector::{Vector, with_bf16_vectors, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, as_f32_mut};

/// The images that row panels are filled from.
pub(super) struct NchwImages<'a, S> {
    pub(super) x: &'a [S],
    pub(super) size: (usize, usize),
    pub(super) channels: Range<usize>,
    /// Elements of an image.
    pub(super) image: usize,
}

impl<S: Stored + 'static> NchwImages<'_, S> {
    /// Fills row panels with the words that `isa` multiplies: elements widened to F32, or pairs of channels.
    pub(super) fn fill(
        &self,
        taps: &Taps,
        part: &Part,
        row_panels: &RowPanels,
        isa: InstructionSet,
        out: &mut [u32],
    ) {
        match (isa.is_bf16(), as_bf16(self.x)) {
            (true, Some(x)) => self.pack::<Bf16Pairs>(x, taps, part, row_panels, (2, isa), out),
            _ => {
                let out = as_f32_mut(out);
                self.pack::<Widened<S>>(self.x, taps, part, row_panels, (1, isa), out);
            }
        }
    }

    /// As [`Self::fill`], but neighbouring elements of a row stay neighbours: widened to F32, or kept as BF16, two
    /// in a word. wgrad sums over them. The padding of lines is zero.
    pub(super) fn copy(
        &self,
        taps: &Taps,
        part: &Part,
        row_panels: &RowPanels,
        isa: InstructionSet,
        out: &mut [u32],
    ) {
        match (isa.is_bf16(), as_bf16(self.x)) {
            (true, Some(x)) => {
                let out = as_bf16_mut(out);
                self.pack::<Bf16Rows>(x, taps, part, row_panels, (1, isa), out);
            }
            _ => {
                let out = as_f32_mut(out);
                self.pack::<Widened<S>>(self.x, taps, part, row_panels, (1, isa), out);
            }
        }
    }

    /// Fills row panels of `per` channels each.
    fn pack<L: RowPanel>(
        &self,
        x: &[L::Input],
        taps: &Taps,
        part: &Part,
        row_panels: &RowPanels,
        (per, isa): (usize, InstructionSet),
        out: &mut [L::Place],
    ) {
        let (len, (height, width)) = (part.columns.len(), self.size);
        let words = self.channels.len().div_ceil(per);
        // A move for each vector of a line, those of an image together. The last image has the padding's too.
        let mut moves = vec![Vec::new(); part.images];
        for (column, &(offset, _)) in taps.columns.iter().enumerate() {
            let first = (part.columns.start * taps.step) as isize + offset;
            let place = |position: usize| {
                column * words * row_panels.row_panel
                    + position / 16 * row_panels.block
                    + position % 16
            };
            for (image, moves) in moves.iter_mut().enumerate() {
                let row = (first, taps.step, width);
                rows::moves(row, (image * len, len), L::LANES, place, moves);
            }
            if let Some(moves) = moves.last_mut() {
                let padding = (part.images * len, row_panels.line - part.images * len);
                rows::moves((first, taps.step, 0), padding, L::LANES, place, moves);
            }
        }
        assert!(row_panels.len(taps.columns.len() * words) <= out.len());
        assert!(part.images * self.image <= x.len());
        let images = (x.as_ptr(), self.image, height * width);
        let row_panels = (row_panels.slots.as_slice(), row_panels.row_panel, row_panels.slot);
        // The pixels of a row that some position meets.
        let offsets = || taps.columns.iter().map(|&(offset, _)| offset);
        let pixel = |position: usize, offset: Option<isize>| {
            let pixel = (position * taps.step) as isize + offset.unwrap_or(0);
            pixel.clamp(0, width as isize) as usize
        };
        let met =
            pixel(part.columns.start, offsets().min())..pixel(part.columns.end, offsets().max());
        let shape = (self.channels.clone(), per, self.size, taps.step);
        let out = out.as_mut_ptr();
        if L::BF16 {
            // SAFETY: the features of the vectors. Rows lie in the images of `x`, lines in the row panels of `out`, as
            // asserted.
            with_bf16_vectors!(V => unsafe {
                pack::<L, V>(images, &shape, row_panels, (&moves, &met), out)
            });
        } else {
            // SAFETY: as above.
            with_vectors!(isa.vectors(), V => unsafe {
                pack::<L, V>(images, &shape, row_panels, (&moves, &met), out)
            });
        }
    }
}

/// See [`NchwImages::pack`].
///
/// # Safety
/// As [`RowPanel`]'s; rows and lines in bounds.
#[inline(always)]
#[allow(clippy::type_complexity)]
unsafe fn pack<L: RowPanel, V: Vector>(
    (x, image, channel): (*const L::Input, usize, usize),
    &(ref channels, per, (height, width), step): &(Range<usize>, usize, (usize, usize), usize),
    (slots, row_panel, line): (&[isize], usize, usize),
    (moves_of, met): (&[Vec<Move>], &Range<usize>),
    out: *mut L::Place,
) {
    let far = is_far::<L::Input>(channel);
    // One image after another, each in the order of its memory, so that the processor loads ahead by itself.
    for (index, moves) in moves_of.iter().enumerate() {
        for (word, first) in channels.clone().step_by(per).enumerate() {
            for (slot, &y) in slots.iter().enumerate() {
                let dst = out.wrapping_add(word * row_panel + slot * line);
                let Some(y) = usize::try_from(y).ok().filter(|&y| y < height) else {
                    for &by in moves {
                        // SAFETY: the caller's.
                        unsafe { L::clear::<V>(by, dst) };
                    }
                    continue;
                };
                let row = |c: usize| x.wrapping_add(index * image + c * channel + y * width);
                let second = (per == 2 && first + 1 < channels.end).then(|| row(first + 1));
                let rows = [Some(row(first)), second];
                // Copying a single vector takes no longer than prefetching the next.
                if far && moves.len() > 1 {
                    for next in first + per..first + 2 * per {
                        prefetch_at(row(next).wrapping_add(met.start), met.len());
                    }
                }
                // One loop for each kind of load, so that `step` is a constant in it.
                macro_rules! copy_row {
                    ($step:expr) => {
                        for &by in moves {
                            // SAFETY: the caller's.
                            unsafe { L::copy_row::<V>(rows, by, $step, dst) };
                        }
                    };
                }
                match step {
                    1 => copy_row!(1),
                    2 => copy_row!(2),
                    step => copy_row!(step),
                }
            }
        }
    }
}

/// The elements, where they are BF16.
pub(super) fn as_bf16<S: 'static>(x: &[S]) -> Option<&[bf16]> {
    let same = std::any::TypeId::of::<S>() == std::any::TypeId::of::<bf16>();
    // SAFETY: it is the same type.
    same.then(|| unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) })
}

/// The bits of the elements, where they are F32.
pub(super) fn as_f32_words<S: 'static>(x: &[S]) -> Option<&[u32]> {
    let same = std::any::TypeId::of::<S>() == std::any::TypeId::of::<f32>();
    // SAFETY: it is the same type, and both are 32 bits, any of them valid.
    same.then(|| unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) })
}

/// Words as the BF16 they hold.
pub(super) fn as_bf16_mut(words: &mut [u32]) -> &mut [bf16] {
    // SAFETY: a word is two BF16, any bits of them valid.
    unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast(), 2 * words.len()) }
}
