//! wgrad, the gradient with respect to the weight, in Winograd's transform.
//!
//! Images and gradients are transformed tile by tile. Each of the 16 elements of a tile gives one product, `channels ×
//! tiles` by `tiles × output channels`, summed over all tiles of a run of images. Only these sums are transformed back,
//! once per run, so the inverse transform costs little.
//!
//! Tiles are taken [`TILES`] at a time and channels [`CHANNELS`] at a time, so that the sums stay in a second-level
//! cache.
//!
//! In NCHW a lane is a tile, and transposes of the gradient make lanes of output channels, as the product needs them.
//! In NHWC lanes are channels already, and nothing is transposed.
#![allow(unsafe_code)]

use std::ops::Range;

use super::super::rows::Stored;
use super::blocks;
use super::grid::{TileGrid, VectorTiles};
use super::products::{TILE_ELEMENTS, TILES, VECTORS, add_product};
use super::suits::{enough_channels, is_plain, pays, vectors};
use super::tiles::{Tiles, load};
use super::transform;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::with_words;
use crate::kernels::tensors::format::Format;

/// Whether tiles are faster for the gradient at stride 1. The sums of each run are transformed, as long as a few
/// vectors.
pub(in crate::kernels::conv) fn suits_wgrad(shape: &Shape) -> bool {
    if !is_plain(shape) || !enough_channels(shape) {
        return false;
    }
    let run = Wgrad::run_images(shape, false);
    let runs = shape.batch.div_ceil(run);
    pays(runs * (vectors(&Shape { batch: run, ..*shape }) + 2), 0.78, shape)
}

/// Channels whose products are summed at a time: those for 64 output channels are half of a
/// second-level cache of 1 MiB.
const CHANNELS: usize = 128;

/// The sums for some output channels.
pub(in super::super) struct Wgrad<'a> {
    pub(in super::super) shape: &'a Shape,
    pub(in super::super) channels: Range<usize>,
    pub(in super::super) vectors: Vectors,
    /// Whether tiles have four by four pixels of the gradient at stride 1.
    pub(in super::super) large: bool,
}

impl Wgrad<'_> {
    /// Images of a run, whose sums are kept apart: whole vectors, and enough of them that
    /// transforming the sums is little beside.
    pub(in super::super) fn run_images(shape: &Shape, large: bool) -> usize {
        if large || shape.geometry.stride == 2 {
            return blocks::run_images(shape);
        }
        let together = match shape.geometry.format {
            Format::ChannelsFirst => TileGrid::of(shape).together,
            Format::ChannelsLast => 1,
        };
        let most = super::super::kernels::runs(shape.c_out * shape.taps());
        let runs = (vectors(shape) / 24).clamp(2, most);
        shape.batch.div_ceil(runs).next_multiple_of(together).max(1)
    }

    /// The sum over some images, `(kernel row, kernel column, channel, output channel)`.
    pub(in super::super) fn run<S: Stored, G: Stored>(
        &self,
        x: &[S],
        grad: &[G],
        images: Range<usize>,
        sums: &mut [f32],
    ) {
        let shape = self.shape;
        if self.large || shape.geometry.stride == 2 {
            let Self { vectors, channels, .. } = self;
            return blocks::wgrad(shape, channels, *vectors, (x, grad), &images, sums);
        }
        assert!(self.channels.end <= shape.c_out);
        let of_x = TileGrid { batch: images.len(), ..TileGrid::of(shape) };
        let of_grad = TileGrid { size: of_x.out_size, padding: (0, 0), ..of_x };
        let tiles = Tiles::new(&Shape { batch: images.len(), ..*shape });
        let ins = shape.c_in.min(CHANNELS).next_multiple_of(16);
        let outs = self.channels.len().next_multiple_of(16);
        // Were places a multiple of a page, those of a tile would share few lines of the nearest
        // cache.
        let (left_place, right_place) = (ins * TILES + 16, outs * TILES + 16);
        let sizes =
            [TILE_ELEMENTS * left_place, TILE_ELEMENTS * right_place, TILE_ELEMENTS * ins * outs];
        with_words(sizes, |[left, right, products]| {
            for first in (0..shape.c_in).step_by(CHANNELS) {
                products.fill(0);
                // Its pointers are taken after the fill, which invalidates older ones.
                let work = Work {
                    shape,
                    inputs: first..shape.c_in.min(first + CHANNELS),
                    channels: self.channels.clone(),
                    x: &x[images.start * shape.image()..images.end * shape.image()],
                    grad: &grad[images.start * shape.out_image()..images.end * shape.out_image()],
                    of_x,
                    of_grad,
                    ins,
                    outs,
                    left: left.as_mut_ptr().cast(),
                    right: right.as_mut_ptr().cast(),
                    left_place,
                    right_place,
                    products: products.as_mut_ptr().cast(),
                };
                let nchw = |vector: usize| {
                    let count = VECTORS.min(of_x.vectors() - vector);
                    // SAFETY: the features of the vectors; whole images, and scratch of these sizes.
                    with_vectors!(self.vectors, V => unsafe {
                        for n in 0..count {
                            let place = of_x.place(vector + n);
                            work.images::<V>(place, n);
                            work.gradients::<V>(place, n);
                        }
                        work.add::<V, TILES>(16 * count);
                    });
                };
                let nhwc = |first: usize| {
                    let own = first..tiles.count().min(first + TILES);
                    // SAFETY: as above.
                    with_vectors!(self.vectors, V => unsafe {
                        work.nhwc_images::<V>(&tiles, own.clone());
                        work.nhwc_gradients::<V>(&tiles, own.clone());
                        work.add::<V, 1>(own.len());
                    });
                };
                match shape.geometry.format {
                    Format::ChannelsFirst => (0..of_x.vectors()).step_by(VECTORS).for_each(nchw),
                    Format::ChannelsLast => (0..tiles.count()).step_by(TILES).for_each(nhwc),
                }
                // SAFETY: as above.
                with_vectors!(self.vectors, V => unsafe { work.back::<V>(sums) });
            }
        });
    }
}

