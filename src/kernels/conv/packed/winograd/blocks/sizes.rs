//! How many tiles and channels are worked on at a time.

/// The sizes of an algorithm.
pub(super) struct Sizes {
    /// Tiles of a block, at most.
    pub(super) tiles: usize,
    /// Elements of a transformed tile that lie together: channels of a chunk, of one phase after the other.
    pub(super) row: usize,
}

/// Those at stride 2, and at stride 1.
pub(super) const STRIDED: Sizes = Sizes { tiles: 64, row: 128 };
pub(super) const LARGE: Sizes = Sizes { tiles: 32, row: 64 };
