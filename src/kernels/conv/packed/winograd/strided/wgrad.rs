//! wgrad at stride 2, as [`super::super::wgrad`] has it of NHWC images: each place of each phase gives one product,
//! `channels × tiles` by `tiles × output channels`.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::products::add_product;
use super::grid::{Block, Grid, Sides, TILES};
use super::images::{Images, tile};
use super::phases::{PHASES, PLACES, has_products};
use super::transform;
use crate::kernels::conv::packed::kernels;
use crate::kernels::conv::packed::rows::Stored;
use crate::kernels::conv::packed::weights::Order;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::with_words;

/// Channels whose products are summed at a time: those for 64 output channels are a third of a second-level cache of 1 MiB.
const CHANNELS: usize = 32;

/// Images of a run, whose sums are kept apart: enough tiles that transforming the sums is little beside.
pub(in super::super) fn run_images(shape: &Shape) -> usize {
    let tiles = Grid::new(shape, Order::Forward).tiles();
    let runs = (tiles / 256).clamp(2, kernels::runs(shape.c_out * shape.taps()));
    shape.batch.div_ceil(runs)
}

/// The sum over some images for some output channels, `(kernel row, kernel column, channel, output channel)`, written.
pub(in super::super) fn wgrad<S: Stored, G: Stored>(
    shape: &Shape,
    channels: &Range<usize>,
    vectors: Vectors,
    (x, grad): (&[S], &[G]),
    images: &Range<usize>,
    sums: &mut [f32],
) {
    let shape = &Shape { batch: images.len(), ..*shape };
    assert!(channels.end <= shape.c_out);
    let ins = shape.c_in.min(CHANNELS).next_multiple_of(16);
    let outs = channels.len().next_multiple_of(16);
    // Were places a multiple of a page, those of a tile would share few lines of the nearest cache.
    let (left_place, right_place) = (ins * TILES + 16, outs * TILES + 16);
    let places = PHASES.len() * PLACES;
    let (format, grid) = (shape.geometry.format, Grid::new(shape, Order::Forward));
    let of_x =
        Images { format, channels: shape.c_in, grid, sides: Sides::read(shape, Order::Forward) };
    let sides = Sides::written(shape, Order::Forward);
    let of_grad = Images { format, channels: shape.c_out, grid, sides };
    let sizes = [
        of_x.room(ins).max(of_grad.room(outs)),
        places * left_place,
        PLACES * right_place,
        places * ins * outs,
    ];
    with_words(sizes, |[pixels, left, right, products]| {
        for first in (0..shape.c_in).step_by(CHANNELS) {
            products.fill(0);
            // Its pointers are taken after the fill, which invalidates older ones.
            let work = Work {
                shape,
                of_x,
                of_grad,
                inputs: first..shape.c_in.min(first + CHANNELS),
                channels: channels.clone(),
                x: &x[images.start * shape.image()..images.end * shape.image()],
                grad: &grad[images.start * shape.out_image()..images.end * shape.out_image()],
                ins,
                outs,
                pixels: pixels.as_mut_ptr().cast(),
                left: left.as_mut_ptr().cast(),
                right: right.as_mut_ptr().cast(),
                left_place,
                right_place,
                products: products.as_mut_ptr().cast(),
            };
            // SAFETY: the features of the vectors; whole images, and scratch of these sizes.
            with_vectors!(vectors, V => unsafe { work.run::<V>(sums) });
        }
    });
}

/// What a run works on.
struct Work<'a, S, G> {
    shape: &'a Shape,
    of_x: Images,
    of_grad: Images,
    /// Channels, and output channels.
    inputs: Range<usize>,
    channels: Range<usize>,
    x: &'a [S],
    grad: &'a [G],
    /// Those that there is room for, in whole vectors.
    ins: usize,
    outs: usize,
    /// `(row, column, channel)` of a block.
    pixels: *mut f32,
    /// `(phase, place, tile, channel)`. Padding channels are zero.
    left: *mut f32,
    /// `(place, tile, output channel)`
    right: *mut f32,
    /// Elements from a place to the next.
    left_place: usize,
    right_place: usize,
    /// `(phase, place, channel, output channel)`
    products: *mut f32,
}

