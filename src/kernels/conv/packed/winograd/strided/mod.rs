//! Convolutions at stride 2 by kernels of three or four taps a side, by Winograd's F(2×2, 2×2).
//!
//! The even and the odd rows and columns of an image are four smaller images, its *phases*. A convolution at stride 2 is the
//! sum of one convolution at stride 1 for each phase, by every second tap of every second row of the kernel: two by two of
//! four by four. For those, a tile of two by two output pixels takes nine products instead of sixteen. Kernels of three by
//! three have one odd tap a side, and take 25 in all instead of 36. In dgrad each phase of the image has its own results, from
//! the same pixels.
//!
//! A lane is a channel. A thread lays out the pixels of a block of tiles with their padding, `(row, column, channel)`, for a
//! chunk of the channels at a time. It transforms them, and adds their products, of all phases at a time, to sums. Of up
//! to some 380 output channels, these stay in a second-level cache of 1 MiB. Results are laid out likewise before they
//! are written to images.
//!
//! What is infinite or NaN is dealt with as [`super`] says.
#![allow(unsafe_code)]

mod grid;
mod images;
mod phases;
mod transform;
mod weights;
mod wgrad;

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::columns::Columns;
use super::products::for_each_block;
use crate::kernels::conv::packed::rows::{Stored, with_stored};
use crate::kernels::conv::packed::store::OutputImages;
use crate::kernels::conv::packed::weights::{InF32, Order, widened};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cpu::dtype::tensor;
use crate::kernels::cpu::uninit::try_uninit_vec;
use crate::kernels::cpu::vector::{Vector, Vectors, first_lanes, with_vectors};
use crate::kernels::gemm::micro::{InstructionSet, Rounded};
use crate::kernels::tensors::format::Format;
use grid::{Block, Grid, Sides, TILES};
use images::{Images, tile};
use phases::{Group, PLACES, ROW, chunk};
pub(super) use wgrad::{run_images, wgrad};

/// Elements of a place. Were they a multiple of a page, the places of a tile would share few lines of the nearest cache.
const PLACE: usize = TILES * ROW + 16;

/// Whether a convolution is of the kind taken here, and these tiles faster than row panels.
pub(in crate::kernels::conv) fn suits(shape: &Shape, order: Order) -> bool {
    let geometry = shape.geometry;
    let taps = shape.kernel_height * shape.kernel_width;
    let few = [shape.kernel_height, shape.kernel_width].iter().all(|taps| (3..=4).contains(taps));
    if !few || (geometry.stride, geometry.dilation, geometry.groups) != (2, 1, 1) {
        return false;
    }
    // To transform the weights takes as long as some tiles.
    let tiles = Grid::new(shape, order).tiles() + 8;
    let direct = shape.batch * shape.pixels() * taps;
    // With channels first, row panels leave lanes of short rows empty: tiles pay with a tenth more products.
    let share = if shape.geometry.format == Format::ChannelsFirst { 1.1 } else { 0.9 };
    let pays = (tiles * phases::products(shape)) as f64 <= share * direct as f64;
    shape.c_in.min(shape.c_out) >= 16 && pays
}

/// See [`super::convolve`]; `shape` is that of the convolution in either order.
pub(super) fn convolve<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    order: Order,
    isa: InstructionSet,
) -> Result<Option<Tensor>> {
    let (weight, bias) = (InF32::of(weight)?, bias.map(widened).transpose()?);
    let (ins, outs, dims) = match order {
        Order::Forward => (shape.c_in, shape.c_out, shape.out_dims()),
        Order::Backward => (shape.c_out, shape.c_in, shape.input_dims()),
    };
    let groups = Group::of(shape, order);
    let weight = weights::pack(&weight, shape, (ins, outs), &groups, order, isa.vectors());
    let (format, grid) = (shape.geometry.format, Grid::new(shape, order).for_threads());
    let pass = StridedConv {
        read: Images { format, channels: ins, grid, sides: Sides::read(shape, order) },
        written: Images { format, channels: outs, grid, sides: Sides::written(shape, order) },
        chunk: chunk(order),
        columns: Columns::new(outs),
        groups: &groups,
        weight: weight.as_slice(),
        bias: bias.as_deref(),
        vectors: isa.vectors(),
    };
    let len = dims.iter().product();
    let data = with_stored!(x, O, x => {
        try_uninit_vec(len, |out: &mut [MaybeUninit<O>]| pass.run(&x, out))
    });
    Ok(data.map(|data| tensor(data, &dims)))
}

/// A convolution, or dgrad of one.
struct StridedConv<'a> {
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

