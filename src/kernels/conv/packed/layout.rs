//! Index arithmetic of a convolution: which input rows and columns meet which taps, and where im2col puts them.
//!
//! Nothing here touches data. `Taps` has the offsets of a kernel's rows and columns. `Part` is a block of
//! output pixels, `Cut` says how large blocks are, and `RowPanels` where each input row of a block is in the
//! row panels.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::kernels::conv::geometry::Geometry;
use crate::kernels::conv::shape::Shape;

/// Sums over some taps at a grid of positions: a whole convolution, or one phase of dgrad.
#[derive(Clone, Debug)]
pub(super) struct Taps {
    /// For each kernel row in use, the input row that position 0 meets, and its index.
    pub(super) rows: Vec<(isize, usize)>,
    /// The same of kernel columns.
    pub(super) columns: Vec<(isize, usize)>,
    /// Input pixels from a position to the next.
    pub(super) step: usize,
    /// Positions, vertically and horizontally.
    pub(super) grid: (usize, usize),
    /// Output pixels from a position to the next.
    pub(super) out_step: usize,
}

impl Taps {
    pub(super) fn forward(shape: &Shape) -> Self {
        let geometry = shape.geometry;
        let offsets = |taps: usize, padding: usize| {
            let offset = |tap| (tap * geometry.dilation) as isize - padding as isize;
            (0..taps).map(|tap| (offset(tap), tap)).collect()
        };
        Self {
            rows: offsets(shape.kernel_height, geometry.padding.0),
            columns: offsets(shape.kernel_width, geometry.padding.1),
            step: geometry.stride,
            grid: (shape.out_height, shape.out_width),
            out_step: 1,
        }
    }

    /// The gradient with respect to the input: the input pixels that lie `row, column` beyond a multiple of the
    /// stride, a phase, meet the taps that do. The phases with their taps, row by row, as many columns in each: those
    /// that have a pixel and meet a tap. Pixels of others meet none.
    pub(super) fn backward(shape: &Shape) -> Vec<((usize, usize), Self)> {
        let Geometry { stride, dilation, padding, .. } = shape.geometry;
        // The phases of a dimension, with the taps that each meets.
        let phases = |size: usize, taps: usize, padding: usize| {
            let mut phases = BTreeMap::<usize, Vec<(isize, usize)>>::new();
            for tap in 0..taps {
                let offset = (tap * dilation) as isize - padding as isize;
                let phase = offset.rem_euclid(stride as isize);
                let place = (phase - offset) / stride as isize;
                phases.entry(phase as usize).or_default().push((place, tap));
            }
            phases.retain(|&phase, _| phase < size);
            phases
        };
        let rows = phases(shape.height, shape.kernel_height, padding.0);
        let columns = phases(shape.width, shape.kernel_width, padding.1);
        let positions = |size: usize, phase: usize| (size - phase).div_ceil(stride);
        let of_row = |(&row, rows): (&usize, &Vec<(isize, usize)>)| {
            let of_column = |(&column, columns): (&usize, &Vec<(isize, usize)>)| {
                let grid = (positions(shape.height, row), positions(shape.width, column));
                let (rows, columns) = (rows.clone(), columns.clone());
                ((row, column), Self { rows, columns, step: 1, grid, out_step: stride })
            };
            columns.iter().map(of_column).collect::<Vec<_>>()
        };
        rows.iter().flat_map(of_row).collect()
    }

    /// One tap at every position of a grid.
    pub(super) fn identity(grid: (usize, usize)) -> Self {
        let here = vec![(0, 0)];
        Self { rows: here.clone(), columns: here, step: 1, grid, out_step: 1 }
    }

    /// The same with each image as one row, if every position meets only the pixel at its own place.
    pub(super) fn in_one_row(&self, size: (usize, usize)) -> Option<Self> {
        let here = |taps: &[(isize, usize)]| matches!(taps, [(0, _)]);
        let alike = self.step == 1 && self.grid == size && here(&self.rows) && here(&self.columns);
        alike.then(|| Self { grid: (1, size.0 * size.1), ..self.clone() })
    }

    /// Whether nothing is summed.
    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty() || self.columns.is_empty()
    }
}

/// A block of positions (output pixels): some rows and columns, of `images` images.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) images: usize,
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

