//! Which elements are a pair, and in which order `x` has its dimensions.

/// What `x` looks like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    /// Elements `2i` and `2i + 1` are a pair, and not `i` and `i + d / 2`.
    pub(crate) adjacent: bool,
    /// `(b, positions, h, d)`, and not `(b, h, positions, d)`.
    pub(crate) positions_first: bool,
}
