//! How many tiles and channels are worked on at a time.

/// The sizes of an algorithm.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// Pixels of a tile that are made, in one direction.
    pub(super) made: usize,
    /// Tiles of a block, at most.
    pub(super) tiles: usize,
    /// Tiles of a block that are enough.
    pub(super) enough: usize,
    /// Elements of a transformed tile that lie together: channels of a chunk, of one phase after the other.
    pub(super) row: usize,
}

/// Those at stride 2, and at stride 1 of small and of large tiles.
pub(super) const STRIDED: Sizes = Sizes { made: 2, tiles: 64, enough: 64, row: 128 };
pub(super) const SMALL: Sizes = Sizes { made: 2, tiles: 64, enough: 32, row: 64 };
pub(super) const LARGE: Sizes = Sizes { made: 4, tiles: 32, enough: 32, row: 64 };
