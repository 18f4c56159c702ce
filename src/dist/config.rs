//! How gradients of several ranks are reduced.

use candle_core::DType;

use crate::Result;
use crate::error::ArgumentError;

/// How [`DataParallel`](super::DataParallel) reduces gradients. The same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct DataParallelConfig {
    /// How many bytes of gradients the first bucket takes: few, so that communication starts early. Default 1 MiB.
    pub first_bucket_bytes: usize,
    /// How many bytes of gradients every other bucket takes. Default 25 MiB.
    pub bucket_bytes: usize,
    /// The dtype in which `F32` gradients travel: `F32`, or `BF16` for half the bytes. Sums are `F32` either way.
    /// Default `F32`.
    pub wire_dtype: DType,
    /// Whether a rank may have no gradient of a parameter, which then counts as zero: PyTorch's
    /// `find_unused_parameters`. A parameter without gradient on any rank is left alone. Default `false`: an error.
    pub allow_unused: bool,
    /// After how many averaged backward passes the ranks compare scale, generator, weights and optimizer. Default 1000.
    pub check_every: u64,
}

impl Default for DataParallelConfig {
    fn default() -> Self {
        Self {
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 25 << 20,
            wire_dtype: DType::F32,
            allow_unused: false,
            check_every: 1000,
        }
    }
}

impl DataParallelConfig {
    pub(super) fn limits(&self) -> [usize; 2] {
        [self.first_bucket_bytes, self.bucket_bytes]
    }

    pub(super) fn validate(&self) -> Result<()> {
        if !matches!(self.wire_dtype, DType::F32 | DType::BF16) {
            let (op, name, got) = ("data_parallel", "wire_dtype", self.wire_dtype);
            let expected = "F32 or BF16".to_owned();
            return Err(ArgumentError::DType { op, name, got, expected }.into());
        }
        if self.check_every == 0 {
            let (name, got, expected) = ("check_every", 0.0, "1 or more");
            return Err(ArgumentError::Setting { name, got, expected }.into());
        }
        Ok(())
    }
}
