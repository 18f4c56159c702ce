//! The tiles of images, and the pixels that they read and write.

#[cfg(test)]
mod tests;

use std::ops::Range;

use super::sizes::Sizes;
use crate::kernels::conv::geometry::Geometry;
use crate::kernels::conv::packed::weights::Order;
use crate::kernels::conv::shape::Shape;

/// Images cut into tiles. At stride 1, one has two by two or four by four pixels of what is written. At stride 2, it has two by
/// two output pixels in the forward pass and in wgrad; in dgrad, two by two pixels of the input in each of the four phases.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    batch: usize,
    /// Tiles of an image.
    rows: usize,
    columns: usize,
    /// Tiles of a block: at most, and about as many as are enough.
    most: usize,
    enough: usize,
    /// Rows of a product.
    product: usize,
}

/// Tiles that are convolved together: of whole lines, or some of one line. Lines are counted through all images.
#[derive(Clone, Debug)]
pub(super) struct Block {
    pub(super) lines: Range<usize>,
    pub(super) columns: Range<usize>,
}

/// The pixels of tiles, in one direction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Side {
    /// Pixels from a tile to the next, and those of one.
    step: usize,
    extent: usize,
    /// Pixels that the first tile has before the image; if negative, pixels of the image before the first tile.
    before: isize,
    /// Pixels of the image.
    size: usize,
    /// The first pixel of each phase, from the first of a tile, and how far apart they are.
    first: [usize; 2],
    apart: usize,
}

/// The pixels of tiles in both directions: rows and columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sides(pub(super) Side, pub(super) Side);

impl Grid {
    /// In blocks of these sizes.
    pub(super) fn new(shape: &Shape, order: Order, sizes: &Sizes) -> Self {
        let Sides(down, across) = Sides::written(shape, order, sizes.made);
        let (rows, columns) = (down.size.div_ceil(down.step), across.size.div_ceil(across.step));
        let Sizes { tiles: most, enough, .. } = *sizes;
        Self { batch: shape.batch, rows, columns, most, enough, product: 8 }
    }

    /// The same for products of so many rows, in blocks so small that there is one for each thread.
    pub(super) fn for_threads(self, threads: usize, product: usize) -> Self {
        let fair = self.tiles().div_ceil(threads).next_multiple_of(8);
        Self { most: fair.min(self.most), product, ..self }
    }

    pub(super) fn batch(&self) -> usize {
        self.batch
    }

    pub(super) fn tiles(&self) -> usize {
        self.batch * self.rows * self.columns
    }

    /// Lines of a block, and tiles of a line in it.
    fn cut(&self) -> (usize, usize) {
        if self.columns >= self.most {
            return (1, self.most);
        }
        // Of the numbers of lines from about enough tiles to the most, the smallest that leaves the smallest share of the
        // products' rows empty.
        let enough = self.enough.min(self.most);
        let lines = (enough / self.columns).max(1)..=self.most / self.columns;
        let empty = |lines: &usize| {
            let tiles = lines * self.columns;
            1000 * (tiles.next_multiple_of(self.product) - tiles) / tiles
        };
        (lines.min_by_key(empty).unwrap_or(1), self.columns)
    }

    pub(super) fn blocks(&self) -> usize {
        let (lines, columns) = self.cut();
        (self.batch * self.rows).div_ceil(lines) * self.columns.div_ceil(columns)
    }

    /// Block `index` of [`Self::blocks`].
    pub(super) fn block(&self, index: usize) -> Block {
        let (lines, columns) = self.cut();
        let across = self.columns.div_ceil(columns);
        let (line, column) = (index / across * lines, index % across * columns);
        Block {
            lines: line..(self.batch * self.rows).min(line + lines),
            columns: column..self.columns.min(column + columns),
        }
    }

    /// Elements of the largest block's pixels, of one channel.
    pub(super) fn room(&self, sides: Sides) -> usize {
        let (lines, columns) = self.cut();
        let Side { step, extent, .. } = sides.0;
        // From one image to the next, and after the last line, `extent` rows follow instead of `step`.
        let rows = lines * step + (lines / self.rows + 2) * (extent - step);
        rows * sides.1.len(columns)
    }

    /// Where a line begins among the rows of all images' tiles.
    fn row(&self, line: usize, sides: Sides) -> usize {
        line / self.rows * sides.0.len(self.rows) + line % self.rows * sides.0.step
    }

    /// The first pixel of every tile of a block, of all that the block has.
    pub(super) fn starts(&self, block: &Block, sides: Sides) -> impl Iterator<Item = usize> {
        let (grid, first, pitch) = (*self, self.row(block.lines.start, sides), block.pitch(sides));
        let (step, columns) = (sides.1.step, block.columns.len());
        block.lines.clone().flat_map(move |line| {
            let row = (grid.row(line, sides) - first) * pitch;
            (0..columns).map(move |column| row + column * step)
        })
    }

