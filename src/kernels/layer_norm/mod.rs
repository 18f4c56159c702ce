//! Normalisation of every row of the last dimension: layer norm, and RMS norm, which leaves the
//! mean where it is.
//!
//! Weight and bias are `(columns)`, of any float dtype. Arithmetic, statistics and the sums of the
//! parameters' gradients are F32 (F64 where `x` is F64); `y` has `x`'s dtype.

mod cpu;
pub(crate) mod cuda;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use crate::kernels::{accumulator, in_dtype};

/// Normalises each row: about its mean where `centred`, else about zero. Returns the statistics
/// too: `(rows, 3)`, a mean in two parts, the second what the first is short of, and `1 / std`.
pub(crate) fn forward(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    centred: bool,
) -> Result<(Tensor, Tensor)> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::forward(gpu, &x, cuda::RowShape::of(&x)?, [weight, bias], eps, centred);
    }
    if x.device().is_cpu() {
        cpu::forward(&x, weight, bias, eps, centred)
    } else {
        portable::forward(&x, weight, bias, eps, centred)
    }
}

/// Whether [`backward`] adds what waits for an `x` of `dtype`, and is of `out`, to a gradient in `out`.
pub(crate) fn adds(dtype: DType, out: DType) -> bool {
    out == dtype || out == accumulator(dtype)
}

/// The gradients of `x`, weight and bias, each in the dtype it is wanted in. `pending`, contiguous, is added
/// to the first, which is rounded once; see [`adds`].
pub(crate) fn backward(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Tensor,
    centred: bool,
    wants: [Option<DType>; 3],
    pending: Option<&Tensor>,
) -> Result<[Option<Tensor>; 3]> {
    let (x, grad) = (plain(x)?, plain(&in_dtype(grad, x.dtype())?)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::backward(gpu, [&x, &grad, statistics], weight, centred, wants, pending);
    }
    if x.device().is_cpu() {
        cpu::backward(&x, &grad, weight, statistics, centred, wants, pending)
    } else {
        portable::backward(&x, &grad, weight, statistics, centred, wants, pending)
    }
}
