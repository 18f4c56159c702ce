//! Winograd's algorithms whose lanes are channels, by blocks of tiles that are laid out first.
//!
//! Convolutions at stride 2 by kernels of three or four taps a side: F(2×2, 2×2). The even and the odd rows and columns of an
//! image are four smaller images, its *phases*. A convolution at stride 2 is the sum of one convolution at stride 1 for each
//! phase, by every second tap of every second row of the kernel: two by two of four by four. For those, a tile of two by two
//! output pixels takes nine products instead of sixteen. Kernels of three by three have one odd tap a side, and take 25 in
//! all instead of 36. In dgrad each phase of the image has its own results, from the same pixels.
//!
//! Convolutions at stride 1 by kernels of three by three have one phase. *Small* tiles, F(2×2, 3×3), have two by two output
//! pixels, and sixteen products instead of 36. *Large* ones, F(4×4, 3×3), have four by four, and 36 products instead of 144.
//! Elements of their transforms are further apart, so that rounding errors are some ten times those of small tiles: too large in
//! F32, and small beside the rounding of operands of 16 bits.
//!
//! A thread lays out the pixels of a block of tiles with their padding, `(row, column, channel)`, for a chunk of the channels
//! at a time. It transforms them, and adds their products, of all phases at a time, to sums. Of up to some 380 output channels
//! at stride 2, 220 with large tiles, and 250 to 500 with small ones, these stay in a second-level cache of 1 MiB. Results are
//! laid out likewise before they are written to images.
//!
//! What is infinite or NaN is dealt with as [`super`] says.
#![allow(unsafe_code)]

mod grid;
mod images;
mod phases;
mod sizes;
mod suits;
mod weights;
mod wgrad;

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::columns::Columns;
use super::products::for_each_block;
use super::transform::{Pixels, Sums, scale, square};
use crate::kernels::conv::packed::rows::{Stored, with_stored};
use crate::kernels::conv::packed::store::OutputImages;
use crate::kernels::conv::packed::weights::{InF32, Order, widened};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::tensor;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, Rounded};
use grid::{Block, Grid, Sides};
use images::Images;
use phases::Group;
use sizes::{LARGE, SMALL, STRIDED, Sizes};
pub(super) use suits::suits_small;
pub(in crate::kernels::conv) use suits::{suits_large, suits_strided, suits_wgrad};
use weights::BlockWeights;
pub(in super::super) use wgrad::Wgrad;

/// See [`super::convolve`]; `shape` is that of the convolution in either order.
pub(super) fn convolve<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    order: Order,
    (isa, large): (InstructionSet, bool),
) -> Result<Option<Tensor>> {
    let (weight, bias) = (InF32::of(weight)?, bias.map(widened).transpose()?);
    let vectors = isa.vectors();
    let pass = Pass { weight: &weight, bias: bias.as_deref(), shape, order, vectors };
    let dims = if order == Order::Forward { shape.out_dims() } else { shape.input_dims() };
    let data = with_stored!(x, O, x => match (shape.geometry.stride, large) {
        (1, true) => pass.large::<_, O>(&x),
        (1, false) => pass.run::<_, O, 4, 2, 3, { SMALL.tiles }, { SMALL.row }>(&x, &SMALL),
        _ => pass.run::<_, O, 3, 2, 2, { STRIDED.tiles }, { STRIDED.row }>(&x, &STRIDED),
    });
    Ok(data.map(|data| tensor(data, &dims)))
}

/// What is convolved, but for the images.
struct Pass<'a> {
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    shape: &'a Shape,
    order: Order,
    vectors: Vectors,
}

