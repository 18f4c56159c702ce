//! wgrad, the gradient with respect to the weight.
//!
//! Images and gradients are transformed tile by tile. Each place of each phase gives one product, `channels × tiles` by
//! `tiles × output channels`, summed over all tiles of a run of images. Only these sums are transformed back, once per run, so
//! that the inverse transform costs little.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::products::add_product;
use super::super::transform::{Pixels, SumsGradient, WeightsGradient, scale, square};
use super::grid::{Block, Grid, Sides};
use super::images::Images;
use super::phases::{Phase, has_products, phases};
use super::sizes::{LARGE, SMALL, STRIDED, Sizes};
use crate::kernels::conv::packed::kernels;
use crate::kernels::conv::packed::rows::Stored;
use crate::kernels::conv::packed::weights::Order;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::with_words;

/// The sums for some output channels.
pub(in super::super::super) struct Wgrad<'a> {
    pub(in super::super::super) shape: &'a Shape,
    pub(in super::super::super) channels: Range<usize>,
    pub(in super::super::super) vectors: Vectors,
    /// Whether tiles have four by four pixels of the gradient at stride 1.
    pub(in super::super::super) large: bool,
}

/// The sizes of blocks, and channels whose products are summed at a time: those for 64 output channels are half of a
/// second-level cache of 1 MiB at stride 1, of large tiles at most nine sixteenths, and a third at stride 2.
fn sizes(shape: &Shape, large: bool) -> (Sizes, usize) {
    match (shape.geometry.stride, large) {
        (1, true) => (LARGE, 64),
        // With more tiles, channels and products would fill that cache.
        (1, false) => (Sizes { tiles: 32, ..SMALL }, 128),
        _ => (STRIDED, 32),
    }
}

impl Wgrad<'_> {
    /// Images of a run, whose sums are kept apart: enough tiles that transforming the sums is little beside.
    pub(in super::super::super) fn run_images(shape: &Shape, large: bool) -> usize {
        let tiles = Grid::new(shape, Order::Forward, &sizes(shape, large).0).tiles();
        let runs = (tiles / 256).clamp(2, kernels::runs(shape.c_out * shape.taps()));
        shape.batch.div_ceil(runs).max(1)
    }

    /// The sum over some images, `(kernel row, kernel column, channel, output channel)`, written.
    pub(in super::super::super) fn run<S: Stored, G: Stored>(
        &self,
        x: &[S],
        grad: &[G],
        images: Range<usize>,
        sums: &mut [f32],
    ) {
        let Self { shape, channels, vectors, large } = self;
        let (vectors, operands) = (*vectors, (x, grad));
        match (shape.geometry.stride, large) {
            (1, true) => {
                // Without a constant, the compiler would make a kernel for F32.
                assert!(const { size_of::<S>() == 2 }, "large tiles of F32");
                run::<S, G, 6, 4, 3>(shape, channels, vectors, operands, &images, sums);
            }
            (1, false) => run::<S, G, 4, 2, 3>(shape, channels, vectors, operands, &images, sums),
            _ => run::<S, G, 3, 2, 2>(shape, channels, vectors, operands, &images, sums),
        }
    }
}

