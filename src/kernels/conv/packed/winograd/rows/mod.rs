//! Winograd's F(2×2, 3×3) of NCHW images of few channels: a tile in each lane.
//!
//! A thread transforms three vectors of tiles of all channels, into memory that stays in its cache. It multiplies them by the
//! transformed weights, one product for each place of a transformed tile. Then it transforms the sums back.
#![allow(unsafe_code)]

mod grid;
mod pixels;

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{Result, Tensor};

use super::products::{ROWS, VECTORS, for_each_block, taps};
use super::suits::pays;
use super::transform::{Pixels, Sums, Weights, transformed};
use crate::kernels::conv::packed::rows::{Stored, with_stored};
use crate::kernels::conv::packed::store::OutputImages;
use crate::kernels::conv::packed::weights::{InF32, Order, widened};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::tensor;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, KeptWords, Rounded, as_f32_mut};
use crate::kernels::tensors::format::Format;
use grid::{TileGrid, VectorTiles};

/// Tiles of a product.
const TILES: usize = 16 * VECTORS;
/// Products for a tile, channel and output channel.
const TILE_ELEMENTS: usize = 16;

/// Whether these tiles are faster than row panels and [blocks](super::blocks), for a convolution of the kind taken: with fewer than
/// 8 channels on a side, or than 32 where rows fill vectors. Most lanes of channels would be empty there.
pub(in crate::kernels::conv) fn suits(shape: &Shape) -> bool {
    let (grid, channels) = (TileGrid::of(shape), shape.c_in.min(shape.c_out));
    let first = shape.geometry.format == Format::ChannelsFirst;
    first
        && channels < if grid.is_filled() { 32 } else { 8 }
        && pays(16 * grid.vectors(), 1.2, shape)
}

/// See [`super::convolve`]; `shape` is that of the convolution, and weights lie as `order` says.
pub(super) fn convolve<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    order: Order,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let (weight, bias) = (InF32::of(weight)?, bias.map(widened).transpose()?);
    let weight = pack(&weight, shape, order, isa.vectors());
    let grid = TileGrid::of(shape);
    let pass = WinogradConv {
        ins: shape.c_in,
        outs: shape.c_out,
        grid,
        weight: weight.as_slice(),
        bias: bias.as_deref(),
        vectors: isa.vectors(),
    };
    let len = shape.batch * shape.out_image();
    let data = with_stored!(x, O, x => {
        try_uninit_vec(len, |out: &mut [MaybeUninit<O>]| pass.run(&x, out))
    });
    Ok(data.map(|data| tensor(data, &shape.out_dims())))
}

/// Transforms weights: `(block of output channels, place, channel, output channel)`.
fn pack(weight: &[f32], shape: &Shape, order: Order, vectors: Vectors) -> KeptWords {
    let (ins, outs) = (shape.c_in, shape.c_out);
    let (blocks, block) = (outs.div_ceil(ROWS), TILE_ELEMENTS * weights_of_place(ins));
    let mut packed = KeptWords::new(blocks * block);
    // A vector has the output channels of two blocks.
    parallel::for_each_chunk(
        &mut packed.as_mut_slice()[..blocks * block],
        2 * block,
        |pair, own| {
            let (both, own) = (own.len() > block, as_f32_mut(own));
            // SAFETY: the features of the vectors; the masks' lanes are those of the blocks that there are.
            with_vectors!(vectors, V => unsafe {
                for channel in 0..ins {
                    let u = weights::<V>(weight, (ins, outs), order, channel, pair * 2 * ROWS);
                    for (place, u) in u.as_flattened().iter().enumerate() {
                        let at = own[place * weights_of_place(ins) + channel * ROWS..].as_mut_ptr();
                        u.store_masked(at, first_lanes(ROWS));
                        if both {
                            let at = at.wrapping_add(block).wrapping_sub(ROWS);
                            u.store_masked(at, !first_lanes(ROWS));
                        }
                    }
                }
            });
        },
    );
    packed
}

/// The transformed weights of a channel and sixteen output channels.
///
/// # Safety
/// The features of `V`.
#[inline(always)]
unsafe fn weights<V: Vector>(
    weight: &[f32],
    sides: (usize, usize),
    order: Order,
    channel: usize,
    first: usize,
) -> [[V; 4]; 4] {
    // SAFETY: the caller's.
    unsafe {
        let taps = taps::<V>(weight, 9, sides, order, channel, first);
        let mut g = [[V::zero(); 3]; 3];
        for (tap, g) in g.as_flattened_mut().iter_mut().enumerate() {
            // The gradient's are turned by half a turn.
            *g = taps[if order == Order::Forward { tap } else { 8 - tap }];
        }
        transformed::<Weights, V, 3, 4>(g)
    }
}

/// The weights of a place and a block of output channels, spaced as [`WinogradConv::place`].
fn weights_of_place(ins: usize) -> usize {
    ins * ROWS + 16
}

/// A convolution of images of `ins` channels to images of `outs`.
struct WinogradConv<'a> {
    ins: usize,
    outs: usize,
    grid: TileGrid,
    weight: &'a [u32],
    bias: Option<&'a [f32]>,
    vectors: Vectors,
}

