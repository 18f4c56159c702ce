//! Element-wise arithmetic out of candle's operators, for devices without kernels and as what the tests compare with.
//!
//! Also the helpers that the `portable.rs` of other kernels share, such as [`upcast`].
//!
//! Operands are widened to F32 (F64 for F64), and the result is rounded once. Maximum, minimum and ReLU only select
//! elements, so they stay in the dtype of their operands. They select by comparisons that keep NaN.

use crate::kernels::accumulator;
use candle_core::{DType, Device, Result, Tensor};

/// `x`, detached, in the dtype of its arithmetic.
pub(crate) fn upcast(x: &Tensor) -> Result<Tensor> {
    x.detach().to_dtype(accumulator(x.dtype()))
}

/// A channel vector, shaped to broadcast over `x`, in the dtype of its arithmetic.
pub(in crate::kernels) fn along(vector: &Tensor, x: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; x.rank()];
    shape[1] = vector.elem_count();
    vector.detach().to_dtype(accumulator(x.dtype()))?.reshape(shape)
}

/// The elements that are larger than `bound`, and for the others `bound`. candle's `maximum` and `minimum` take tensors or
/// numbers. They are compiled once more, for every dtype, in each crate that calls them. What broadcasts is not.
pub(in crate::kernels) fn at_least(x: &Tensor, bound: f64) -> Result<Tensor> {
    x.broadcast_maximum(&number(bound, x)?)
}

pub(in crate::kernels) fn at_most(x: &Tensor, bound: f64) -> Result<Tensor> {
    x.broadcast_minimum(&number(bound, x)?)
}

pub(in crate::kernels) fn clamped(x: &Tensor, low: f64, high: f64) -> Result<Tensor> {
    at_most(&at_least(x, low)?, high)
}

/// A scalar to compare the elements of `x` with.
fn number(value: f64, x: &Tensor) -> Result<Tensor> {
    Tensor::new(value, &Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())
}

/// NaN stays NaN, which candle's own makes 0.
pub(in crate::kernels) fn relu(x: &Tensor) -> Result<Tensor> {
    let zeros = x.zeros_like()?;
    x.le(&zeros)?.where_cond(&zeros, x)
}

pub(in crate::kernels) fn relu_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let zeros = y.zeros_like()?;
    y.le(&zeros)?.where_cond(&zeros, grad)
}

pub(super) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    upcast(a)?.add(&upcast(b)?)?.to_dtype(a.dtype())
}

pub(super) fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    upcast(a)?.sub(&upcast(b)?)?.to_dtype(a.dtype())
}

pub(super) fn mul(a: &Tensor, b: &Tensor, out: DType) -> Result<Tensor> {
    upcast(a)?.mul(&upcast(b)?)?.to_dtype(out)
}

pub(super) fn div(a: &Tensor, b: &Tensor, out: DType) -> Result<Tensor> {
    upcast(a)?.div(&upcast(b)?)?.to_dtype(out)
}

pub(super) fn maximum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    (a.gt(b)? + a.ne(a)?)?.where_cond(a, b)
}

pub(super) fn minimum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    (a.lt(b)? + a.ne(a)?)?.where_cond(a, b)
}

pub(super) fn selection_gradient(a: &Tensor, b: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let half = a.eq(b)?.where_cond(&(grad * 0.5)?, grad)?;
    a.lt(b)?.where_cond(&grad.zeros_like()?, &half)
}

pub(super) fn divisor_gradient(
    a: &Tensor,
    b: &Tensor,
    grad: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let b = upcast(b)?;
    upcast(grad)?.mul(&upcast(a)?.div(&b)?)?.neg()?.div(&b)?.to_dtype(out)
}

pub(super) fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    relu(&upcast(a)?.add(&upcast(b)?)?)?.to_dtype(a.dtype())
}

pub(super) fn add_assign(dst: &Tensor, src: &Tensor) -> Result<Tensor> {
    let sum = upcast(dst)?.add(&src.to_dtype(accumulator(dst.dtype()))?)?;
    sum.to_dtype(dst.dtype())
}

pub(super) fn dropout(x: &Tensor, keep: &Tensor, scale: f64) -> Result<Tensor> {
    let scaled = upcast(x)?.affine(scale, 0.0)?.to_dtype(x.dtype())?;
    keep.where_cond(&scaled, &x.zeros_like()?)
}
