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
