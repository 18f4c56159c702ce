//! Packs weights, once a pass, in the order in which the micro-kernel reads them.
//!
//! The elements of one word or row are `kernel` or `channels × kernel` apart in memory, so each vector is gathered.
//! dgrad sums over output channels instead of input channels: [`Order`] exchanges the two strides.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::layout::Taps;
use super::rows::widen_into;
use super::with_stored;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::cpu::vector::{Vector, first_lanes, with_bf16_vectors};
use crate::kernels::gemm::micro::{InstructionSet, PackedWords, first_term, padded_words, split};

/// Which channels are summed over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// The input's.
    Forward,
    /// The output's: for the gradient by the input.
    Backward,
}

/// A contiguous tensor's elements in F32.
pub(super) fn widened(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(with_stored!(tensor, data => {
        let data: &[_] = &data;
        uninit_vec(data.len(), |places: &mut [MaybeUninit<f32>]| match data.len() > SHORT {
            true => {
                let widen = |_, to: &mut [_], from: &[_]| widen_into(from, to);
                parallel::for_each_chunk_zipped(places, SHORT, data, SHORT, widen);
            }
            false => widen_into(data, places),
        })
    }))
}

/// `(group, block of rows, …)` as [`PackedGemm`](crate::kernels::gemm::micro::Panel) reads the left matrix: a row
/// a channel that is not summed over, a segment a kernel row, a word `(kernel column, channel)`.
pub(super) fn pack(
    weight: &[f32],
    shape: &Shape,
    taps: &Taps,
    order: Order,
    isa: InstructionSet,
) -> PackedWords {
    arrange(weight, shape, taps, order, isa, (isa.rows(), isa.is_amx()))
}

/// The same as the right matrix: `(group, channel / 16, kernel row, kernel column, word, channel % 16)`,
/// a column's words in whole registers where they have terms.
pub(super) fn pack_blocks(
    weight: &[f32],
    shape: &Shape,
    taps: &Taps,
    order: Order,
    isa: InstructionSet,
) -> PackedWords {
    arrange(weight, shape, taps, order, isa, (16, false))
}

/// Elements, or words, that are packed before another thread is awake.
pub(super) const SHORT: usize = 1 << 14;

/// In blocks of `rows` channels, each by itself where `lines`, else side by side.
fn arrange(
    weight: &[f32],
    shape: &Shape,
    taps: &Taps,
    order: Order,
    isa: InstructionSet,
    (rows, lines): (usize, bool),
) -> PackedWords {
    let (ins, outs) = match order {
        Order::Forward => (shape.group_in(), shape.group_out()),
        Order::Backward => (shape.group_out(), shape.group_in()),
    };
    let kernel = shape.kernel_height * shape.kernel_width;
    let row = shape.group_in() * kernel;
    let column = padded_words(ins.div_ceil(isa.per_word()), isa.terms());
    let sum = column * taps.columns.len() * taps.rows.len();
    let blocks = outs.div_ceil(rows);
    let mut packed = PackedWords::new(shape.geometry.groups * blocks * rows * sum);
    let rows_of = taps.rows.iter();
    let used = rows_of.flat_map(|&(_, row)| {
        taps.columns.iter().map(move |&(_, column)| row * shape.kernel_width + column)
    });
    let (across, down) = if lines { (1, sum) } else { (rows, 1) };
    let (row, channel) = if order == Order::Forward { (row, kernel) } else { (kernel, row) };
    let used = used.enumerate().map(|(index, tap)| (tap, index * column * across)).collect();
    let arrangement = Arrangement { isa, ins, row, channel, kernel, used, across, down };
    let pack = |block: usize, places: &mut [u32]| {
        let (group, first) = (block / blocks, block % blocks * rows);
        let start = group * shape.group_out() * shape.group_in() * kernel + first * row;
        let (weight, rows) = (&weight[start..], rows.min(outs - first));
        match isa {
            InstructionSet::Avx2F32 => arrangement.fill_singly(weight, rows, places),
            // SAFETY: the features of the vectors.
            _ => with_bf16_vectors!(V => unsafe { arrangement.fill::<V>(weight, rows, places) }),
        }
    };
    let (places, block) = (shape.geometry.groups * blocks * rows * sum, (rows * sum).max(1));
    let places = &mut packed.as_mut_slice()[..places];
    match places.len() > SHORT {
        true => parallel::for_each_chunk(places, block, pack),
        false => {
            places.chunks_mut(block).enumerate().for_each(|(block, places)| pack(block, places))
        }
    }
    packed
}

