//! Which call of which rank an error is about.

use std::fmt;

/// A call of a rank, for messages.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankCall {
    /// The rank.
    pub rank: usize,
    /// How many ranks there are.
    pub size: usize,
    /// The number of the call in the order of this rank's calls, from 1.
    pub number: u64,
    /// The call, with the shape and dtype of its tensor.
    pub call: String,
}

impl fmt::Display for RankCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, number, call } = self;
        write!(f, "rank {rank} of {size}, call {number}, {call}")
    }
}
