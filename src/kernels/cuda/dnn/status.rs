//! cuDNN's answer that it does not support what it was asked for.

use candle_core::{Error, Result};
use cudarc::cudnn::result::CudnnError;

/// CUDNN_STATUS_NOT_SUPPORTED and its sub-codes, which say what about it.
const NOT_SUPPORTED: std::ops::Range<u32> = 3000..4000;

/// The answer, or `None` where it is that cuDNN does not support what it was asked for: then nothing was done.
pub(super) fn supported<T>(answer: std::result::Result<T, CudnnError>) -> Result<Option<T>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(CudnnError(status)) if NOT_SUPPORTED.contains(&(status as u32)) => Ok(None),
        Err(error) => Err(Error::Wrapped(Box::new(error))),
    }
}

#[cfg(test)]
mod tests {
    use cudarc::cudnn::sys::cudnnStatus_t as Status;

    use super::*;

    #[test]
    fn every_status_of_three_thousand_is_a_no_and_others_are_errors() {
        assert_eq!(supported(Ok(3)).unwrap(), Some(3));
        for status in [
            Status::CUDNN_STATUS_NOT_SUPPORTED,
            Status::CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN,
            Status::CUDNN_STATUS_NOT_SUPPORTED_SHAPE,
            Status::CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE,
            Status::CUDNN_STATUS_NOT_SUPPORTED_LAYOUT,
            Status::CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH,
            Status::CUDNN_STATUS_NOT_SUPPORTED_SHARED_MEMORY_INSUFFICIENT,
            Status::CUDNN_STATUS_NOT_SUPPORTED_CUDA_GRAPH_NATIVE_API,
        ] {
            assert_eq!(supported::<()>(Err(CudnnError(status))).unwrap(), None, "{status:?}");
        }
        for status in [
            Status::CUDNN_STATUS_NOT_INITIALIZED,
            Status::CUDNN_STATUS_BAD_PARAM,
            Status::CUDNN_STATUS_INTERNAL_ERROR,
            Status::CUDNN_STATUS_EXECUTION_FAILED,
        ] {
            let error = supported::<()>(Err(CudnnError(status))).expect_err("an error");
            assert!(error.to_string().contains(&format!("{status:?}")), "{error}");
        }
    }
}
