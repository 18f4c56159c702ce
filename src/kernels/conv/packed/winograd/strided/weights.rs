//! Weights, transformed for tiles at stride 2.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::columns::Columns;
use super::super::products::taps;
use super::phases::{Group, PLACES, Phase, ROW, chunk};
use super::transform;
use crate::kernels::conv::packed::weights::Order;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::vector::{Vector, Vectors, with_vectors};
use crate::kernels::gemm::micro::{KeptWords, as_f32_mut};

/// `(group, chunk, product, place, phase and channel, output channel)`: [`ROW`] phases and channels, of which those of the
/// chunk come first, the channels in whole vectors.
pub(super) fn pack(
    weight: &[f32],
    shape: &Shape,
    (ins, outs): (usize, usize),
    groups: &[Group],
    order: Order,
    vectors: Vectors,
) -> KeptWords {
    let columns = Columns::new(outs);
    let taps = (shape.kernel_height, shape.kernel_width);
    assert!(weight.len() == ins * outs * taps.0 * taps.1 && taps.0.max(taps.1) <= 4);
    let len = len(columns);
    let (products, chunks) = (columns.products, ins.div_ceil(chunk(order)));
    let count = groups.len() * chunks * products;
    let mut packed = KeptWords::new(count * len);
    let all = &mut packed.as_mut_slice()[..count * len];
    parallel::for_each_chunk(all, len, |index, places| {
        let first = index / products % chunks * chunk(order);
        let weights = ChunkWeights {
            weight,
            taps,
            sides: (ins, outs),
            order,
            group: &groups[index / products / chunks],
            channels: first..ins.min(first + chunk(order)),
            outs: index % products * columns.width()
                ..outs.min((index % products + 1) * columns.width()),
            width: columns.width(),
        };
        // SAFETY: the features of the vectors; weights of that length, and places of a whole chunk.
        with_vectors!(vectors, V => unsafe { weights.pack::<V>(as_f32_mut(places)) });
    });
    packed
}

/// Elements of a chunk's weights for a product.
pub(super) fn len(columns: Columns) -> usize {
    PLACES * place(columns.width())
}

/// Elements of a place. Were they a multiple of a page, the places of a tile would share few lines of the nearest cache.
pub(super) fn place(width: usize) -> usize {
    ROW * width + 16
}

/// The weights of a chunk of channels for a product.
struct ChunkWeights<'a> {
    weight: &'a [f32],
    taps: (usize, usize),
    /// All channels and output channels.
    sides: (usize, usize),
    order: Order,
    group: &'a Group,
    channels: Range<usize>,
    outs: Range<usize>,
    width: usize,
}

impl ChunkWeights<'_> {
    /// # Safety
    /// The features of `V`; weights of all channels and output channels; as many places as [`len`] says.
    #[inline(always)]
    unsafe fn pack<V: Vector>(&self, places: &mut [f32]) {
        let depth = self.channels.len().next_multiple_of(16);
        assert!(
            places.len() == PLACES * place(self.width) && self.group.phases.len() * depth <= ROW
        );
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
                    // SAFETY: the features.
                    let u = unsafe { transform::spread(self.of_phase(&taps, at)) };
                    for (number, u) in u.as_flattened().iter().enumerate() {
                        let Some(before) = self.group.before[number][phase] else { continue };
                        let row = before * depth + index;
                        let at = number * place(self.width) + row * self.width + 16 * first;
                        let at = &mut places[at..][..16];
                        // SAFETY: the features, and sixteen elements.
                        unsafe { u.store(at.as_mut_ptr()) };
                    }
                }
            }
        }
    }

    /// The taps of a phase, as the pass meets them; zeros for those that are not there.
    ///
    /// # Safety
    /// The features of `V`.
    #[inline(always)]
    unsafe fn of_phase<V: Vector>(&self, taps: &[V; 16], phase: Phase) -> [[V; 2]; 2] {
        // SAFETY: the caller's.
        let mut g = unsafe { [[V::zero(); 2]; 2] };
        for (m, g) in g.iter_mut().enumerate() {
            for (n, g) in g.iter_mut().enumerate() {
                let tap = |i: usize, phase: usize| match self.order {
                    Order::Forward => 2 * i + phase,
                    Order::Backward => 2 * (1 - i) + phase,
                };
                let (y, x) = (tap(m, phase.0), tap(n, phase.1));
                if y < self.taps.0 && x < self.taps.1 {
                    *g = taps[y * self.taps.1 + x];
                }
            }
        }
        g
    }
}
