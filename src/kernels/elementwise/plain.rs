//! A tensor as kernels take it.

use candle_core::{Result, Tensor};

use crate::kernels::cuda::Gpu;
use crate::kernels::{cast, contiguous};

/// `x`, detached and contiguous, as kernels take their arguments.
pub(crate) fn plain(x: &Tensor) -> Result<Tensor> {
    // In one launch, where candle's own copy uploads the strides first.
    let gpu = Gpu::of(x.device()).filter(|_| !x.is_contiguous() && x.dtype().is_float());
    if gpu.is_some() { cast(x, x.dtype()) } else { contiguous(x) }
}