/// # Safety
/// Of all methods: the features of `V`; images and scratch as [`wgrad`] has them.
impl<S: Stored, G: Stored> Work<'_, S, G> {
    #[inline(always)]
    unsafe fn run<V: Vector>(&self, sums: &mut [f32]) {
        let grid = self.of_x.grid;
        for block in (0..grid.blocks()).map(|index| grid.block(index)) {
            // SAFETY: the caller's.
            unsafe {
                self.images::<V>(&block);
                self.gradients::<V>(&block);
                self.add::<V>(block.tiles());
            }
        }
        // SAFETY: the caller's.
        unsafe { self.back::<V>(sums) };
    }

    /// The phases and places that have products.
    fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        let places = |phase| (0..PLACES).map(move |place| (phase, place));
        let all = (0..PHASES.len()).flat_map(places);
        all.filter(|&(phase, place)| has_products(self.shape, PHASES[phase], place, Order::Forward))
    }

    /// Transforms tiles of the images.
    #[inline(always)]
    unsafe fn images<V: Vector>(&self, block: &Block) {
        let Images { grid, sides, .. } = self.of_x;
        let (pitch, apart) = (block.pitch(sides), sides.apart());
        let depth = self.inputs.len().next_multiple_of(16);
        // SAFETY: the caller's.
        unsafe { self.of_x.gather::<V, S>(self.x.as_ptr(), block, &self.inputs, self.pixels) };
        for (row, start) in grid.starts(block, sides).enumerate() {
            for (phase, &at) in PHASES.iter().enumerate() {
                let start = (start + sides.first(at, pitch)) * depth;
                for channel in (0..depth).step_by(16) {
                    let start = self.pixels.wrapping_add(start + channel);
                    // SAFETY: the features; the pixels are the block's.
                    let v =
                        unsafe { transform::pixels(tile::<V, 3>(start, (pitch, apart), depth)) };
                    let at = row * self.ins + channel;
                    for (place, v) in v.as_flattened().iter().enumerate() {
                        let at = (phase * PLACES + place) * self.left_place + at;
                        // SAFETY: a place has `ins` elements per tile, whole vectors.
                        unsafe { v.store(self.left.wrapping_add(at)) };
                    }
                }
            }
        }
    }

    /// Transforms tiles of the gradient.
    #[inline(always)]
    unsafe fn gradients<V: Vector>(&self, block: &Block) {
        let Images { grid, sides, .. } = self.of_grad;
        let (pitch, depth) = (block.pitch(sides), self.outs);
        // SAFETY: the caller's.
        unsafe {
            self.of_grad.gather::<V, G>(self.grad.as_ptr(), block, &self.channels, self.pixels);
        }
        for (row, start) in grid.starts(block, sides).enumerate() {
            for channel in (0..depth).step_by(16) {
                let start = self.pixels.wrapping_add(start * depth + channel);
                // SAFETY: the features; the pixels are the block's.
                let m = unsafe { transform::spread(tile::<V, 2>(start, (pitch, 1), depth)) };
                for (place, m) in m.as_flattened().iter().enumerate() {
                    let at = place * self.right_place + row * self.outs + channel;
                    // SAFETY: a place has `outs` elements per tile, whole vectors.
                    unsafe { m.store(self.right.wrapping_add(at)) };
                }
            }
        }
    }

    /// Adds the products over `depth` tiles.
    #[inline(always)]
    unsafe fn add<V: Vector>(&self, depth: usize) {
        for (phase, place) in self.places() {
            let number = phase * PLACES + place;
            let left = self.left.wrapping_add(number * self.left_place).cast_const();
            let right = self.right.wrapping_add(place * self.right_place).cast_const();
            let products = self.products.wrapping_add(number * self.ins * self.outs);
            let sizes = (self.inputs.len(), self.outs);
            // SAFETY: these are the place's, of so many channels and output channels.
            unsafe { add_product::<V, 1>((left, self.ins), right, sizes, depth, products) };
        }
    }

    /// Transforms the sums of products back.
    #[inline(always)]
    unsafe fn back<V: Vector>(&self, sums: &mut [f32]) {
        let Shape { c_in: ins, kernel_height: height, kernel_width: width, .. } = *self.shape;
        let outs = self.channels.len();
        assert_eq!(sums.len(), height * width * ins * outs);
        for (phase, (down, across)) in PHASES.into_iter().enumerate() {
            for (index, channel) in self.inputs.clone().enumerate() {
                for out in (0..outs).step_by(16) {
                    // SAFETY: the features.
                    let mut u = unsafe { [[V::zero(); 3]; 3] };
                    for (place, u) in u.as_flattened_mut().iter_mut().enumerate() {
                        let number = phase * PLACES + place;
                        let at = (number * self.ins + index) * self.outs + out;
                        // SAFETY: a place has `outs` elements per channel.
                        *u = unsafe { V::load(self.products.wrapping_add(at)) };
                    }
                    let mask = first_lanes(outs - out);
                    // SAFETY: the features.
                    let g = unsafe { transform::fold(u) };
                    for (m, g) in g.iter().enumerate() {
                        for (n, g) in g.iter().enumerate() {
                            let (y, x) = (2 * m + down, 2 * n + across);
                            if y < height && x < width {
                                let at = ((y * width + x) * ins + channel) * outs + out;
                                // SAFETY: the output channels of the mask are in `sums`.
                                unsafe { g.store_masked(sums.as_mut_ptr().add(at), mask) };
                            }
                        }
                    }
                }
            }
        }
    }
}