/// The layout of the row panels: one for each kernel column and channel. A slot of a row panel is an input row that
/// some kernel row meets, as a line of positions, `(image, column)`. A kernel row meets consecutive slots.
#[derive(Clone, Debug)]
pub(super) struct RowPanels {
    /// Where the slots of each kernel row start.
    pub(super) starts: Vec<usize>,
    /// The input row of each slot; beyond the image where it is padding.
    pub(super) slots: Vec<isize>,
    /// Positions of a line, with those it is padded by.
    pub(super) line: usize,
    /// Elements from a row panel to the next, from a slot to the next, and from 16 positions of a line
    /// to the next.
    pub(super) row_panel: usize,
    pub(super) slot: usize,
    pub(super) block: usize,
}

impl RowPanels {
    /// Row panels one after the other: `(row_panel, slot, position)`. Lines are padded to a multiple of
    /// `multiple` positions.
    pub(super) fn long(taps: &Taps, part: &Part, multiple: usize) -> Self {
        let mut row_panels = Self::new(taps, part, multiple);
        let len = row_panels.slots.len() * row_panels.line;
        // A kilobyte apart, or a multiple, they would share few lines of the first-level cache.
        row_panels.row_panel = if len.is_multiple_of(256) { len + 32 } else { len };
        row_panels.slot = row_panels.line;
        row_panels.block = 16;
        row_panels.starts.iter_mut().for_each(|start| *start *= row_panels.slot);
        row_panels
    }

    /// The `count` row panels of 16 positions together, so that a product reads memory in order:
    /// `(slot, position / 16, row_panel, position % 16)`.
    pub(super) fn blocked(taps: &Taps, part: &Part, count: usize) -> Self {
        let mut row_panels = Self::new(taps, part, 16);
        row_panels.row_panel = 16;
        row_panels.block = 16 * count;
        row_panels.slot = row_panels.line * count;
        row_panels.starts.iter_mut().for_each(|start| *start *= row_panels.slot);
        row_panels
    }

    /// Elements from the start of `count` row panels to the end of the last.
    pub(super) fn len(&self, count: usize) -> usize {
        let last = |count: usize, step: usize| count.saturating_sub(1) * step;
        let blocks = self.line.div_ceil(16);
        if count * self.slots.len() * blocks == 0 {
            return 0;
        }
        let start = last(count, self.row_panel) + last(self.slots.len(), self.slot);
        start + last(blocks, self.block) + self.line - last(blocks, 16)
    }

    /// Slots and where each kernel row starts, in slots.
    pub(super) fn new(taps: &Taps, part: &Part, multiple: usize) -> Self {
        let step = taps.step as isize;
        let line = (part.images * part.columns.len()).next_multiple_of(multiple);
        let (mut starts, mut slots) = (vec![0; taps.rows.len()], Vec::new());
        let mut phases: Vec<_> = taps.rows.iter().map(|row| row.0.rem_euclid(step)).collect();
        phases.sort_unstable();
        phases.dedup();
        for phase in phases {
            let of_phase = || taps.rows.iter().filter(|row| row.0.rem_euclid(step) == phase);
            let quotients = || of_phase().map(|row| row.0.div_euclid(step));
            let (Some(least), Some(most)) = (quotients().min(), quotients().max()) else {
                continue;
            };
            for (start, (offset, _)) in starts.iter_mut().zip(&taps.rows) {
                if offset.rem_euclid(step) == phase {
                    *start = slots.len() + (offset.div_euclid(step) - least) as usize;
                }
            }
            let rows = part.rows.start as isize + least..part.rows.end as isize + most;
            slots.extend(rows.map(|row| row * step + phase));
        }
        Self { starts, slots, line, row_panel: 0, slot: 0, block: 0 }
    }
}

/// The size of the blocks that positions are cut into.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    pub(super) images: usize,
    rows: usize,
    columns: usize,
}

