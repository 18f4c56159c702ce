//! The pixels of a block of tiles as `(row, column, channel)`, from images of either format and to them.
#![allow(unsafe_code)]

use std::ops::Range;

use super::grid::{Block, Grid, Sides};
use crate::kernels::conv::packed::rows::Stored;
use crate::kernels::cpu::prefetch::prefetch_at;
use crate::kernels::cpu::vector::{Vector, first_lanes};
use crate::kernels::gemm::micro::Rounded;
use crate::kernels::tensors::format::Format;

/// How images lie, and the pixels of them that tiles have.
#[derive(Clone, Copy)]
pub(super) struct Images {
    pub(super) format: Format,
    /// All of an image.
    pub(super) channels: usize,
    pub(super) grid: Grid,
    pub(super) sides: Sides,
}

impl Images {
    /// Elements of all images.
    pub(super) fn len(&self) -> usize {
        let (height, width) = self.sides.size();
        self.grid.batch() * self.channels * height * width
    }

    /// Elements that so many channels of the largest block take.
    pub(super) fn room(&self, channels: usize) -> usize {
        self.grid.room(self.sides) * channels.next_multiple_of(16)
    }
}

/// Pixels of an image that a block has.
struct Pixels {
    image: usize,
    rows: Range<usize>,
    columns: Range<usize>,
    /// The first of them among the block's.
    at: usize,
}

/// # Safety
/// Of all methods: the features of `V`; all images of the grid, and room for the block's pixels.
impl Images {
    /// Lays out channels of a block's pixels, in whole vectors: zeros for those beyond the last, and where there is no image.
    /// Asks for pixels that follow: with channels first those of the `next` block, with channels last the row below.
    #[inline(always)]
    pub(super) unsafe fn gather<V: Vector, S: Stored>(
        &self,
        x: *const S,
        block: &Block,
        next: &Block,
        channels: &Range<usize>,
        to: *mut f32,
    ) {
        let further = self.further(block, next);
        let depth = channels.len().next_multiple_of(16);
        let (height, width) = self.sides.size();
        let pitch = block.pitch(self.sides);
        // SAFETY: the caller's.
        unsafe { self.clear::<V>(block, depth, to) };
        for Pixels { image, rows, columns, at } in self.pixels(block) {
            let to = to.wrapping_add(at * depth);
            if self.format == Format::ChannelsLast {
                for (row, y) in rows.enumerate() {
                    for (column, run) in self.together(&columns, channels).enumerate() {
                        let pixel = ((image * height + y) * width + columns.start + column)
                            * self.channels
                            + channels.start;
                        let to = to.wrapping_add((row * pitch + column) * depth);
                        let from = x.wrapping_add(pixel);
                        // SAFETY: these are channels of the run's pixels.
                        unsafe { widen::<V, S>(from, run, width * self.channels, to) };
                    }
                }
                continue;
            }
            for (vector, first) in channels.clone().step_by(16).enumerate() {
                let count = channels.end - first;
                for (run, len, row) in runs(&rows, &columns, width) {
                    let plane = (image * self.channels + first) * height * width + run;
                    let mut places = Places::new(row, columns.len(), pitch, depth);
                    for from in (0..len).step_by(16) {
                        let from_first = x.wrapping_add(plane + from);
                        let mask = first_lanes(len - from);
                        // SAFETY: the features.
                        let mut planes = unsafe { [V::zero(); 16] };
                        for (channel, pixels) in planes.iter_mut().enumerate() {
                            // Of a loop of `count`, the array would lie in memory instead of registers.
                            if channel < count {
                                let at = from_first.wrapping_add(channel * height * width);
                                prefetch_at(at.wrapping_add(further), 1);
                                // SAFETY: these are pixels of the run.
                                *pixels = unsafe { S::load(at, mask) };
                            }
                        }
                        // SAFETY: the features.
                        let pixels = unsafe { V::transpose(planes) };
                        for (pixel, v) in pixels.into_iter().enumerate() {
                            let to = to.wrapping_add(places.next() + 16 * vector);
                            if from + pixel < len {
                                // SAFETY: the pixel is the block's.
                                unsafe { v.store(to) };
                            }
                        }
                    }
                }
            }
        }
    }