/// What a run works on.
struct Work<'a, S, G> {
    shape: &'a Shape,
    /// Channels, and output channels.
    inputs: Range<usize>,
    channels: Range<usize>,
    x: &'a [S],
    grad: &'a [G],
    of_x: TileGrid,
    of_grad: TileGrid,
    /// Those that there is room for, in whole products.
    ins: usize,
    outs: usize,
    /// `(place, channel, tile)`, of NHWC images `(place, tile, channel)`. Padding channels hold unspecified
    /// values.
    left: *mut f32,
    /// `(place, tile, output channel)`
    right: *mut f32,
    /// Elements from a place to the next.
    left_place: usize,
    right_place: usize,
    /// `(place, channel, output channel)`
    products: *mut f32,
}

/// # Safety
/// Of all methods: the features of `V`; images and scratch as [`Wgrad::run`] has them.
impl<S: Stored, G: Stored> Work<'_, S, G> {
    /// Transforms vector `n` of images.
    #[inline(always)]
    unsafe fn images<V: Vector>(&self, place: VectorTiles, n: usize) {
        let shape = self.shape;
        for (index, channel) in self.inputs.clone().enumerate() {
            let from = (place.image * shape.c_in + channel) * shape.height * shape.width;
            let x = self.x.as_ptr().wrapping_add(from);
            self.of_x.prefetch_ahead(place, x, shape.image());
            // SAFETY: the images of a place are in the run.
            let d = unsafe { self.of_x.read::<V, S, 4>(place, x, shape.image()) };
            // SAFETY: the features.
            let v = unsafe { transform::pixels(d) };
            for (i, v) in v.as_flattened().iter().enumerate() {
                let at = self.left.wrapping_add(i * self.left_place + index * TILES + n * 16);
                // SAFETY: a place has `TILES` elements per channel.
                unsafe { v.store(at) };
            }
        }
    }

    /// Transforms vector `n` of the gradient: lanes become channels.
    #[inline(always)]
    unsafe fn gradients<V: Vector>(&self, place: VectorTiles, n: usize) {
        let shape = self.shape;
        for block in (0..self.outs).step_by(16) {
            // SAFETY: the features.
            let mut transposes = unsafe { [[V::zero(); 16]; 4] };
            let channels = self.channels.start + block..self.channels.end;
            for (row, channel) in channels.take(16).enumerate() {
                let from = (place.image * shape.c_out + channel) * shape.pixels();
                let grad = self.grad.as_ptr().wrapping_add(from);
                self.of_grad.prefetch_ahead(place, grad, shape.out_image());
                // SAFETY: the images of a place are in the run.
                let y = unsafe { self.of_grad.read::<V, G, 2>(place, grad, shape.out_image()) };
                for (transpose, y) in transposes.iter_mut().zip(y.as_flattened()) {
                    transpose[row] = *y;
                }
            }
            for transpose in &mut transposes {
                // SAFETY: the features.
                *transpose = unsafe { V::transpose(*transpose) };
            }
            let [a, b, c, d] = &transposes;
            for (tile, (((a, b), c), d)) in a.iter().zip(b).zip(c).zip(d).enumerate() {
                // SAFETY: the features.
                let m = unsafe { transform::sums_gradient([[*a, *b], [*c, *d]]) };
                for (i, m) in m.as_flattened().iter().enumerate() {
                    let at = i * self.right_place + (n * 16 + tile) * self.outs + block;
                    // SAFETY: a place has `outs` elements per tile.
                    unsafe { m.store(self.right.wrapping_add(at)) };
                }
            }
        }
    }

    /// Transforms tiles of NHWC images.
    #[inline(always)]
    unsafe fn nhwc_images<V: Vector>(&self, tiles: &Tiles, own: Range<usize>) {
        let (x, all) = (self.x.as_ptr(), self.shape.c_in);
        for (index, tile) in own.enumerate() {
            let pixels = tiles.read(tiles.tile(tile));
            let below = [pixels[2][1], pixels[3][1]];
            Tiles::prefetch_below(x, below, tiles.size.1, (&self.inputs, all));
            for first in self.inputs.clone().step_by(16) {
                // SAFETY: the features; the pixels lie in the images of the run.
                let v = unsafe {
                    transform::pixels(load::<V, S, 4>(x, pixels, all, first..self.inputs.end))
                };
                let at = index * self.ins + first - self.inputs.start;
                for (i, v) in v.as_flattened().iter().enumerate() {
                    // SAFETY: a place has `ins` elements per tile, whole vectors.
                    unsafe { v.store(self.left.wrapping_add(i * self.left_place + at)) };
                }
            }
        }
    }

    /// Transforms tiles of the gradient of NHWC images.
    #[inline(always)]
    unsafe fn nhwc_gradients<V: Vector>(&self, tiles: &Tiles, own: Range<usize>) {
        let (grad, all) = (self.grad.as_ptr(), self.shape.c_out);
        for (index, tile) in own.enumerate() {
            let pixels = tiles.written(tiles.tile(tile));
            let below = [pixels[0][0], pixels[1][0]];
            Tiles::prefetch_below(grad, below, tiles.out_size.1, (&self.channels, all));
            for first in self.channels.clone().step_by(16) {
                // SAFETY: the features; the pixels lie in the images of the run.
                let m = unsafe {
                    let y = load::<V, G, 2>(grad, pixels, all, first..self.channels.end);
                    transform::sums_gradient(y)
                };
                let at = index * self.outs + first - self.channels.start;
                for (i, m) in m.as_flattened().iter().enumerate() {
                    // SAFETY: a place has `outs` elements per tile, whole vectors.
                    unsafe { m.store(self.right.wrapping_add(i * self.right_place + at)) };
                }
            }
        }
    }

    /// Adds the products over `depth` tiles. Channels of the left matrix are `LEFT` elements apart: 1 in NHWC.
    #[inline(always)]
    unsafe fn add<V: Vector, const LEFT: usize>(&self, depth: usize) {
        let left_step = if LEFT == 1 { self.ins } else { 1 };
        for place in 0..TILE_ELEMENTS {
            let left = self.left.wrapping_add(place * self.left_place).cast_const();
            let right = self.right.wrapping_add(place * self.right_place).cast_const();
            let products = self.products.wrapping_add(place * self.ins * self.outs);
            let sizes = (self.inputs.len(), self.outs);
            // SAFETY: these are the place's, of so many channels and output channels.
            unsafe { add_product::<V, LEFT>((left, left_step), right, sizes, depth, products) };
        }
    }

    /// Transforms the sums of products back.
    #[inline(always)]
    unsafe fn back<V: Vector>(&self, sums: &mut [f32]) {
        let (ins, outs) = (self.shape.c_in, self.channels.len());
        assert_eq!(sums.len(), 9 * ins * outs);
        for (index, channel) in self.inputs.clone().enumerate() {
            for out in (0..outs).step_by(16) {
                // SAFETY: the features.
                let mut u = unsafe { [[V::zero(); 4]; 4] };
                for (i, u) in u.as_flattened_mut().iter_mut().enumerate() {
                    let at = (i * self.ins + index) * self.outs + out;
                    // SAFETY: a place has `outs` elements per channel.
                    *u = unsafe { V::load(self.products.wrapping_add(at)) };
                }
                let mask = first_lanes(outs - out);
                // SAFETY: the features.
                let g = unsafe { transform::weights_gradient(u) };
                for (tap, g) in g.as_flattened().iter().enumerate() {
                    let at = (tap * ins + channel) * outs + out;
                    // SAFETY: the output channels of the mask are in `sums`.
                    unsafe { g.store_masked(sums.as_mut_ptr().add(at), mask) };
                }
            }
        }
    }
}
