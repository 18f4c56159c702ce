//! Weights, transformed for tiles of a block.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::columns::Columns;
use super::super::products::taps;
use super::super::transform::{Weights, square};
use super::phases::{Group, Phase};
use crate::kernels::conv::packed::weights::Order;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::vector::{Vector, Vectors, with_vectors};
use crate::kernels::gemm::micro::{KeptWords, as_f32_mut};

/// How weights are laid out.
pub(super) struct BlockWeights<'a> {
    pub(super) shape: &'a Shape,
    /// All channels and output channels, as the pass has them.
    pub(super) sides: (usize, usize),
    pub(super) groups: &'a [Group],
    pub(super) order: Order,
    /// Channels that are transformed at a time.
    pub(super) chunk: usize,
}

impl BlockWeights<'_> {
    /// `(group, chunk, product, place, phase and channel, output channel)`: `ROW` phases and channels, of which those of the
    /// chunk come first, the channels in whole vectors. A phase has `TAPS` taps a side, and `SIDE` places.
    pub(super) fn pack<const TAPS: usize, const SIDE: usize, const ROW: usize>(
        &self,
        weight: &[f32],
        vectors: Vectors,
    ) -> KeptWords {
        let &Self { shape, sides: (ins, outs), groups, order, chunk } = self;
        let columns = Columns::new(outs);
        let taps = (shape.kernel_height, shape.kernel_width);
        assert!(weight.len() == ins * outs * taps.0 * taps.1 && taps.0.max(taps.1) <= 4);
        let len = len::<SIDE, ROW>(columns);
        let (products, chunks) = (columns.products, ins.div_ceil(chunk));
        let count = groups.len() * chunks * products;
        let mut packed = KeptWords::new(count * len);
        let all = &mut packed.as_mut_slice()[..count * len];
        parallel::for_each_chunk(all, len, |index, places| {
            let first = index / products % chunks * chunk;
            let weights = ChunkWeights::<TAPS, SIDE, ROW> {
                weight,
                taps,
                stride: shape.geometry.stride,
                sides: (ins, outs),
                order,
                group: &groups[index / products / chunks],
                channels: first..ins.min(first + chunk),
                outs: index % products * columns.width()
                    ..outs.min((index % products + 1) * columns.width()),
                width: columns.width(),
            };
            // SAFETY: the features of the vectors; weights of that length, and places of a whole chunk.
            with_vectors!(vectors, V => unsafe { weights.pack::<V>(as_f32_mut(places)) });
        });
        packed
    }
}

/// Elements of a chunk's weights for a product.
pub(super) fn len<const SIDE: usize, const ROW: usize>(columns: Columns) -> usize {
    SIDE * SIDE * place::<ROW>(columns.width())
}

/// Elements of a place. Were they a multiple of a page, the places of a tile would share few lines of the nearest cache.
pub(super) fn place<const ROW: usize>(width: usize) -> usize {
    ROW * width + 16
}

/// The weights of a chunk of channels for a product.
struct ChunkWeights<'a, const TAPS: usize, const SIDE: usize, const ROW: usize> {
    weight: &'a [f32],
    taps: (usize, usize),
    stride: usize,
    /// All channels and output channels.
    sides: (usize, usize),
    order: Order,
    group: &'a Group,
    channels: Range<usize>,
    outs: Range<usize>,
    width: usize,
}

impl<const TAPS: usize, const SIDE: usize, const ROW: usize> ChunkWeights<'_, TAPS, SIDE, ROW> {
    /// # Safety
    /// The features of `V`; weights of all channels and output channels; as many places as [`len`] says.
    #[inline(always)]
    unsafe fn pack<V: Vector>(&self, places: &mut [f32]) {
        let depth = self.channels.len().next_multiple_of(16);
        let place = place::<ROW>(self.width);
        assert!(places.len() == SIDE * SIDE * place && self.group.phases.len() * depth <= ROW);
        for (first, out) in self.outs.clone().step_by(16).enumerate() {
            for index in 0..depth {
                let channel = self.channels.start + index;
                // SAFETY: the features.
                let taps = unsafe {
                    if index < self.channels.len() {
                        let count = self.taps.0 * self.taps.1;
                        taps::<V>(self.weight, count, self.sides, self.order, channel, out)
                    } else {
                        [V::zero(); 16]
                    }
                };
                for (phase, &at) in self.group.phases.iter().enumerate() {
                    // SAFETY: the features, and sixteen elements.
                    unsafe {
                        square::<Weights, V, TAPS, SIDE>(
                            #[inline(always)]
                            |i, j| match self.tap(at, (i, j)) {
                                Some(tap) => taps[tap],
                                None => V::zero(),
                            },
                            #[inline(always)]
                            |i, j, u| {
                                let number = i * SIDE + j;
                                if let Some(before) = self.group.before::<SIDE>(number, phase) {
                                    let row = (before * depth + index) * self.width;
                                    let at = &mut places[number * place + row + 16 * first..][..16];
                                    u.store(at.as_mut_ptr());
                                }
                            },
                        );
                    }
                }
            }
        }
    }

    /// A tap of a phase, as the pass meets them; none where the kernel has no such tap.
    #[inline(always)]
    fn tap(&self, phase: Phase, (i, j): (usize, usize)) -> Option<usize> {
        let place = |i: usize, phase: usize| match self.order {
            Order::Forward => self.stride * i + phase,
            Order::Backward => self.stride * (TAPS - 1 - i) + phase,
        };
        let (y, x) = (place(i, phase.0), place(j, phase.1));
        (y < self.taps.0 && x < self.taps.1).then_some(y * self.taps.1 + x)
    }
}
