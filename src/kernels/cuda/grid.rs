//! The grid of a launch, and the names of kernels by dtype.

use crate::error::bail;
use candle_core::{DType, Result};

/// Blocks, threads per block, and bytes of dynamic shared memory per block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) blocks: [usize; 3],
    pub(crate) threads: usize,
    pub(crate) shared: usize,
}

/// The most blocks in the first dimension.
const MOST_BLOCKS: usize = i32::MAX as usize;

impl Grid {
    /// Threads of a pointwise kernel: few enough for any number of registers.
    pub(crate) const THREADS: usize = 256;

    /// `blocks` of `threads`, in one dimension.
    pub(crate) fn flat(blocks: usize, threads: usize) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared: 0 }
    }

    /// A thread for every `each` of `count` elements. Kernels go on in steps of the whole grid, so
    /// that what it cannot have is done all the same.
    pub(crate) fn over(count: usize, each: usize) -> Self {
        Self::flat(count.div_ceil(Self::THREADS * each).min(MOST_BLOCKS), Self::THREADS)
    }

    /// A team of threads for each of `rows` of `columns`, and its size: a warp where rows are short,
    /// so that a block has several, else a block.
    pub(crate) fn rows(rows: usize, columns: usize) -> (Self, i32) {
        let (team, teams) = match columns {
            0..=1024 => (32, 4),
            1025..=8192 => (256, 1),
            _ => (512, 1),
        };
        (Self::flat(rows.div_ceil(teams).min(MOST_BLOCKS), team * teams), team as i32)
    }
}

/// How the kernels of a dtype end.
pub(crate) fn suffix(dtype: DType) -> Result<&'static str> {
    Ok(match dtype {
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F32 => "f32",
        DType::F64 => "f64",
        other => bail!("expected a tensor of F16, BF16, F32 or F64, got {other:?}"),
    })
}

/// Elements of the narrower of two dtypes that 16 bytes hold: what a thread takes at a time.
pub(crate) fn pack(dtype: DType, other: DType) -> usize {
    16 / dtype.size_in_bytes().min(other.size_in_bytes()).max(1)
}