impl WinogradConv<'_> {
    /// Elements of a place of transformed tiles. Were they a multiple of a page, the places of a
    /// tile would share few lines of the nearest cache.
    fn place(&self) -> usize {
        self.ins * TILES + 16
    }

    /// Whether all results are finite: then all are written.
    fn run<S: Stored, O: Rounded>(&self, x: &[S], out: &mut [MaybeUninit<O>]) -> bool {
        let (batch, size, out_size) = (self.grid.batch, self.grid.size, self.grid.out_size);
        assert_eq!(x.len(), batch * self.ins * size.0 * size.1);
        assert_eq!(out.len(), batch * self.outs * out_size.0 * out_size.1);
        let weights = TILE_ELEMENTS * weights_of_place(self.ins);
        assert!(self.outs.div_ceil(ROWS) * weights <= self.weight.len());
        let out = OutputImages::of(out);
        let sizes = [TILE_ELEMENTS * self.place(), TILE_ELEMENTS * ROWS * TILES];
        for_each_block(self.grid.vectors(), VECTORS, sizes, |vectors, [tiles, sums]| {
            // SAFETY: the features of the vectors, the sizes as asserted, and scratch as asked for.
            with_vectors!(self.vectors, V => unsafe {
                self.vectors::<V, S, O>(x, &vectors, tiles, sums, &out)
            })
        })
    }

    /// Convolves at most three vectors of tiles. Whether the results are finite.
    ///
    /// # Safety
    /// The features of `V`; `x` and `out` are all images, `tiles` and `sums` scratch as
    /// [`Self::run`] makes it.
    #[inline(always)]
    unsafe fn vectors<V: Vector, S: Stored, O: Rounded>(
        &self,
        x: &[S],
        vectors: &Range<usize>,
        tiles: *mut f32,
        sums: *mut f32,
        out: &OutputImages<O>,
    ) -> bool {
        let (size, out_size) = (self.grid.size, self.grid.out_size);
        let (pixels, out_pixels) = (size.0 * size.1, out_size.0 * out_size.1);
        let count = vectors.len();
        let mut places = [VectorTiles::default(); VECTORS];
        for (place, vector) in places.iter_mut().zip(vectors.clone()) {
            *place = self.grid.place(vector);
        }
        let places = &places[..count];
        for channel in 0..self.ins {
            for (n, &place) in places.iter().enumerate() {
                let from = (place.image * self.ins + channel) * pixels;
                let x = x.as_ptr().wrapping_add(from);
                self.grid.prefetch_ahead(place, x, self.ins * pixels);
                // SAFETY: the images of a place are in the batch.
                let d = unsafe { self.grid.read::<V, S>(place, x, self.ins * pixels) };
                // SAFETY: the features.
                let v = unsafe { transformed::<Pixels, V, 4, 4>(d) };
                for (i, v) in v.as_flattened().iter().enumerate() {
                    let at = tiles.wrapping_add(i * self.place() + (channel * count + n) * 16);
                    // SAFETY: a place has `TILES` elements per channel.
                    unsafe { v.store(at) };
                }
            }
        }
        let mut finite = true;
        for block in 0..self.outs.div_ceil(ROWS) {
            for i in 0..TILE_ELEMENTS {
                let weight = self.weight.as_ptr().cast::<f32>();
                let first = (block * TILE_ELEMENTS + i) * weights_of_place(self.ins);
                let left = (weight.wrapping_add(first), ROWS);
                let right = (tiles.wrapping_add(i * self.place()).cast_const(), count * 16);
                let sums = (sums.wrapping_add(i * ROWS * count * 16), count * 16);
                // SAFETY: a block has `ROWS` weights a place and channel, and there are `count`
                // vectors of tiles and sums.
                unsafe {
                    match count {
                        1 => V::multiply::<ROWS, 1, 1, false>(left, right, self.ins, sums),
                        2 => V::multiply::<ROWS, 2, 1, false>(left, right, self.ins, sums),
                        _ => V::multiply::<ROWS, 3, 1, false>(left, right, self.ins, sums),
                    }
                }
            }
            for row in 0..ROWS.min(self.outs - block * ROWS) {
                let channel = block * ROWS + row;
                let bias = self.bias.map_or(0.0, |bias| bias[channel]);
                // SAFETY: the features.
                let bias = unsafe { V::splat(bias) };
                for (n, &place) in places.iter().enumerate() {
                    let mut m = [[bias; 4]; 4];
                    for (i, m) in m.as_flattened_mut().iter_mut().enumerate() {
                        let at = sums.wrapping_add(((i * ROWS + row) * count + n) * 16);
                        // SAFETY: these have been written.
                        *m = unsafe { V::load(at) };
                    }
                    // SAFETY: the features.
                    let mut y = unsafe { transformed::<Sums, V, 4, 2>(m) };
                    for y in y.as_flattened_mut() {
                        // SAFETY: the features.
                        *y = unsafe { y.add(bias) };
                    }
                    let to = (place.image * self.outs + channel) * out_pixels;
                    let out = out.at.wrapping_add(to);
                    // SAFETY: the images of a place are in the batch, and nobody else writes these tiles.
                    finite &= unsafe { self.grid.write(place, y, out, self.outs * out_pixels) };
                }
            }
        }
        finite
    }
}