/// [`Wgrad::run`] by tiles of `READ` by `READ` pixels, and `MADE` by `MADE` of the gradient.
fn run<S: Stored, G: Stored, const READ: usize, const MADE: usize, const TAPS: usize>(
    shape: &Shape,
    channels: &Range<usize>,
    vectors: Vectors,
    (x, grad): (&[S], &[G]),
    images: &Range<usize>,
    sums: &mut [f32],
) {
    let shape = &Shape { batch: images.len(), ..*shape };
    assert!(channels.end <= shape.c_out);
    let (sizes, at_a_time) = sizes(shape, MADE == 4);
    assert_eq!(sizes.made, MADE);
    let most = sizes.tiles;
    let ins = shape.c_in.min(at_a_time).next_multiple_of(16);
    let outs = channels.len().next_multiple_of(16);
    // Were places a multiple of a page, those of a tile would share few lines of the nearest cache.
    let (left_place, right_place) = (ins * most + 16, outs * most + 16);
    let phases = phases(shape.geometry.stride);
    let places = phases.len() * READ * READ;
    let (format, grid) = (shape.geometry.format, Grid::new(shape, Order::Forward, &sizes));
    let of_x = Images {
        format,
        channels: shape.c_in,
        grid,
        sides: Sides::read(shape, Order::Forward, MADE),
    };
    let sides = Sides::written(shape, Order::Forward, MADE);
    let of_grad = Images { format, channels: shape.c_out, grid, sides };
    let sizes = [
        of_x.room(ins).max(of_grad.room(outs)),
        places * left_place,
        READ * READ * right_place,
        places * ins * outs,
    ];
    with_words(sizes, |[pixels, left, right, products]| {
        for first in (0..shape.c_in).step_by(at_a_time) {
            products.fill(0);
            // Its pointers are taken after the fill, which invalidates older ones.
            let work = Work::<S, G, READ, MADE, TAPS> {
                shape,
                phases: &phases,
                of_x,
                of_grad,
                inputs: first..shape.c_in.min(first + at_a_time),
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
struct Work<'a, S, G, const READ: usize, const MADE: usize, const TAPS: usize> {
    shape: &'a Shape,
    phases: &'a [Phase],
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
/// Of all methods: the features of `V`; images and scratch as [`run`] makes it.
impl<S: Stored, G: Stored, const READ: usize, const MADE: usize, const TAPS: usize>
    Work<'_, S, G, READ, MADE, TAPS>
{
    /// Of a transformed tile.
    const PLACES: usize = READ * READ;

    #[inline(always)]
    unsafe fn run<V: Vector>(&self, sums: &mut [f32]) {
        let grid = self.of_x.grid;
        for index in 0..grid.blocks() {
            let block = grid.block(index);
            let next = grid.block((index + 1).min(grid.blocks() - 1));
            // SAFETY: the caller's.
            unsafe {
                self.images::<V>(&block, &next);
                self.gradients::<V>(&block, &next);
                self.add::<V>(block.tiles());
            }
        }
        // SAFETY: the caller's.
        unsafe { self.back::<V>(sums) };
    }

    /// The phases and places that have products.
    fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        let places = |phase| (0..Self::PLACES).map(move |place| (phase, place));
        let all = (0..self.phases.len()).flat_map(places);
        all.filter(|&(phase, place)| {
            let at = (place / READ, place % READ);
            has_products(self.shape, self.phases[phase], at, Order::Forward)
        })
    }

    /// Transforms tiles of the images.
    #[inline(always)]
    unsafe fn images<V: Vector>(&self, block: &Block, next: &Block) {
        let Images { grid, sides, .. } = self.of_x;
        let (pitch, apart) = (block.pitch(sides), sides.apart());
        let depth = self.inputs.len().next_multiple_of(16);
        // SAFETY: the caller's.
        unsafe {
            self.of_x.gather::<V, S>(self.x.as_ptr(), block, next, &self.inputs, self.pixels)
        };
        for (row, start) in grid.starts(block, sides).enumerate() {
            for (phase, &at) in self.phases.iter().enumerate() {
                let start = (start + sides.first(at, pitch)) * depth;
                for channel in (0..depth).step_by(16) {
                    let start = self.pixels.wrapping_add(start + channel);
                    let to = phase * Self::PLACES * self.left_place + row * self.ins + channel;
                    let to = self.left.wrapping_add(to);
                    // SAFETY: the features; the pixels are the block's, and a place has `ins` elements per tile, whole
                    // vectors.
                    unsafe {
                        square::<Pixels, V, READ, READ>(
                            #[inline(always)]
                            |i, j| V::load(start.wrapping_add((i * pitch + j) * apart * depth)),
                            #[inline(always)]
                            |i, j, v| v.store(to.wrapping_add((i * READ + j) * self.left_place)),
                        );
                    }
                }
            }
        }
    }

    /// Transforms tiles of the gradient.
    #[inline(always)]
    unsafe fn gradients<V: Vector>(&self, block: &Block, next: &Block) {
        let Images { grid, sides, .. } = self.of_grad;
        let (pitch, depth) = (block.pitch(sides), self.outs);
        // SAFETY: the caller's.
        unsafe {
            self.of_grad.gather::<V, G>(
                self.grad.as_ptr(),
                block,
                next,
                &self.channels,
                self.pixels,
            );
        }
        for (row, start) in grid.starts(block, sides).enumerate() {
            for channel in (0..depth).step_by(16) {
                let start = self.pixels.wrapping_add(start * depth + channel);
                let to = self.right.wrapping_add(row * self.outs + channel);
                // SAFETY: the features; the pixels are the block's, and a place has `outs` elements per tile, whole vectors.
                unsafe {
                    square::<SumsGradient, V, MADE, READ>(
                        #[inline(always)]
                        |i, j| V::load(start.wrapping_add((i * pitch + j) * depth)),
                        #[inline(always)]
                        |i, j, m| m.store(to.wrapping_add((i * READ + j) * self.right_place)),
                    );
                }
            }
        }
    }

    /// Adds the products over `depth` tiles.
    #[inline(always)]
    unsafe fn add<V: Vector>(&self, depth: usize) {
        for (phase, place) in self.places() {
            let number = phase * Self::PLACES + place;
            let left = self.left.wrapping_add(number * self.left_place).cast_const();
            let right = self.right.wrapping_add(place * self.right_place).cast_const();
            let products = self.products.wrapping_add(number * self.ins * self.outs);
            let sizes = (self.inputs.len(), self.outs);
            // SAFETY: these are the place's, of so many channels and output channels.
            unsafe { add_product::<V>((left, self.ins), right, sizes, depth, products) };
        }
    }

    /// Transforms the sums of products back.
    #[inline(always)]
    unsafe fn back<V: Vector>(&self, sums: &mut [f32]) {
        let Shape { c_in: ins, kernel_height: height, kernel_width: width, .. } = *self.shape;
        let outs = self.channels.len();
        assert_eq!(sums.len(), height * width * ins * outs);
        let stride = self.shape.geometry.stride;
        for (phase, &(down, across)) in self.phases.iter().enumerate() {
            for (index, channel) in self.inputs.clone().enumerate() {
                for out in (0..outs).step_by(16) {
                    let mask = first_lanes(outs - out);
                    let from = (phase * Self::PLACES * self.ins + index) * self.outs + out;
                    let from = self.products.wrapping_add(from);
                    // SAFETY: the features; a place has `outs` elements per channel, and the output channels of the mask are
                    // in `sums`.
                    unsafe {
                        square::<WeightsGradient, V, READ, TAPS>(
                            #[inline(always)]
                            |i, j| {
                                let place = i * READ + j;
                                V::load(from.wrapping_add(place * self.ins * self.outs))
                            },
                            #[inline(always)]
                            |i, j, g| {
                                let (y, x) = (stride * i + down, stride * j + across);
                                if y < height && x < width {
                                    let at = ((y * width + x) * ins + channel) * outs + out;
                                    let g = g.mul(V::splat(scale(READ)));
                                    g.store_masked(sums.as_mut_ptr().add(at), mask);
                                }
                            },
                        );
                    }
                }
            }
        }
    }
}