    /// Zeros around the images.
    #[inline(always)]
    unsafe fn clear<V: Vector>(&self, block: &Block, depth: usize, to: *mut f32) {
        let pitch = block.pitch(self.sides);
        let positions = self.sides.1.positions(&block.columns);
        let (inside, _) = self.sides.1.inside(&positions);
        for (_, rows, at) in self.grid.images(block, self.sides) {
            let (of_image, _) = self.sides.0.inside(&rows);
            for (row, position) in rows.enumerate() {
                let to = to.wrapping_add((at + row) * pitch * depth);
                let border = if of_image.contains(&position) {
                    [0..inside.start - positions.start, inside.end - positions.start..pitch]
                } else {
                    [0..pitch, pitch..pitch]
                };
                for pixels in border {
                    for at in (pixels.start * depth..pixels.end * depth).step_by(16) {
                        // SAFETY: the pixels are the block's.
                        unsafe { V::zero().store(to.wrapping_add(at)) };
                    }
                }
            }
        }
    }

    /// Writes all channels of a block's pixels, in whole vectors, to the images.
    #[inline(always)]
    pub(super) unsafe fn scatter<V: Vector, O: Rounded>(
        &self,
        from: *const f32,
        block: &Block,
        out: *mut O,
    ) {
        let depth = self.channels.next_multiple_of(16);
        let (height, width) = self.sides.size();
        let pitch = block.pitch(self.sides);
        for Pixels { image, rows, columns, at } in self.pixels(block) {
            let from = from.wrapping_add(at * depth);
            if self.format == Format::ChannelsLast {
                for (row, y) in rows.enumerate() {
                    for (column, run) in self.together(&columns, &(0..self.channels)).enumerate() {
                        let pixel =
                            ((image * height + y) * width + columns.start + column) * self.channels;
                        let from = from.wrapping_add((row * pitch + column) * depth);
                        // SAFETY: these are channels of the run's pixels, and nobody else writes this block.
                        unsafe { round::<V, O>(from, run, out.wrapping_add(pixel)) };
                    }
                }
                continue;
            }
            for first in (0..self.channels).step_by(16) {
                let count = self.channels - first;
                for (run, len, row) in runs(&rows, &columns, width) {
                    let plane = (image * self.channels + first) * height * width + run;
                    let mut places = Places::new(row, columns.len(), pitch, depth);
                    for to in (0..len).step_by(16) {
                        // SAFETY: the features.
                        let mut pixels = unsafe { [V::zero(); 16] };
                        for (pixel, v) in pixels.iter_mut().enumerate() {
                            let from = from.wrapping_add(places.next() + first);
                            if to + pixel < len {
                                // SAFETY: the pixel is the block's.
                                *v = unsafe { V::load(from) };
                            }
                        }
                        // SAFETY: the features.
                        let planes = unsafe { V::transpose(pixels) };
                        let mask = first_lanes(len - to);
                        for (channel, pixels) in planes.into_iter().enumerate() {
                            let at = plane + channel * height * width + to;
                            if channel < count {
                                // SAFETY: these are pixels of the run, and nobody else writes this block.
                                unsafe { O::store(out.wrapping_add(at), mask, pixels) };
                            }
                        }
                    }
                }
            }
        }
    }

    /// Elements from a pixel of a block to the same one of the next, in planes.
    fn further(&self, block: &Block, next: &Block) -> usize {
        let (height, width) = self.sides.size();
        let start = |block| {
            let first = self.pixels(block).next();
            first.map_or(0, |Pixels { image, rows, columns, .. }| {
                (image * self.channels * height + rows.start) * width + columns.start
            })
        };
        start(next).wrapping_sub(start(block))
    }

    /// The runs of a row's elements that lie together in an image with channels last and in the block: their lengths. One of
    /// all columns where these are whole pixels in whole vectors, or else one of each.
    fn together(
        &self,
        columns: &Range<usize>,
        channels: &Range<usize>,
    ) -> impl Iterator<Item = usize> {
        let whole = channels.len() == self.channels && self.channels.is_multiple_of(16);
        let pixels = if whole { columns.len() } else { 1 };
        let runs = columns.len() / pixels.max(1);
        (0..runs).map(move |_| pixels * channels.len())
    }

