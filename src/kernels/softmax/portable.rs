//! Softmax and log-softmax along the last dimension out of candle's operators, for devices without kernels. Tests check
//! it against the same values as `cpu.rs`.
//!
//! The largest element of a row is subtracted first, so that no exponential overflows. Log-softmax then subtracts the
//! logarithm of the sum: the logarithm of softmax is minus infinity where softmax is rounded to 0. Backward needs only
//! the output and the gradient, not the input.
//!
//! Arithmetic is F32 (F64 for F64), and results are rounded once.

use candle_core::{D, DType, Result, Tensor};

use crate::kernels::elementwise::portable::upcast;

pub(super) fn softmax(x: &Tensor, out: DType) -> Result<Tensor> {
    let wide = upcast(x)?;
    let exp = wide.broadcast_sub(&wide.max_keepdim(D::Minus1)?)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)?.to_dtype(out)
}

pub(super) fn softmax_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (wide, grad) = (upcast(y)?, upcast(grad)?);
    let dot = wide.mul(&grad)?.sum_keepdim(D::Minus1)?;
    wide.mul(&grad.broadcast_sub(&dot)?)?.to_dtype(y.dtype())
}

pub(super) fn log_softmax(x: &Tensor, out: DType) -> Result<Tensor> {
    let wide = upcast(x)?;
    let shifted = wide.broadcast_sub(&wide.max_keepdim(D::Minus1)?)?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    shifted.broadcast_sub(&log_sum)?.to_dtype(out)
}

pub(super) fn log_softmax_backward(y: &Tensor, grad: &Tensor, out: DType) -> Result<Tensor> {
    let (wide, grad) = (upcast(y)?, upcast(grad)?);
    let sum = grad.sum_keepdim(D::Minus1)?;
    grad.sub(&wide.exp()?.broadcast_mul(&sum)?)?.to_dtype(out)
}
