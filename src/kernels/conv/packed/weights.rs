//! Packs weights, once a pass, in the order in which the micro-kernel reads them.
//!
//! The elements of one word or row are `kernel` or `channels × kernel` apart in memory, and the taps of a kernel follow
//! each other. So sixteen kernels are read as rows of taps, and transposed in registers: a vector a tap.
//! dgrad sums over output channels instead of input channels: [`Order`] exchanges the two strides.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::layout::Taps;
use super::rows::{Stored, widen_into};
use super::with_stored;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_bf16_vectors, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, KeptWords, first_term, padded_words, split};

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

/// Whether no weight is infinite or NaN.
pub(super) fn are_finite<S: Stored>(weight: &[S]) -> bool {
    let mut finite = true;
    let vectors = Vectors::widest().unwrap_or(Vectors::Avx2);
    with_vectors!(vectors, V => {
        for weight in weight.chunks(16) {
            let mask = first_lanes(weight.len());
            // SAFETY: the features of the vectors; the mask has no more elements than there are.
            finite &= unsafe { S::load::<V>(weight.as_ptr(), mask).is_finite(mask) };
        }
    });
    finite
}

/// `(group, block of rows, …)` as [`PackedGemm`](crate::kernels::gemm::micro::Panel) reads the left matrix: a row
/// a channel that is not summed over, a segment a kernel row, a word `(kernel column, channel)`.
pub(super) fn pack(
    weight: &Tensor,
    shape: &Shape,
    taps: &Taps,
    order: Order,
    isa: InstructionSet,
) -> Result<KeptWords> {
    let blocks = (isa.rows(), isa.is_amx());
    Ok(with_stored!(weight, weight => arrange(&weight, shape, taps, order, isa, blocks)))
}

/// The same as the right matrix: `(group, channel / 16, kernel row, kernel column, word, channel % 16)`,
/// a column's words in whole registers where they have terms.
pub(super) fn pack_blocks(
    weight: &Tensor,
    shape: &Shape,
    taps: &Taps,
    order: Order,
    isa: InstructionSet,
) -> Result<KeptWords> {
    Ok(with_stored!(weight, weight => arrange(&weight, shape, taps, order, isa, (16, false))))
}

/// Elements, or words, that are packed before another thread is awake.
pub(super) const SHORT: usize = 1 << 14;

/// In blocks of `rows` channels, each by itself where `lines`, else side by side.
fn arrange<S: Stored>(
    weight: &[S],
    shape: &Shape,
    taps: &Taps,
    order: Order,
    isa: InstructionSet,
    (rows, lines): (usize, bool),
) -> KeptWords {
    let (ins, outs) = match order {
        Order::Forward => (shape.group_in(), shape.group_out()),
        Order::Backward => (shape.group_out(), shape.group_in()),
    };
    let kernel = shape.kernel_height * shape.kernel_width;
    let row = shape.group_in() * kernel;
    let column = padded_words(ins.div_ceil(isa.per_word()), isa.terms());
    let sum = column * taps.columns.len() * taps.rows.len();
    let blocks = outs.div_ceil(rows);
    let mut packed = KeptWords::new(shape.geometry.groups * blocks * rows * sum);
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
        let (weight, count) = (&weight[start..], rows.min(outs - first));
        if count < rows || isa.terms() > 1 {
            places.fill(0); // between rows and registers
        }
        match isa {
            InstructionSet::Avx2F32 => arrangement.fill_singly(weight, count, places),
            _ => with_bf16_vectors!(V => {
                // SAFETY: the features of the vectors.
                unsafe { arrangement.fill::<S, V>(weight, count, places) }
            }),
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
    unsafe fn fill<S: Stored, V: Vector>(&self, weight: &[S], rows: usize, places: &mut [u32]) {
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
                unsafe { self.vectors::<S, V>(weight, from, counts, &mut places[at..]) };
            }
        }
    }

    /// [`Self::fill`] with words of F32, one at a time, for AVX2.
    fn fill_singly<S: Stored>(&self, weight: &[S], rows: usize, places: &mut [u32]) {
        for &(tap, start) in &self.used {
            for channel in 0..self.ins {
                let from = channel * self.channel + tap;
                let at = start + channel * self.across;
                for row in 0..rows {
                    places[at + row * self.down] = weight[from + row * self.row].widen().to_bits();
                }
            }
        }
    }

    /// The vector of every tap: `count` words of weights `step` apart, `pairs` of them with the next channel's.
    ///
    /// # Safety
    /// The features of `V`.
    #[inline(always)]
    unsafe fn vectors<S: Stored, V: Vector>(
        &self,
        weight: &[S],
        (from, step): (usize, usize),
        [count, pairs]: [usize; 2],
        places: &mut [u32],
    ) {
        let pairs = if self.isa.is_bf16() { pairs } else { 0 };
        let reach = |count: usize| (count - 1) * step + self.kernel;
        assert!(1 <= count && pairs <= count && count <= 16);
        assert!(from + reach(count) <= weight.len());
        assert!(pairs == 0 || from + self.channel + reach(pairs) <= weight.len());
        let mask = first_lanes(count);
        for first in (0..self.kernel).step_by(16) {
            let taps = first_lanes(self.kernel - first);
            let at = weight.as_ptr().wrapping_add(from + first);
            // SAFETY: the caller's; these taps of as many kernels are in `weight`, as asserted of the last kernels.
            let (low, high): ([V; 16], [V; 16]) = unsafe {
                let low = kernels(at, step, count, taps);
                (low, kernels(at.wrapping_add(self.channel), step, pairs, taps))
            };
            for term in 0..self.isa.terms() {
                // SAFETY: the caller's.
                let words = unsafe {
                    let mut words = low;
                    match self.isa {
                        InstructionSet::Avx2F32 | InstructionSet::Avx512F32 => {}
                        // These are BF16, so that nothing is rounded.
                        InstructionSet::Avx512Bf16 | InstructionSet::AmxBf16 => {
                            for (word, high) in words.iter_mut().zip(high) {
                                *word = word.shift_down().or(high.upper());
                            }
                        }
                        InstructionSet::AmxBf16x3 => {
                            for (word, high) in words.iter_mut().zip(high) {
                                *word = split(*word)[term].shift_down().or(split(high)[term]);
                            }
                        }
                    }
                    V::transpose(words)
                };
                for &(tap, start) in &self.used {
                    if tap / 16 == first / 16 {
                        let places = &mut places[start + term * 16 * self.across..];
                        // SAFETY: the caller's.
                        unsafe { store_words(words[tap % 16], mask, places) };
                    }
                }
            }
        }
    }
}

/// The taps of `mask` of `count` kernels, `step` apart: a vector a kernel.
///
/// # Safety
/// The features of `V`; the taps can be read.
#[inline(always)]
unsafe fn kernels<S: Stored, V: Vector>(
    at: *const S,
    step: usize,
    count: usize,
    mask: u16,
) -> [V; 16] {
    // SAFETY: the caller's.
    let mut kernels = [unsafe { V::zero() }; 16];
    for (i, kernel) in kernels.iter_mut().enumerate().take(count) {
        // SAFETY: the caller's.
        *kernel = unsafe { S::load(at.wrapping_add(i * step), mask) };
    }
    kernels
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
