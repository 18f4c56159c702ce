//! The errors of this crate, in groups: [`Error`] has a variant for each group, with an enum of the cases.
//!
//! ```
//! use candle_amp::error::{Error, ScalerError};
//! use candle_amp::{GradScaler, Result};
//!
//! let updated: Result<_> = GradScaler::default().update();
//! match updated {
//!     Err(Error::Scaler(ScalerError::NothingChecked)) => println!("`step` was not called"),
//!     Err(Error::Checkpoint(_) | Error::File { .. }) => unreachable!("`update` reads no file"),
//!     other => panic!("{other:?}"),
//! }
//! ```

mod argument;
mod autocast;
mod capture;
mod checkpoint;
mod graph;
pub(crate) mod lock;
mod optimizer;
mod parallel;
mod rank_call;
mod scaler;

use std::path::PathBuf;
use std::time::Duration;

use candle_core::DeviceLocation;

pub use argument::ArgumentError;
pub use autocast::AutocastError;
pub use capture::CaptureError;
pub use checkpoint::CheckpointError;
pub use graph::GraphError;
pub use optimizer::OptimizerError;
pub use parallel::ParallelError;
pub use rank_call::RankCall;
pub use scaler::ScalerError;

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error from this crate: what was asked, what was given, and what would do.
///
/// After an error of this crate's own, nothing is half done. Gradients that overflow are *not* an error: F16
/// training skips a step now and then by design, and [`StepOutcome`](crate::StepOutcome) says so.
///
/// Operators and layers return candle's error type, so that they fit where candle's do. candle's error then
/// carries this one. `?` converts either way. Where `RUST_BACKTRACE` is set, candle adds a backtrace to the messages of its
/// own errors, and this crate none to its.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Autocast cannot compute what it was asked for.
    #[error(transparent)]
    Autocast(#[from] AutocastError),
    /// Backward cannot run, or would give wrong gradients.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A step cannot be captured or replayed as a CUDA graph.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// A call of [`GradScaler`](crate::GradScaler) is out of order, or its loss does not fit.
    #[error(transparent)]
    Scaler(#[from] ScalerError),
    /// An argument does not fit: its value, shape, dtype, device or name.
    #[error(transparent)]
    Argument(#[from] ArgumentError),
    /// An optimizer, or a moving average of weights, refuses a call.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// Ranks that train together do not agree.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// A checkpoint or a saved state cannot be loaded or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A rank cannot exchange tensors with its peers.
    #[error(transparent)]
    Dist(#[from] DistError),
    /// The system refuses to read or write a file or a folder.
    #[error("{action} {}: {source}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

impl Error {
    /// The same error, knowing the part of a checkpoint it is about.
    pub(crate) fn in_part(self, name: &str) -> Self {
        match self {
            Self::Checkpoint(CheckpointError::Mismatch { missing, extra, wrong, .. }) => {
                CheckpointError::Mismatch { part: name.to_owned(), missing, extra, wrong }.into()
            }
            other => other,
        }
    }
}

/// So that `?` works inside candle's traits.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(inner) => inner,
            // Not by `wrap`, which adds a backtrace to the message where `RUST_BACKTRACE` is set.
            other => candle_core::Error::Wrapped(Box::new(other)),
        }
    }
}

// Not in a file of its own, because this error and `Error` hold one another.
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

/// candle's `bail!` without its backtrace, which would follow the message where `RUST_BACKTRACE` is set.
macro_rules! bail {
    ($($message:tt)*) => { return Err(candle_core::Error::Msg(format!($($message)*))) };
}
pub(crate) use bail;

/// So that `.into()` on a group's error gives candle's, which carries an [`Error`].
macro_rules! into_candle {
    ($($group:ty),*) => {
        $(impl From<$group> for candle_core::Error {
            fn from(error: $group) -> Self {
                Error::from(error).into()
            }
        })*
    };
}

into_candle!(
    AutocastError,
    CaptureError,
    GraphError,
    ScalerError,
    ArgumentError,
    OptimizerError,
    ParallelError,
    CheckpointError,
    DistError
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_keep_their_message_through_candle_and_back() {
        fn ours() -> Result<()> {
            Err(ScalerError::NothingChecked.into())
        }
        fn theirs() -> candle_core::Result<()> {
            Ok(ours()?)
        }
        fn back() -> Result<()> {
            Ok(theirs()?)
        }
        let message = back().unwrap_err().to_string();
        assert!(message.contains("call `step` or `unscale` first"), "{message}");
    }

    #[test]
    fn a_group_s_error_is_an_error_in_candle_s_with_the_same_message() {
        let message = GraphError::Freed { op: "relu" }.to_string();
        assert_eq!(Error::from(GraphError::Freed { op: "relu" }).to_string(), message);
        let in_candle = candle_core::Error::from(GraphError::Freed { op: "relu" }).to_string();
        assert_eq!(in_candle, message);
    }
}