    /// The pixels of each image that a block has.
    fn pixels(&self, block: &Block) -> impl Iterator<Item = Pixels> {
        let Sides(down, across) = self.sides;
        let positions = across.positions(&block.columns);
        let (inside, columns) = across.inside(&positions);
        let (left, pitch) = (inside.start - positions.start, block.pitch(self.sides));
        self.grid.images(block, self.sides).map(move |(image, positions, at)| {
            let (inside, rows) = down.inside(&positions);
            let at = (at + inside.start - positions.start) * pitch + left;
            Pixels { image, rows, columns: columns.clone(), at }
        })
    }
}

/// Elements that are copied together, without masks.
const AT_A_TIME: usize = 64;

/// Copies elements that lie together, and asks for those that lie `ahead` elements further.
///
/// # Safety
/// The features of `V`; so many elements, and places for them in whole vectors.
#[inline(always)]
unsafe fn widen<V: Vector, S: Stored>(from: *const S, len: usize, ahead: usize, to: *mut f32) {
    for first in (0..len).step_by(AT_A_TIME) {
        let (from, to) = (from.wrapping_add(first), to.wrapping_add(first));
        let left = len - first;
        prefetch_at(from.wrapping_add(ahead), left.min(AT_A_TIME));
        // SAFETY: the caller's.
        unsafe {
            if left >= AT_A_TIME {
                for at in (0..AT_A_TIME).step_by(16) {
                    S::load::<V>(from.wrapping_add(at), u16::MAX).store(to.wrapping_add(at));
                }
                continue;
            }
            for at in (0..left).step_by(16) {
                let mask = first_lanes(left - at);
                S::load::<V>(from.wrapping_add(at), mask).store(to.wrapping_add(at));
            }
        }
    }
}

/// Copies elements that lie together, and rounds them.
///
/// # Safety
/// The features of `V`; so many elements in whole vectors, and places for them that nobody else reads or writes.
#[inline(always)]
unsafe fn round<V: Vector, O: Rounded>(from: *const f32, len: usize, to: *mut O) {
    for first in (0..len).step_by(AT_A_TIME) {
        let (from, to) = (from.wrapping_add(first), to.wrapping_add(first));
        let left = len - first;
        // SAFETY: the caller's.
        unsafe {
            if left >= AT_A_TIME {
                for at in (0..AT_A_TIME).step_by(32) {
                    let from = from.wrapping_add(at);
                    let pair = [V::load(from), V::load(from.wrapping_add(16))];
                    O::store_pair(to.wrapping_add(at), pair);
                }
                continue;
            }
            for at in (0..left).step_by(16) {
                let mask = first_lanes(left - at);
                O::store(to.wrapping_add(at), mask, V::load(from.wrapping_add(at)));
            }
        }
    }
}

/// Pixels of a plane that lie together: where in the plane they begin, how many they are, and which of the rows is their first.
fn runs(
    rows: &Range<usize>,
    columns: &Range<usize>,
    width: usize,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let whole = columns.len() == width;
    let (count, len) = if whole { (1, rows.len() * width) } else { (rows.len(), columns.len()) };
    let first = rows.start * width + columns.start;
    (0..count).map(move |row| (first + row * width, len, row))
}

/// Where the pixels of some rows lie in a block, one after the other.
struct Places {
    at: usize,
    /// Pixels of the row, from this one on.
    left: usize,
    columns: usize,
    /// From a pixel to the next, and from the last of a row to the first of the next.
    steps: (usize, usize),
}

impl Places {
    /// From the first of a row on.
    fn new(row: usize, columns: usize, pitch: usize, depth: usize) -> Self {
        let steps = (depth, (pitch - columns + 1) * depth);
        Self { at: row * pitch * depth, left: columns, columns, steps }
    }

    #[inline(always)]
    fn next(&mut self) -> usize {
        let at = self.at;
        let last = self.left == 1;
        self.at += if last { self.steps.1 } else { self.steps.0 };
        self.left = if last { self.columns } else { self.left - 1 };
        at
    }
}