/// Where weights come from, and where their words go in a block.
struct Arrangement {
    isa: InstructionSet,
    /// Channels that are summed over.
    ins: usize,
    /// Weights from a row to the next, from a channel to the next, and of a kernel.
    row: usize,
    channel: usize,
    kernel: usize,
    /// Of every tap in use, its weight in a kernel, and its first word.
    used: Vec<(usize, usize)>,
    /// Words from a word of a sum to the next, and from a row to the next.
    across: usize,
    down: usize,
}

impl Arrangement {
    /// Packs so many rows, the first of which `weight` starts with.
    ///
    /// # Safety
    /// The features of `V`.
    #[inline(always)]
    unsafe fn fill<V: Vector>(&self, weight: &[f32], rows: usize, places: &mut [u32]) {
        let (per, terms) = (self.isa.per_word(), self.isa.terms());
        let words = self.ins.div_ceil(per);
        // A vector is the same word of all rows, or else words of a row, the last of which may have one channel.
        let side = self.across > 1;
        for row in 0..if side { 1 } else { rows } {
            for word in (0..words).step_by(if side { 1 } else { 16 }) {
                let channels = (self.ins - per * word).min(16 * per);
                let (step, counts) = match side {
                    true => (self.row, [rows, if channels > 1 { rows } else { 0 }]),
                    false => (per * self.channel, [channels.div_ceil(per), channels / 2]),
                };
                let from = (row * self.row + per * word * self.channel, step);
                let at = row * self.down + first_term(word, terms) * self.across;
                // SAFETY: the caller's.
                unsafe { self.vectors::<V>(weight, from, counts, &mut places[at..]) };
            }
        }
    }

    /// [`Self::fill`] with words of F32, one at a time: AVX2 gathers no faster.
    fn fill_singly(&self, weight: &[f32], rows: usize, places: &mut [u32]) {
        for &(tap, start) in &self.used {
            for channel in 0..self.ins {
                let from = channel * self.channel + tap;
                let at = start + channel * self.across;
                for row in 0..rows {
                    places[at + row * self.down] = weight[from + row * self.row].to_bits();
                }
            }
        }
    }

    /// The vector of every tap: `count` words of weights `step` apart, `pairs` of them with the next channel's.
    ///
    /// # Safety
    /// The features of `V`.
    #[inline(always)]
    unsafe fn vectors<V: Vector>(
        &self,
        weight: &[f32],
        (from, step): (usize, usize),
        [count, pairs]: [usize; 2],
        places: &mut [u32],
    ) {
        let pairs = if self.isa.is_bf16() { pairs } else { 0 };
        let reach = |count: usize| (count - 1) * step + self.kernel;
        assert!(1 <= count && pairs <= count && count <= 16 && reach(16) <= i32::MAX as usize);
        assert!(from + reach(count) <= weight.len());
        assert!(pairs == 0 || from + self.channel + reach(pairs) <= weight.len());
        let mask = first_lanes(count);
        let paired = first_lanes(pairs);
        for &(tap, start) in &self.used {
            assert!(tap < self.kernel);
            let at = weight.as_ptr().wrapping_add(from + tap);
            // SAFETY: the caller's; the places of the masks are in `weight`, as asserted of the last ones.
            let (low, high) = unsafe {
                let low = V::gather(at, step, mask);
                let next = at.wrapping_add(self.channel);
                (low, if pairs > 0 { V::gather(next, step, paired) } else { V::zero() })
            };
            let places = &mut places[start..];
            // SAFETY: the caller's.
            unsafe {
                match self.isa {
                    InstructionSet::Avx2F32 | InstructionSet::Avx512F32 => {
                        store_words(low, mask, places);
                    }
                    // These are BF16, so that nothing is rounded.
                    InstructionSet::Avx512Bf16 | InstructionSet::AmxBf16 => {
                        store_words(low.shift_down().or(high.upper()), mask, places);
                    }
                    InstructionSet::AmxBf16x3 => {
                        let (low, high) = (split(low), split(high));
                        for term in 0..3 {
                            let words = low[term].shift_down().or(high[term]);
                            store_words(words, mask, &mut places[term * 16 * self.across..]);
                        }
                    }
                }
            }
        }
    }
}

/// Writes the words of `mask`, which are the first ones.
///
/// # Safety
/// The features of `V`.
#[inline(always)]
unsafe fn store_words<V: Vector>(words: V, mask: u16, places: &mut [u32]) {
    let places = &mut places[..mask.count_ones() as usize];
    // SAFETY: the caller's; as many places as the mask has.
    unsafe { words.store_masked(places.as_mut_ptr().cast(), mask) };
}
