//! Packs weights, once per pass, in the order in which the micro-kernel reads them.
//!
//! The weights of a tap are `kernel` or `channels × kernel` elements apart in memory, but the taps of a kernel are
//! contiguous. So sixteen kernels are loaded as rows of taps, and a transpose in registers gives one vector per tap.
//! Before it, weights of two channels are joined into words if these are of BF16. BF16x3 splits them first.
//!
//! dgrad sums over output channels instead of input channels: [`Order`] exchanges the two strides. The weights of one
//! channel for neighbouring blocks are then contiguous, so a thread packs several blocks in turns.
//!
//! AVX2 and NEON have too few registers for the transpose, and copy one weight at a time.
#![allow(unsafe_code)]

use std::array::from_fn;
use std::mem::MaybeUninit;
use std::ops::Deref;

use candle_core::{DType, Result, Tensor};

use super::layout::Taps;
use super::rows::{Stored, widen_into, with_stored};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::Elements;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_bf16_vectors, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, KeptWords, first_term, padded_words, split};

/// Which channels are summed over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in super::super) enum Order {
    /// The input's.
    Forward,
    /// The output's: for the gradient with respect to the input.
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

/// A contiguous tensor's elements in F32.
pub(super) enum InF32<'a> {
    AsTheyAre(Elements<'a, f32>),
    Widened(Vec<f32>),
}

impl InF32<'_> {
    /// [`widened`], but not copied where they are F32.
    pub(super) fn of(tensor: &Tensor) -> Result<InF32<'_>> {
        Ok(match tensor.dtype() {
            DType::F32 => InF32::AsTheyAre(Elements::of(tensor)?),
            _ => InF32::Widened(widened(tensor)?),
        })
    }
}

impl Deref for InF32<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::AsTheyAre(elements) => elements,
            Self::Widened(elements) => elements,
        }
    }
}

/// Whether zeros around the gradient, which a phase reads and col2im does not, would make NaN where the gradient has none:
/// times a weight that is not finite.
pub(super) fn meets_padding(weight: &Tensor, shape: &Shape) -> Result<bool> {
    if shape.transposed().is_some() {
        return Ok(false);
    }
    Ok(with_stored!(weight, weight => !are_finite(&weight)))
}

/// Whether no weight is infinite or NaN.
fn are_finite<S: Stored>(weight: &[S]) -> bool {
    let mut finite = true;
    let vectors = Vectors::known();
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
    // Backward, a channel's kernels of neighbouring blocks are neighbours in memory, and those of the next channel far away.
    let side_by_side = order == Order::Backward && !lines && shape.geometry.groups == 1;
    let together = if side_by_side { (blocks / 8).clamp(1, 64 / rows) } else { 1 };
    let size = (rows * sum).max(1);
    let pack = |chunk: usize, places: &mut [u32]| {
        let mut parts: Vec<_> = (chunk * together..)
            .zip(places.chunks_mut(size))
            .map(|(block, places)| {
                let (group, first) = (block / blocks, block % blocks * rows);
                let start = group * shape.group_out() * shape.group_in() * kernel + first * row;
                let count = rows.min(outs - first);
                if count < rows || isa.terms() > 1 {
                    places.fill(0); // between rows and registers
                }
                RowBlock { weight: &weight[start..], rows: count, places }
            })
            .collect();
        match isa {
            InstructionSet::F32(vectors) if !vectors.hold_squares() => {
                parts.iter_mut().for_each(|block| arrangement.fill_singly(block))
            }
            _ => with_bf16_vectors!(V => {
                // SAFETY: the features of the vectors.
                unsafe { arrangement.fill::<S, V>(&mut parts) }
            }),
        }
    };
    let len = shape.geometry.groups * blocks * rows * sum;
    let places = &mut packed.as_mut_slice()[..len];
    match len > SHORT {
        true => parallel::for_each_chunk(places, together * size, pack),
        false => {
            let chunks = places.chunks_mut(together * size).enumerate();
            chunks.for_each(|(chunk, places)| pack(chunk, places));
        }
    }
    packed
}

