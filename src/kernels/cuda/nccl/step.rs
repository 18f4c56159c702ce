//! The steps that NCCL is asked for, with and without the feature of its name.

use candle_core::DType;

/// Something that a rank does on its stream. Numbers of bytes are above 0.
// Compared by nobody, but so its fields count as used without NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Sends the `r`-th of `size` pieces of `bytes` at `from` to rank `r`, and joins what comes at `to`.
    AllToAll {
        from: u64,
        to: u64,
        bytes: usize,
    },
    /// Joins the `bytes` at `from` of all ranks at `to`, also where `from` is this rank's place there.
    AllGather {
        from: u64,
        to: u64,
        bytes: usize,
    },
    /// Sends the `bytes` at `at` of rank `root` to all.
    Broadcast {
        at: u64,
        bytes: usize,
        root: usize,
    },
    Combine(Combine),
}

/// Combines the first `count` elements of the pieces of all ranks at `parts`, each of `piece` elements.
// Compared by nobody, but so its fields count as used without NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Combine {
    pub(crate) to: u64,
    pub(crate) parts: u64,
    pub(crate) count: usize,
    pub(crate) piece: usize,
    pub(crate) dtype: DType,
    pub(crate) out: DType,
    /// The largest in place of the sum.
    pub(crate) max: bool,
}