impl StridedConv<'_> {
    /// Elements of a place of sums, as of [`PLACE`].
    fn sums(&self) -> usize {
        TILES * self.columns.width() + 16
    }

    /// Whether all results are finite: then all are written.
    fn run<S: Stored, O: Rounded>(&self, x: &[S], out: &mut [MaybeUninit<O>]) -> bool {
        let Self { read, written, columns, .. } = self;
        assert_eq!(x.len(), read.len());
        assert_eq!(out.len(), written.len());
        let blocks = self.groups.len() * read.channels.div_ceil(self.chunk) * columns.products;
        assert!(blocks * weights::len(*columns) <= self.weight.len());
        assert!(self.bias.is_none_or(|bias| bias.len() == written.channels));
        let out = OutputImages::of(out);
        let sizes = [
            read.room(self.chunk),
            PLACES * PLACE,
            columns.products * PLACES * self.sums(),
            written.room(written.channels),
        ];
        for_each_block(read.grid.blocks(), 1, sizes, |blocks, [pixels, tiles, sums, results]| {
            let scratch = Scratch { pixels, tiles, sums, results };
            let block = read.grid.block(blocks.start);
            // SAFETY: the features of the vectors, the sizes as asserted, and scratch as asked for.
            with_vectors!(self.vectors, V => unsafe {
                self.block::<V, S, O>(x, &block, scratch, &out)
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
        block: &Block,
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
                        self.read.gather::<V, S>(x.as_ptr(), block, &channels, scratch.pixels);
                    }
                    self.transform::<V>(block, group, depth, scratch);
                    self.multiply::<V>(block.tiles(), group, weights, depth, chunk > 0, scratch);
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
        let (pitch, apart) = (block.pitch(sides), sides.apart());
        for (row, start) in grid.starts(block, sides).enumerate() {
            for (phase, &at) in group.phases.iter().enumerate() {
                let start = (start + sides.first(at, pitch)) * depth;
                for channel in (0..depth).step_by(16) {
                    let start = scratch.pixels.wrapping_add(start + channel);
                    // SAFETY: the features; the pixels are the block's.
                    let v =
                        unsafe { transform::pixels(tile::<V, 3>(start, (pitch, apart), depth)) };
                    for (place, v) in v.as_flattened().iter().enumerate() {
                        let Some(before) = group.before[place][phase] else { continue };
                        let at = place * PLACE + row * ROW + before * depth + channel;
                        // SAFETY: a place has `ROW` elements per tile, of which 16 are left.
                        unsafe { v.store(scratch.tiles.wrapping_add(at)) };
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
        depth: usize,
        add: bool,
        scratch: Scratch,
    ) {
        const { assert!(TILES.is_multiple_of(16)) };
        let width = self.columns.width();
        for product in 0..self.columns.products {
            let vectors = self.columns.vectors_of(product, self.written.channels);
            let step = Columns::rows(vectors);
            for (place, &phases) in group.count.iter().enumerate().filter(|(_, count)| **count > 0)
            {
                let weight = ((first + product) * PLACES + place) * weights::place(width);
                let weight = self.weight.as_ptr().cast::<f32>().wrapping_add(weight);
                for row in (0..rows).step_by(step) {
                    let left = scratch.tiles.wrapping_add(place * PLACE + row * ROW).cast_const();
                    let sums = (product * PLACES + place) * self.sums() + row * width;
                    let sums = scratch.sums.wrapping_add(sums);
                    let (left, right, depth) = ((left, 1), (weight, width), phases * depth);
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
        let (pitch, apart) = (block.pitch(sides), sides.apart());
        let first = sides.first(group.phases[0], pitch);
        let (width, depth) = (self.columns.width(), outs.next_multiple_of(16));
        let mut finite = true;
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
                // SAFETY: the features.
                let mut m = unsafe { [[V::zero(); 3]; 3] };
                for (place, m) in m.as_flattened_mut().iter_mut().enumerate() {
                    if group.count[place] > 0 {
                        let at = (product * PLACES + place) * self.sums() + row * width + column;
                        // SAFETY: these have been written.
                        *m = unsafe { V::load(scratch.sums.wrapping_add(at)) };
                    }
                }
                // SAFETY: the features.
                let y = unsafe { transform::fold(m) };
                for (i, y) in y.iter().enumerate() {
                    for (j, y) in y.iter().enumerate() {
                        let pixel = start + first + (i * pitch + j) * apart;
                        // SAFETY: the pixel is the block's.
                        unsafe {
                            let y = y.add(bias);
                            finite &= y.is_finite(u16::MAX);
                            y.store(scratch.results.wrapping_add(pixel * depth + channel));
                        }
                    }
                }
            }
        }
        finite
    }
}
