//! Softmax and log-softmax over the last dimension.
//!
//! Any float dtype in, F32 arithmetic (F64 for F64), results in the dtype asked for.

pub(crate) mod cpu;
mod cuda;
mod exp;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// `exp(x) / sum(exp(x))`. A row with an infinity or NaN, or of negative infinities, is NaN.
pub(crate) fn softmax(x: &Tensor, out: DType) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::rows(&gpu, "softmax", &[&x], out);
    }
    if x.device().is_cpu() { cpu::softmax(&x, out) } else { portable::softmax(&x, out) }
}

/// The gradient of [`softmax`], from its result: `y * (grad - sum(y * grad))`, in `y`'s dtype.
pub(crate) fn softmax_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (y, grad) = (plain(y)?, plain(&grad.detach().to_dtype(y.dtype())?)?);
    if let Some(gpu) = Gpu::of(y.device()) {
        return cuda::rows(&gpu, "softmax_backward", &[&y, &grad], y.dtype());
    }
    if y.device().is_cpu() {
        cpu::softmax_backward(&y, &grad)
    } else {
        portable::softmax_backward(&y, &grad)
    }
}

/// `x - ln(sum(exp(x)))`.
pub(crate) fn log_softmax(x: &Tensor, out: DType) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::rows(&gpu, "log_softmax", &[&x], out);
    }
    if x.device().is_cpu() { cpu::log_softmax(&x, out) } else { portable::log_softmax(&x, out) }
}

/// The gradient of [`log_softmax`], from its result: `grad - exp(y) * sum(grad)`, in `out`.
pub(crate) fn log_softmax_backward(y: &Tensor, grad: &Tensor, out: DType) -> Result<Tensor> {
    let (y, grad) = (plain(y)?, plain(&grad.detach().to_dtype(y.dtype())?)?);
    if let Some(gpu) = Gpu::of(y.device()) {
        return cuda::rows(&gpu, "log_softmax_backward", &[&y, &grad], out);
    }
    if y.device().is_cpu() {
        cpu::log_softmax_backward(&y, &grad, out)
    } else {
        portable::log_softmax_backward(&y, &grad, out)
    }
}