    /// The rows of each image that a block has: the image, its rows among those of its tiles, and where they begin among the
    /// block's.
    pub(super) fn images(
        &self,
        block: &Block,
        sides: Sides,
    ) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
        let (grid, first) = (*self, self.row(block.lines.start, sides));
        let Range { start, end } = block.lines.clone();
        (start / self.rows..end.div_ceil(self.rows)).map(move |image| {
            let of_image = image * grid.rows;
            let lines = start.max(of_image) - of_image..end.min(of_image + grid.rows) - of_image;
            let rows = lines.start * sides.0.step..(lines.end - 1) * sides.0.step + sides.0.extent;
            let at = grid.row(of_image + lines.start, sides) - first;
            (image, rows, at)
        })
    }
}

impl Block {
    pub(super) fn tiles(&self) -> usize {
        self.lines.len() * self.columns.len()
    }

    /// Pixels of a row.
    pub(super) fn pitch(&self, sides: Sides) -> usize {
        sides.1.len(self.columns.len())
    }
}

impl Side {
    /// The pixels that a pass reads: those of the input forward, those of the output in dgrad.
    fn read(
        made: usize,
        padding: usize,
        size: usize,
        out_size: usize,
        stride: usize,
        order: Order,
    ) -> Self {
        let by_one =
            Self { step: made, extent: made + 2, before: 0, size, first: [0; 2], apart: 1 };
        match (stride, order) {
            (1, Order::Forward) => Self { before: padding as isize, ..by_one },
            // Input pixel `i` and tap `2 - n` meet at output pixel `i + n - (2 - padding)`.
            (1, Order::Backward) => Self { before: 2 - padding as isize, size: out_size, ..by_one },
            // Output pixel `o` and tap `2 m + phase` meet at input pixel `2 (o + m) + phase - padding`.
            (_, Order::Forward) => {
                Self { step: 4, extent: 6, before: padding as isize, size, first: [0, 1], apart: 2 }
            }
            (_, Order::Backward) => {
                let first = [0, 1].map(|phase| output(phase, padding) - output(1, padding));
                let before = 1 - output(1, padding) as isize;
                Self { step: 2, extent: 3 + first[0], before, size: out_size, first, apart: 1 }
            }
        }
    }

    /// The pixels that a pass writes; forward, those of all phases together.
    fn written(
        made: usize,
        padding: usize,
        size: usize,
        out_size: usize,
        stride: usize,
        order: Order,
    ) -> Self {
        let together = Self { step: made, extent: made, before: 0, size, first: [0; 2], apart: 1 };
        match (stride, order) {
            (1, Order::Forward) => Self { size: out_size, ..together },
            (1, Order::Backward) => together,
            (_, Order::Forward) => Self { size: out_size, ..together },
            (_, Order::Backward) => {
                let first = [0, 1].map(|phase| 2 * output(phase, padding) + phase - padding);
                Self { step: 2 * made, extent: 2 * made, first, apart: 2, ..together }
            }
        }
    }

    /// Pixels of so many tiles.
    fn len(&self, tiles: usize) -> usize {
        self.step * (tiles - 1) + self.extent
    }

    /// Of these positions among those of an image's tiles, the ones in the image, and the pixels there.
    pub(super) fn inside(&self, positions: &Range<usize>) -> (Range<usize>, Range<usize>) {
        let position = |pixel: usize| {
            let at = pixel.saturating_add_signed(self.before);
            at.clamp(positions.start, positions.end)
        };
        let inside = position(0)..position(self.size);
        let pixel = |at: usize| at.saturating_add_signed(-self.before).min(self.size);
        (inside.clone(), pixel(inside.start)..pixel(inside.end))
    }

    /// The positions of a block's tiles in a line.
    pub(super) fn positions(&self, tiles: &Range<usize>) -> Range<usize> {
        let first = tiles.start * self.step;
        first..first + self.len(tiles.len())
    }
}

impl Sides {
    pub(super) fn read(shape: &Shape, order: Order, made: usize) -> Self {
        Self::both(shape, order, made, Side::read)
    }

    pub(super) fn written(shape: &Shape, order: Order, made: usize) -> Self {
        Self::both(shape, order, made, Side::written)
    }

    fn both(
        shape: &Shape,
        order: Order,
        made: usize,
        side: impl Fn(usize, usize, usize, usize, usize, Order) -> Side,
    ) -> Self {
        let Geometry { padding: (above, left), stride, .. } = shape.geometry;
        Self(
            side(made, above, shape.height, shape.out_height, stride, order),
            side(made, left, shape.width, shape.out_width, stride, order),
        )
    }

    /// Pixels from one of a phase to the next.
    pub(super) fn apart(self) -> usize {
        self.0.apart
    }

    /// Height and width of the images.
    pub(super) fn size(self) -> (usize, usize) {
        (self.0.size, self.1.size)
    }

    /// The first pixel of a phase, from the first of a tile, where rows are `pitch` apart.
    pub(super) fn first(self, phase: (usize, usize), pitch: usize) -> usize {
        self.0.first[phase.0] * pitch + self.1.first[phase.1]
    }
}

/// The output pixel that meets a phase's first input pixel at the lower of its taps.
fn output(phase: usize, padding: usize) -> usize {
    (padding + 1 - phase) / 2
}
