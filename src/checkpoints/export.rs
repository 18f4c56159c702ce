//! Weights alone, for inference.

use std::path::Path;

use candle_core::DType;

use super::file::export;
use crate::{Parameters, Result};

impl Parameters {
    /// Writes the weights to a safetensors file, in `dtype`, rounded once to nearest even, and the buffers in
    /// their own: for inference, in half the size. A `VarBuilder` of candle reads it under the names it has here.
    /// The file is written in one step, as [`Checkpoint`](crate::checkpoints::Checkpoint)s are.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::TooLarge`](crate::error::CheckpointError::TooLarge) for a weight that `F16` would make
    /// infinite; [`ArgumentError::DType`](crate::error::ArgumentError::DType) for a `dtype` that is not floating
    /// point; [`Error::File`](crate::Error::File).
    pub fn export(&self, path: impl AsRef<Path>, dtype: DType) -> Result<()> {
        export(self, path.as_ref(), dtype)
    }
}
