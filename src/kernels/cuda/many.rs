//! Many tensors in one launch: the Rust side of `many.cuh`.

use super::grid::Grid;
use super::launch::Table;

/// Elements of a block, as in the `.cuh`.
const CHUNK: usize = 1 << 14;

/// The rows of a launch, of `W` words each; the first two are not the caller's.
#[derive(Debug)]
pub(crate) struct Many<const W: usize> {
    words: Vec<u64>,
    blocks: usize,
}

impl<const W: usize> Many<W> {
    /// How many rows a launch takes.
    pub(crate) const ROWS: usize = (Table::WORDS - 1) / W;

    pub(crate) fn new() -> Self {
        let mut words = Vec::with_capacity(Table::WORDS);
        words.push(0);
        Self { words, blocks: 0 }
    }

    /// Adds a row, at most [`ROWS`](Self::ROWS), of a tensor of `len` elements.
    pub(crate) fn add(&mut self, len: usize, rest: &[u64]) {
        self.words[0] += 1;
        self.words.extend([self.blocks as u64, len as u64]);
        self.words.extend(rest);
        self.words.resize(1 + W * self.words[0] as usize, 0);
        self.blocks += Self::blocks_of(len);
    }

    /// The blocks that a tensor of `len` elements takes.
    pub(crate) fn blocks_of(len: usize) -> usize {
        len.div_ceil(CHUNK)
    }

    /// With the grid to launch it on.
    pub(crate) fn table(self) -> (Table, Grid) {
        // A block finds its row by `first_block`, and stays below that row's `len`.
        let grid = Grid::flat(self.blocks, Grid::THREADS);
        (Table::new(self.words), grid)
    }
}
