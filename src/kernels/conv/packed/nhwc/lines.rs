//! The layout of padded image rows: where each input row, pixel and tap is in the scratch copy.

use crate::kernels::conv::packed::layout::{Part, RowPanels, Taps};

/// Each input row that a part reads is one line: `pixels` padded pixels of `words` words. The input rows that a kernel
/// row reads are consecutive lines, and lines are contiguous. So all positions of the part form one sequence; those
/// between two output rows are dropped.
#[derive(Clone, Debug)]
pub(super) struct Lines {
    /// The input row of each line; beyond the image where it is padding.
    pub(super) slots: Vec<isize>,
    /// The line of each kernel row.
    starts: Vec<usize>,
    /// The input column that a line starts with.
    pub(super) column: isize,
    /// Pixels of a line.
    pub(super) pixels: usize,
    /// Words of a pixel.
    pub(super) words: usize,
    /// Positions of a line.
    pub(super) positions: usize,
    /// Words from a position to the next.
    pub(super) step: usize,
    /// Words that follow each other in a sum.
    pub(super) depth: usize,
}

impl Lines {
    /// `part` is of whole rows of positions; columns of `taps` are in order.
    pub(super) fn new(taps: &Taps, part: &Part, words: usize) -> Self {
        let RowPanels { slots, starts, .. } = RowPanels::new(taps, part, 1);
        let offset = |column: Option<&(isize, usize)>| column.map_or(0, |column| column.0);
        let (first, last) = (offset(taps.columns.first()), offset(taps.columns.last()));
        let reach = (last - first) as usize + 1;
        // With one position per line, the next position is on the next line, so the step need not exceed the kernel's
        // reach.
        let step = if taps.grid.1 > 1 { taps.step } else { taps.step.min(reach) };
        let pixels = (taps.grid.1.saturating_sub(1) * step + reach).next_multiple_of(step);
        let run = if Self::close(taps) { taps.columns.len() } else { 1 };
        Self {
            slots,
            starts,
            column: first,
            pixels,
            words,
            positions: pixels / step,
            step: step * words,
            depth: if taps.is_empty() { 0 } else { run * words },
        }
    }

    /// Whether a kernel row meets neighbouring pixels.
    fn close(taps: &Taps) -> bool {
        taps.columns.windows(2).all(|pair| pair[0].0 + 1 == pair[1].0)
    }

    /// Where the words of each part of a sum start, for the first position: a kernel row, or a tap.
    pub(super) fn segments(&self, taps: &Taps) -> Vec<usize> {
        let columns = if Self::close(taps) {
            &taps.columns[..taps.columns.len().min(1)]
        } else {
            &taps.columns
        };
        let start = |line: usize, offset: isize| {
            (line * self.pixels + (offset - self.column) as usize) * self.words
        };
        let rows = self.starts.iter();
        rows.flat_map(|&line| columns.iter().map(move |&(offset, _)| start(line, offset))).collect()
    }

    /// Words in all.
    pub(super) fn len(&self) -> usize {
        self.slots.len() * self.pixels * self.words
    }
}