impl Pass<'_> {
    /// At stride 1; `None` of F32.
    fn large<S: Stored, O: Rounded>(&self, x: &[S]) -> Option<Vec<O>> {
        // Without a constant, the compiler would make a kernel for F32.
        if const { size_of::<S>() > 2 } {
            return None;
        }
        self.run::<S, O, 6, 4, 3, { LARGE.tiles }, { LARGE.row }>(x, &LARGE)
    }

    /// By blocks of at most `TILES` tiles, with `ROW` elements of a transformed tile together.
    fn run<
        S: Stored,
        O: Rounded,
        const READ: usize,
        const MADE: usize,
        const TAPS: usize,
        const TILES: usize,
        const ROW: usize,
    >(
        &self,
        x: &[S],
        sizes: &Sizes,
    ) -> Option<Vec<O>> {
        let &Self { weight, bias, shape, order, vectors } = self;
        let (ins, outs) = match order {
            Order::Forward => (shape.c_in, shape.c_out),
            Order::Backward => (shape.c_out, shape.c_in),
        };
        let groups = Group::of(shape, order, READ);
        let chunk = ROW / groups[0].phases.len();
        let weights = BlockWeights { shape, sides: (ins, outs), groups: &groups, order, chunk };
        let weight = weights.pack::<TAPS, READ, ROW>(weight, vectors);
        assert_eq!((sizes.made, sizes.tiles, sizes.row), (MADE, TILES, ROW));
        let columns = Columns::new(outs);
        let product = Columns::rows(columns.vectors_of(0, outs));
        let grid = Grid::new(shape, order, sizes).for_threads(parallel::threads(), product);
        let format = shape.geometry.format;
        let pass = BlockConv::<READ, MADE, TILES, ROW> {
            read: Images { format, channels: ins, grid, sides: Sides::read(shape, order, MADE) },
            written: Images {
                format,
                channels: outs,
                grid,
                sides: Sides::written(shape, order, MADE),
            },
            chunk,
            columns,
            groups: &groups,
            weight: weight.as_slice(),
            bias,
            vectors,
        };
        let len = pass.written.len();
        try_uninit_vec(len, |out: &mut [MaybeUninit<O>]| pass.run(x, out))
    }
}

/// A convolution, or dgrad of one: tiles of `READ` by `READ` pixels, of which `MADE` by `MADE` results are made.
struct BlockConv<'a, const READ: usize, const MADE: usize, const TILES: usize, const ROW: usize> {
    read: Images,
    written: Images,
    /// Channels that are transformed at a time.
    chunk: usize,
    columns: Columns,
    groups: &'a [Group],
    weight: &'a [u32],
    bias: Option<&'a [f32]>,
    vectors: Vectors,
}

/// Scratch of a thread.
#[derive(Clone, Copy)]
struct Scratch {
    /// `(row, column, channel)` of a chunk.
    pixels: *mut f32,
    /// `(place, tile, phase and channel)`
    tiles: *mut f32,
    /// `(product, place, tile, output channel)`
    sums: *mut f32,
    /// `(row, column, output channel)`
    results: *mut f32,
}

