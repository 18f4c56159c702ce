//! Winograd's convolution of NHWC images: a lane is a channel.
//!
//! The channels of an NHWC pixel are contiguous, so vectors are loaded and stored as they lie. Neither images nor
//! results are transposed.
//!
//! A thread transforms up to [`TILES`] tiles of all channels into scratch. For each of the 16 elements of a transformed
//! tile it multiplies them by the transformed weights: rows are tiles, columns output channels. Then it transforms the
//! sums back, adds the bias and rounds them into pixels.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::Range;

use candle_core::{Result, Tensor};

use super::super::rows::{Stored, with_stored};
use super::super::store::OutputImages;
use super::super::weights::Order;
use super::columns::Columns;
use super::products::{TILE_ELEMENTS, TILES, for_each_block, weights};
use super::tiles::{Tiles, load};
use super::transform;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, KeptWords, Rounded, as_f32_mut};

/// Channels of a transformed tile that lie together: the depth of a product.
const CHANNELS: usize = 64;

/// [`super::convolve`] of channels last, as [`super::convolve_nchw`].
pub(super) fn convolve_nhwc<O: Rounded>(
    x: &Tensor,
    weight: &[f32],
    bias: Option<&[f32]>,
    shape: &Shape,
    order: Order,
    isa: InstructionSet,
) -> Result<Option<Vec<O>>> {
    let columns = Columns::new(shape.c_out);
    let weight = pack(weight, shape, columns, order, isa.vectors());
    let pass = NhwcConv {
        ins: shape.c_in,
        outs: shape.c_out,
        columns,
        tiles: Tiles::new(shape),
        weight: weight.as_slice(),
        bias,
        vectors: isa.vectors(),
    };
    let len = shape.batch * shape.out_image();
    Ok(with_stored!(x, O, x => try_uninit_vec(len, |out: &mut [MaybeUninit<O>]| pass.run(&x, out))))
}

/// Transforms weights: `(product, place, channel, output channel)`.
fn pack(
    weight: &[f32],
    shape: &Shape,
    columns: Columns,
    order: Order,
    vectors: Vectors,
) -> KeptWords {
    let (ins, outs, width) = (shape.c_in, shape.c_out, columns.width());
    let product = TILE_ELEMENTS * weights_of_place(ins, columns);
    let mut packed = KeptWords::new(columns.products * product);
    let products = &mut packed.as_mut_slice()[..columns.products * product];
    parallel::for_each_chunk(products, product, |index, places| {
        let (places, own) = (as_f32_mut(places), index * width..outs.min((index + 1) * width));
        // SAFETY: the features of the vectors.
        with_vectors!(vectors, V => unsafe {
            for (vector, first) in own.clone().step_by(16).enumerate() {
                for channel in 0..ins {
                    let u = weights::<V>(weight, (ins, outs), order, channel, first);
                    for (place, u) in u.as_flattened().iter().enumerate() {
                        let at = place * weights_of_place(ins, columns) + channel * width + 16 * vector;
                        u.store(places[at..][..16].as_mut_ptr());
                    }
                }
            }
        });
    });
    packed
}

/// The weights of a place and a product, spaced as [`NhwcConv::place`].
fn weights_of_place(ins: usize, columns: Columns) -> usize {
    ins * columns.width() + 16
}

/// A convolution of images of `ins` channels to images of `outs`.
struct NhwcConv<'a> {
    ins: usize,
    outs: usize,
    columns: Columns,
    tiles: Tiles,
    weight: &'a [u32],
    bias: Option<&'a [f32]>,
    vectors: Vectors,
}

