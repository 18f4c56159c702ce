//! Errors of ranks that work together.

use std::fmt;
use std::time::Duration;

use candle_core::DeviceLocation;

use super::Error;

/// A rank cannot exchange tensors with its peers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DistError {
    /// The ranks made different calls, or gave tensors of different shapes or dtypes.
    #[error(
        "{call}: the peers' call differs: {peers}. Every rank makes the same calls in the same order"
    )]
    Mismatch {
        /// The call of this rank.
        call: RankCall,
        /// What the others did instead.
        peers: String,
    },
    /// Peers did not answer in time.
    #[error(
        "{call}: no answer in {:.1} s from {missing}; {before}. A rank hangs, is much slower, or makes fewer calls. \
         The environment variable CANDLE_AMP_DIST_TIMEOUT sets the time in seconds",
        waited.as_secs_f64()
    )]
    Timeout {
        /// The call of this rank.
        call: RankCall,
        /// How long it waited.
        waited: Duration,
        /// The ranks that did not answer, where they are known.
        missing: String,
        /// What the ranks did last.
        before: String,
    },
    /// A peer left or failed.
    #[error("{call}: rank {peer} {reason}")]
    Left {
        /// The call of this rank.
        call: RankCall,
        /// The peer.
        peer: usize,
        /// How it ended.
        reason: String,
    },
    /// A sum of integers that its dtype cannot hold.
    #[error("{call}: the sum of all ranks does not fit the dtype: cast to I64 first")]
    IntegerOverflow {
        /// The call of this rank.
        call: RankCall,
    },
    /// A tensor on another GPU than the rank's.
    #[error(
        "rank {rank} of {size}, {call}: the tensor is on {got:?}, and this rank exchanges tensors on {expected:?}: move \
         it there"
    )]
    Device {
        /// This rank.
        rank: usize,
        /// How many ranks there are.
        size: usize,
        /// The call.
        call: String,
        /// Where the tensor is.
        got: DeviceLocation,
        /// The device of the rank.
        expected: DeviceLocation,
    },
    /// NCCL or CUDA met an error, which may be a peer's.
    #[error("{call}: {reason}; {before}")]
    Nccl {
        /// The call of this rank.
        call: RankCall,
        /// What they say.
        reason: String,
        /// What the ranks did last.
        before: String,
    },
    /// A call after another failed.
    #[error(
        "rank {rank} of {size}, {call}: an earlier call failed, and no later one can succeed: {first}"
    )]
    Failed {
        /// This rank.
        rank: usize,
        /// How many ranks there are.
        size: usize,
        /// The call.
        call: String,
        /// The first error.
        first: String,
    },
    /// The function of a rank failed, which ended the others.
    #[error("rank {rank} of {size} failed: {source}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// How many ranks there are.
        size: usize,
        /// Its error.
        source: Box<Error>,
    },
    /// The function of a rank panicked, which ended the others.
    #[error("rank {rank} of {size} panicked: {message}")]
    Panicked {
        /// The rank that panicked first.
        rank: usize,
        /// How many ranks there are.
        size: usize,
        /// What it said.
        message: String,
    },
    /// The ranks cannot be started.
    #[error("cannot start the ranks: {reason}")]
    Start {
        /// Why, and what would do.
        reason: String,
    },
}

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