/// A block of rows: the weights from its first one on, and where they go.
struct RowBlock<'a, S> {
    weight: &'a [S],
    rows: usize,
    places: &'a mut [u32],
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
    /// Packs blocks, a few words of each in turns.
    ///
    /// # Safety
    /// The features of `V`.
    #[inline(always)]
    unsafe fn fill<S: Stored, V: Vector>(&self, blocks: &mut [RowBlock<'_, S>]) {
        let (per, terms) = (self.isa.per_word(), self.isa.terms());
        let words = self.ins.div_ceil(per);
        if self.across == 1 {
            // A vector is words of a row, the last of which may have one channel.
            let offsets = from_fn(|i| i * per * self.channel);
            for RowBlock { weight, rows, places } in blocks {
                for row in 0..*rows {
                    for word in (0..words).step_by(16) {
                        let channels = (self.ins - per * word).min(16 * per);
                        let counts = [channels.div_ceil(per), channels / 2];
                        let from = row * self.row + per * word * self.channel;
                        let at = row * self.down + first_term(word, terms);
                        // SAFETY: the caller's.
                        unsafe {
                            self.vectors::<S, V>(weight, from, &offsets, counts, &mut places[at..])
                        };
                    }
                }
            }
            return;
        }
        // A vector is the same word of all rows, and the next word of eight: a cache line is written as a whole.
        let whole = 16 / self.across;
        let offset = |i: usize| i % self.across * self.row + i / self.across * per * self.channel;
        let offsets = from_fn(offset);
        for first in (0..words).step_by(whole) {
            for RowBlock { weight, rows, places } in &mut *blocks {
                let together = if *rows == self.across { whole.min(words - first) } else { 1 };
                for word in (first..words.min(first + whole)).step_by(together) {
                    let pairs = together.min((self.ins - per * word) / per);
                    let counts = [together * *rows, pairs * *rows];
                    let at = first_term(word, terms) * self.across;
                    let from = per * word * self.channel;
                    // SAFETY: the caller's.
                    unsafe {
                        self.vectors::<S, V>(weight, from, &offsets, counts, &mut places[at..])
                    };
                }
            }
        }
    }

    /// [`Self::fill`] with words of F32, one at a time, for AVX2.
    fn fill_singly<S: Stored>(&self, block: &mut RowBlock<'_, S>) {
        let RowBlock { weight, rows, places } = block;
        for &(tap, start) in &self.used {
            for channel in 0..self.ins {
                let from = channel * self.channel + tap;
                let at = start + channel * self.across;
                for row in 0..*rows {
                    places[at + row * self.down] = weight[from + row * self.row].widen().to_bits();
                }
            }
        }
    }

    /// The vector of every tap: `count` words of weights at these offsets, `pairs` of them with the next channel's.
    ///
    /// # Safety
    /// The features of `V`.
    #[inline(always)]
    unsafe fn vectors<S: Stored, V: Vector>(
        &self,
        weight: &[S],
        from: usize,
        offsets: &[usize; 16],
        [count, pairs]: [usize; 2],
        places: &mut [u32],
    ) {
        let pairs = if self.isa.is_bf16() { pairs } else { 0 };
        assert!(1 <= count && pairs <= count && count <= 16);
        let reach = |count: usize| {
            offsets[..count].iter().fold(0, |most, offset| most.max(*offset)) + self.kernel
        };
        assert!(from + reach(count) <= weight.len());
        assert!(pairs == 0 || from + self.channel + reach(pairs) <= weight.len());
        let mask = first_lanes(count);
        for first in (0..self.kernel).step_by(16) {
            let taps = first_lanes(self.kernel - first);
            let at = weight.as_ptr().wrapping_add(from + first);
            // SAFETY: the caller's; these taps of as many kernels are in `weight`, as asserted of the last kernels.
            let (low, high): ([V; 16], [V; 16]) = unsafe {
                let low = kernels(at, &offsets[..count], taps);
                (low, kernels(at.wrapping_add(self.channel), &offsets[..pairs], taps))
            };
            for term in 0..self.isa.terms() {
                // SAFETY: the caller's.
                let words = unsafe {
                    let mut words = low;
                    match self.isa {
                        InstructionSet::F32(_) => {}
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

/// The taps of `mask` of the kernels at these offsets: a vector per kernel.
///
/// # Safety
/// The features of `V`; the taps can be read.
#[inline(always)]
unsafe fn kernels<S: Stored, V: Vector>(at: *const S, offsets: &[usize], mask: u16) -> [V; 16] {
    // SAFETY: the caller's.
    let mut kernels = [unsafe { V::zero() }; 16];
    for (kernel, offset) in kernels.iter_mut().zip(offsets) {
        // SAFETY: the caller's.
        *kernel = unsafe { S::load(at.wrapping_add(*offset), mask) };
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
