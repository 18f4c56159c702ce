//! The pixels of a block of tiles as `(row, column, channel)`, from images of either format and to them.
#![allow(unsafe_code)]

use std::ops::Range;

use super::grid::{Block, Grid, Sides};
use crate::kernels::conv::packed::rows::Stored;
use crate::kernels::cpu::prefetch::{is_far, prefetch_at};
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
    #[inline(always)]
    pub(super) unsafe fn gather<V: Vector, S: Stored>(
        &self,
        x: *const S,
        block: &Block,
        channels: &Range<usize>,
        to: *mut f32,
    ) {
        let depth = channels.len().next_multiple_of(16);
        let (height, width) = self.sides.size();
        let pitch = block.pitch(self.sides);
        // SAFETY: the caller's.
        unsafe { self.clear::<V>(block, depth, to) };
        for Pixels { image, rows, columns, at } in self.pixels(block) {
            let to = to.wrapping_add(at * depth);
            if self.format == Format::ChannelsLast {
                for (row, y) in rows.enumerate() {
                    for (column, x_) in columns.clone().enumerate() {
                        let pixel = ((image * height + y) * width + x_) * self.channels;
                        let to = to.wrapping_add((row * pitch + column) * depth);
                        let below = pixel + width * self.channels + channels.start;
                        prefetch_at(x.wrapping_add(below), channels.len());
                        for (vector, first) in channels.clone().step_by(16).enumerate() {
                            let mask = first_lanes(channels.end - first);
                            // SAFETY: these are channels of the pixel.
                            unsafe {
                                let v: V = S::load(x.wrapping_add(pixel + first), mask);
                                v.store(to.wrapping_add(16 * vector));
                            }
                        }
                    }
                }
                continue;
            }
            for (vector, first) in channels.clone().step_by(16).enumerate() {
                let ahead = is_far::<S>(height * width) && first + 16 < channels.end;
                for (run, len, mut row) in runs(&rows, &columns, width) {
                    let plane = (image * self.channels + first) * height * width + run;
                    let mut column = 0;
                    for from in (0..len).step_by(16) {
                        let mask = first_lanes(len - from);
                        // SAFETY: the features.
                        let mut planes = unsafe { [V::zero(); 16] };
                        let count = (channels.end - first).min(16);
                        for (channel, pixels) in planes.iter_mut().take(count).enumerate() {
                            let at = plane + channel * height * width + from;
                            if ahead {
                                prefetch_at(x.wrapping_add(at + 16 * height * width), 16);
                            }
                            // SAFETY: these are pixels of the run.
                            *pixels = unsafe { S::load(x.wrapping_add(at), mask) };
                        }
                        // SAFETY: the features.
                        let pixels = unsafe { V::transpose(planes) };
                        for pixel in pixels.into_iter().take(len - from) {
                            let at = (row * pitch + column) * depth + 16 * vector;
                            // SAFETY: the pixel is the block's.
                            unsafe { pixel.store(to.wrapping_add(at)) };
                            column += 1;
                            if column == columns.len() {
                                (row, column) = (row + 1, 0);
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
                    for (column, x) in columns.clone().enumerate() {
                        let pixel = ((image * height + y) * width + x) * self.channels;
                        let from = from.wrapping_add((row * pitch + column) * depth);
                        for first in (0..self.channels).step_by(16) {
                            let mask = first_lanes(self.channels - first);
                            // SAFETY: these are channels of the pixel, and nobody else writes this block.
                            unsafe {
                                let v = V::load(from.wrapping_add(first));
                                O::store(out.wrapping_add(pixel + first), mask, v);
                            }
                        }
                    }
                }
                continue;
            }
            for first in (0..self.channels).step_by(16) {
                for (run, len, mut row) in runs(&rows, &columns, width) {
                    let plane = (image * self.channels + first) * height * width + run;
                    let mut column = 0;
                    for to in (0..len).step_by(16) {
                        // SAFETY: the features.
                        let mut pixels = unsafe { [V::zero(); 16] };
                        for pixel in pixels.iter_mut().take(len - to) {
                            let at = (row * pitch + column) * depth + first;
                            // SAFETY: the pixel is the block's.
                            *pixel = unsafe { V::load(from.wrapping_add(at)) };
                            column += 1;
                            if column == columns.len() {
                                (row, column) = (row + 1, 0);
                            }
                        }
                        // SAFETY: the features.
                        let planes = unsafe { V::transpose(pixels) };
                        let mask = first_lanes(len - to);
                        let count = self.channels - first;
                        for (channel, pixels) in planes.into_iter().take(count).enumerate() {
                            let at = plane + channel * height * width + to;
                            // SAFETY: these are pixels of the run, and nobody else writes this block.
                            unsafe { O::store(out.wrapping_add(at), mask, pixels) };
                        }
                    }
                }
            }
        }
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