impl Cut {
    /// Parts of about a thousand positions whose row panels, `words` for a position, stay in half of a
    /// second-level cache of 1 MiB.
    pub(super) fn new(grid: (usize, usize), batch: usize, words: usize) -> Self {
        const POSITIONS: usize = 1024;
        const WORDS: usize = 1 << 17;
        let wanted = (WORDS / words.max(1)).clamp(32, POSITIONS);
        let (height, width) = grid;
        if height * width <= wanted {
            // Lines of several images are whole vectors more often than those of one.
            let images = (wanted / (height * width).max(1)).clamp(1, batch.max(1));
            let whole = 16 >> width.trailing_zeros().min(4);
            let images = if images > whole { images / whole * whole } else { images };
            return Self { images: images.min(32), rows: height.max(1), columns: width.max(1) };
        }
        let rows = (wanted / width).clamp(1, height);
        // Of a row, whole vectors of 32 positions.
        let parts = width.div_ceil(wanted / 32 * 32);
        let of_row = width.div_ceil(parts).next_multiple_of(32).min(width);
        let columns = if rows > 1 { width } else { of_row };
        Self { images: 1, rows: height.div_ceil(height.div_ceil(rows)), columns }
    }

    /// The parts of `images` images, no more than [`Self::images`].
    pub(super) fn parts(self, grid: (usize, usize), images: usize) -> impl Iterator<Item = Part> {
        let ranges = |len: usize, step: usize| {
            (0..len).step_by(step).map(move |start| start..len.min(start + step))
        };
        ranges(grid.0, self.rows).flat_map(move |rows| {
            ranges(grid.1, self.columns).map(move |columns| Part {
                images,
                rows: rows.clone(),
                columns,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::tensors::format::Format;

    /// Every product of a transposed convolution belongs to one phase, which has it once.
    #[test]
    fn phases_have_every_product_once() {
        for (size, kernel, stride, dilation, padding) in [
            ((5, 7), (3, 3), 2, 1, (1, 1)),
            ((5, 7), (3, 2), 3, 2, (0, 2)),
            ((1, 2), (1, 2), 2, 7, (0, 3)),
            ((4, 9), (2, 3), 100_000, 1, (0, 0)),
            ((1, 2048), (1, 1024), 256, 1, (0, 0)),
            ((3, 3), (1, 1), 2, 1, (0, 0)),
            ((2, 2), (3, 3), 5, 4, (4, 4)),
            ((3, 3), (3, 3), 5, 1, (2, 2)), // a phase that begins where the image ends
        ] {
            let format = Format::ChannelsFirst;
            let geometry = Geometry { stride, padding, dilation, groups: 1, format };
            let weight = [1, 1, kernel.0, kernel.1];
            let shape = Shape::new(&[1, 1, size.0, size.1], &weight, geometry).unwrap();
            let phases = Taps::backward(&shape);
            assert!(phases.len() <= kernel.0 * kernel.1, "{} phases", phases.len());
            assert!(phases.is_sorted_by_key(|(at, _)| *at));
            let mut met = Vec::new();
            for ((row, column), taps) in &phases {
                assert!(!taps.is_empty() && (*row, *column) < size);
                let next = (row + (taps.grid.0 - 1) * stride, column + (taps.grid.1 - 1) * stride);
                assert!(next.0 < size.0 && next.0 + stride >= size.0);
                assert!(next.1 < size.1 && next.1 + stride >= size.1);
                for ((y, &(dy, ky)), (x, &(dx, kx))) in (0..taps.grid.0)
                    .flat_map(|y| taps.rows.iter().map(move |row| (y, row)))
                    .flat_map(|row| {
                        let columns = (0..taps.grid.1)
                            .flat_map(|x| taps.columns.iter().map(move |column| (x, column)));
                        columns.map(move |column| (row, column))
                    })
                {
                    let (oy, ox) = (y as isize + dy, x as isize + dx);
                    let inside = (0..shape.out_height as isize).contains(&oy)
                        && (0..shape.out_width as isize).contains(&ox);
                    if inside {
                        met.push((row + y * stride, column + x * stride, ky, kx));
                    }
                }
            }
            let mut expected = Vec::new();
            for oy in 0..shape.out_height {
                for ox in 0..shape.out_width {
                    for ky in 0..kernel.0 {
                        for kx in 0..kernel.1 {
                            let y = (oy * stride + ky * dilation).wrapping_sub(padding.0);
                            let x = (ox * stride + kx * dilation).wrapping_sub(padding.1);
                            if y < size.0 && x < size.1 {
                                expected.push((y, x, ky, kx));
                            }
                        }
                    }
                }
            }
            met.sort_unstable();
            expected.sort_unstable();
            assert_eq!(met, expected);
        }
    }
}