impl<const READ: usize, const MADE: usize, const TILES: usize, const ROW: usize>
    BlockConv<'_, READ, MADE, TILES, ROW>
{
    /// Products for a tile, channel and output channel in a phase: the places of a transformed tile.
    const PLACES: usize = READ * READ;

    /// Elements of a place of transformed tiles. Were they a multiple of a page, the places of a tile would share few lines
    /// of the nearest cache.
    const PLACE: usize = TILES * ROW + 16;

    /// Elements of a place of sums, as of [`Self::PLACE`].
    fn place_of_sums(&self) -> usize {
        TILES * self.columns.width() + 16
    }

    /// Whether all results are finite: then all are written.
    fn run<S: Stored, O: Rounded>(&self, x: &[S], out: &mut [MaybeUninit<O>]) -> bool {
        let Self { read, written, columns, .. } = self;
        assert_eq!(x.len(), read.len());
        assert_eq!(out.len(), written.len());
        let blocks = self.groups.len() * read.channels.div_ceil(self.chunk) * columns.products;
        assert!(blocks * weights::len::<READ, ROW>(*columns) <= self.weight.len());
        assert!(self.bias.is_none_or(|bias| bias.len() == written.channels));
        let out = OutputImages::of(out);
        let sizes = [
            read.room(self.chunk),
            Self::PLACES * Self::PLACE,
            columns.products * Self::PLACES * self.place_of_sums(),
            written.room(written.channels),
        ];
        for_each_block(read.grid.blocks(), 1, sizes, |blocks, [pixels, tiles, sums, results]| {
            let scratch = Scratch { pixels, tiles, sums, results };
            let block = read.grid.block(blocks.start);
            let next = read.grid.block((blocks.start + 1).min(read.grid.blocks() - 1));
            // SAFETY: the features of the vectors, the sizes as asserted, and scratch as asked for.
            with_vectors!(self.vectors, V => unsafe {
                self.block::<V, S, O>(x, [&block, &next], scratch, &out)
            })
        })
    }

    /// Convolves a block of tiles. Whether the results are finite: then they are written.
    ///
    /// # Safety
    /// Here and below, the features of `V`; `x` and `out` are all images, and scratch as [`Self::run`] makes it.
    #[inline(always)]
    unsafe fn block<V: Vector, S: Stored, O: Rounded>(
        &self,
        x: &[S],
        [block, next]: [&Block; 2],
        scratch: Scratch,
        out: &OutputImages<O>,
    ) -> bool {
        let ins = self.read.channels;
        let chunks = ins.div_ceil(self.chunk);
        let mut finite = true;
        for (number, group) in self.groups.iter().enumerate() {
            for chunk in 0..chunks {
                let channels = chunk * self.chunk..ins.min((chunk + 1) * self.chunk);
                let weights = (number * chunks + chunk) * self.columns.products;
                let depth = channels.len().next_multiple_of(16);
                // SAFETY: the caller's.
                unsafe {
                    // Of one chunk, the pixels serve all groups.
                    if number == 0 || chunks > 1 {
                        self.read.gather::<V, S>(
                            x.as_ptr(),
                            block,
                            next,
                            &channels,
                            scratch.pixels,
                        );
                    }
                    self.transform::<V>(block, group, depth, scratch);
                    self.multiply::<V>(
                        block.tiles(),
                        group,
                        weights,
                        channels.len(),
                        chunk > 0,
                        scratch,
                    );
                }
            }
            // SAFETY: as above.
            finite &= unsafe { self.results::<V>(block, group, scratch) };
        }
        if finite {
            // SAFETY: as above.
            unsafe { self.written.scatter::<V, O>(scratch.results, block, out.at) };
        }
        finite
    }

    /// Transforms a chunk of channels.
    #[inline(always)]
    unsafe fn transform<V: Vector>(
        &self,
        block: &Block,
        group: &Group,
        depth: usize,
        scratch: Scratch,
    ) {
        let Images { grid, sides, .. } = self.read;
        let pitch = block.pitch(sides);
        let across = sides.apart() * depth;
        let down = pitch * across;
        for (row, start) in grid.starts(block, sides).enumerate() {
            for (phase, &at) in group.phases.iter().enumerate() {
                let start = (start + sides.first(at, pitch)) * depth;
                for channel in (0..depth).step_by(16) {
                    let start = scratch.pixels.wrapping_add(start + channel);
                    // SAFETY: the features; the pixels are the block's, and a place has `ROW` elements per tile, of which 16
                    // are left.
                    unsafe {
                        square::<Pixels, V, READ, READ>(
                            #[inline(always)]
                            |i, j| V::load(start.wrapping_add(i * down + j * across)),
                            #[inline(always)]
                            |i, j, v| {
                                let place = i * READ + j;
                                if let Some(before) = group.before::<READ>(place, phase) {
                                    let at = row * ROW + before * depth + channel;
                                    let at = place * Self::PLACE + at;
                                    v.store(scratch.tiles.wrapping_add(at));
                                }
                            },
                        );
                    }
                }
            }
        }
    }

    /// Multiplies `rows` transformed tiles by the weights of the products from `first` on. The sums are written, or added to
    /// those that are there.
    #[inline(always)]
    unsafe fn multiply<V: Vector>(
        &self,
        rows: usize,
        group: &Group,
        first: usize,
        channels: usize,
        add: bool,
        scratch: Scratch,
    ) {
        const { assert!(TILES.is_multiple_of(16)) };
        let width = self.columns.width();
        for product in 0..self.columns.products {
            let vectors = self.columns.vectors_of(product, self.written.channels);
            let step = Columns::rows(vectors);
            let places = (0..Self::PLACES).map(|place| (place, group.count::<READ>(place)));
            for (place, phases) in places.filter(|(_, count)| *count > 0) {
                let number = (first + product) * Self::PLACES + place;
                let weight = self.weight.as_ptr().cast::<f32>();
                let weight = weight.wrapping_add(number * weights::place::<ROW>(width));
                for row in (0..rows).step_by(step) {
                    let left = place * Self::PLACE + row * ROW;
                    let left = scratch.tiles.wrapping_add(left).cast_const();
                    let sums =
                        (product * Self::PLACES + place) * self.place_of_sums() + row * width;
                    let sums = scratch.sums.wrapping_add(sums);
                    let (left, right) = ((left, 1), (weight, width));
                    // But for the last phase's padding, which is zero.
                    let depth = (phases - 1) * channels.next_multiple_of(16) + channels;
                    // SAFETY: there are `TILES` tiles and sums, whole steps, and weights of all channels.
                    unsafe {
                        Columns::multiply::<V, ROW>(
                            vectors,
                            left,
                            right,
                            depth,
                            (sums, width),
                            add,
                        );
                    }
                }
            }
        }
    }

    /// Transforms sums back. Whether the results are finite.
    #[inline(always)]
    unsafe fn results<V: Vector>(&self, block: &Block, group: &Group, scratch: Scratch) -> bool {
        let Images { grid, sides, channels: outs, .. } = self.written;
        let pitch = block.pitch(sides);
        let first = sides.first(group.phases[0], pitch);
        let (width, depth) = (self.columns.width(), outs.next_multiple_of(16));
        let across = sides.apart() * depth;
        let (down, place_of_sums) = (pitch * across, self.place_of_sums());
        // SAFETY: the features.
        let (zero, scale) = unsafe { (V::zero(), V::splat(scale(READ))) };
        // What is not finite, times zero, is NaN; a number is zero.
        let mut finite = [zero; 2];
        for (row, start) in grid.starts(block, sides).enumerate() {
            for channel in (0..outs).step_by(16) {
                let (product, column) = (channel / width, channel % width);
                // SAFETY: the features, and the channels of the mask.
                let bias = unsafe {
                    match self.bias {
                        Some(bias) => {
                            let mask = first_lanes(outs - channel);
                            V::load_masked(bias.as_ptr().wrapping_add(channel), mask)
                        }
                        None => V::zero(),
                    }
                };
                let sums = product * Self::PLACES * place_of_sums + row * width + column;
                let sums = scratch.sums.wrapping_add(sums);
                let to = scratch.results.wrapping_add((start + first) * depth + channel);
                // SAFETY: the features; what is read has been written, and the pixels are the block's.
                unsafe {
                    square::<Sums, V, READ, MADE>(
                        #[inline(always)]
                        |i, j| {
                            let place = i * READ + j;
                            if group.count::<READ>(place) > 0 {
                                V::load(sums.wrapping_add(place * place_of_sums))
                            } else {
                                V::zero()
                            }
                        },
                        #[inline(always)]
                        |i, j, y| {
                            let y = y.mul_add(scale, bias);
                            finite[i % 2] = y.mul_add(zero, finite[i % 2]);
                            y.store(to.wrapping_add(i * down + j * across));
                        },
                    );
                }
            }
        }
        // SAFETY: the features.
        unsafe { V::add(finite[0], finite[1]).is_finite(u16::MAX) }
    }
}