impl NhwcConv<'_> {
    /// Elements of a place of transformed tiles, `(channel / CHANNELS, tile, channel % CHANNELS)`. Were they a
    /// multiple of a page, the places of a tile would share few lines of the nearest cache.
    fn place(&self) -> usize {
        self.ins.div_ceil(CHANNELS) * TILES * CHANNELS + 16
    }

    /// Whether all results are finite: then all are written.
    fn run<S: Stored, O: Rounded>(&self, x: &[S], out: &mut [MaybeUninit<O>]) -> bool {
        let Tiles { batch, size, out_size, .. } = self.tiles;
        assert_eq!(x.len(), batch * self.ins * size.0 * size.1);
        assert_eq!(out.len(), batch * self.outs * out_size.0 * out_size.1);
        let Columns { products, .. } = self.columns;
        let weights = TILE_ELEMENTS * weights_of_place(self.ins, self.columns);
        assert!(products * weights <= self.weight.len());
        assert!(self.bias.is_none_or(|bias| bias.len() == self.outs));
        let out = OutputImages::of(out);
        let sizes = [TILE_ELEMENTS * self.place(), TILE_ELEMENTS * TILES * self.columns.width()];
        for_each_block(self.tiles.count(), TILES, sizes, |own, [tiles, sums]| {
            // SAFETY: the features of the vectors, the sizes as asserted, and scratch as asked for.
            with_vectors!(self.vectors, V => unsafe {
                self.transform::<V, S>(x, own.clone(), tiles);
                self.multiply::<V, O>(own.clone(), tiles.cast_const(), sums, &out)
            })
        })
    }

    /// Transforms at most [`TILES`] tiles.
    ///
    /// # Safety
    /// The features of `V`; `x` is all images, `tiles` scratch as [`Self::run`] makes it.
    #[inline(always)]
    unsafe fn transform<V: Vector, S: Stored>(&self, x: &[S], own: Range<usize>, tiles: *mut f32) {
        let place = self.place();
        for (row, tile) in own.enumerate() {
            let pixels = self.tiles.read(self.tiles.tile(tile));
            let below = [pixels[2][1], pixels[3][1]];
            let width = self.tiles.size.1;
            Tiles::prefetch_below(x.as_ptr(), below, width, (&(0..self.ins), self.ins));
            for first in (0..self.ins).step_by(16) {
                // SAFETY: the features; the pixels lie in the images, as asserted.
                let v = unsafe {
                    transform::pixels(load::<V, S, 4>(
                        x.as_ptr(),
                        pixels,
                        self.ins,
                        first..self.ins,
                    ))
                };
                let at = first / CHANNELS * TILES * CHANNELS + row * CHANNELS + first % CHANNELS;
                for (i, v) in v.as_flattened().iter().enumerate() {
                    // SAFETY: a place has `CHANNELS` elements per tile, of which 16 are left.
                    unsafe { v.store(tiles.wrapping_add(i * place + at)) };
                }
            }
        }
    }

    /// Multiplies transformed tiles by the weights, and writes the pixels. Whether they are finite.
    ///
    /// # Safety
    /// The features of `V`; `out` is all images, `tiles` and `sums` scratch as [`Self::run`] makes it.
    #[inline(always)]
    unsafe fn multiply<V: Vector, O: Rounded>(
        &self,
        own: Range<usize>,
        tiles: *const f32,
        sums: *mut f32,
        out: &OutputImages<O>,
    ) -> bool {
        let width = self.columns.width();
        let mut finite = true;
        for product in 0..self.columns.products {
            let first = product * width;
            let vectors = self.columns.vectors_of(product, self.outs);
            let rows = Columns::rows(vectors);
            for i in 0..TILE_ELEMENTS {
                let number = product * TILE_ELEMENTS + i;
                let of_place = number * weights_of_place(self.ins, self.columns);
                let weight = self.weight.as_ptr().cast::<f32>().wrapping_add(of_place);
                for row in (0..own.len()).step_by(rows) {
                    for channel in (0..self.ins).step_by(CHANNELS) {
                        let left =
                            tiles.wrapping_add(i * self.place() + channel * TILES + row * CHANNELS);
                        let (left, right) =
                            ((left, 1), (weight.wrapping_add(channel * width), width));
                        let depth = CHANNELS.min(self.ins - channel);
                        let sums = (sums.wrapping_add((i * TILES + row) * width), width);
                        // SAFETY: there are `TILES` tiles and sums, whole steps, and weights of all channels.
                        unsafe {
                            let add = channel > 0;
                            Columns::multiply::<V, CHANNELS>(
                                vectors, left, right, depth, sums, add,
                            );
                        }
                    }
                }
            }
            for (row, tile) in own.clone().enumerate() {
                let pixels = self.tiles.written(self.tiles.tile(tile));
                for vector in 0..vectors {
                    let channel = first + 16 * vector;
                    let mask = first_lanes(self.outs.saturating_sub(channel));
                    // SAFETY: the features, and the channels of the mask.
                    let bias = unsafe {
                        match self.bias {
                            Some(bias) => V::load_masked(bias.as_ptr().wrapping_add(channel), mask),
                            None => V::zero(),
                        }
                    };
                    let mut m = [[bias; 4]; 4];
                    for (i, m) in m.as_flattened_mut().iter_mut().enumerate() {
                        let at = sums.wrapping_add((i * TILES + row) * width + 16 * vector);
                        // SAFETY: these have been written.
                        *m = unsafe { V::load(at) };
                    }
                    // SAFETY: the features.
                    let y = unsafe { transform::sums(m) };
                    for (y, pixel) in y.as_flattened().iter().zip(pixels.as_flattened()) {
                        let Some(pixel) = pixel else { continue };
                        let at = out.at.wrapping_add(pixel * self.outs + channel);
                        // SAFETY: the pixel is in the images, and nobody else writes this tile.
                        unsafe {
                            let y = y.add(bias);
                            finite &= y.is_finite(mask);
                            O::store(at, mask, y);
                        }
                    }
                }
            }
        }
        finite
    }
}
