//! Pointwise operators and their derivatives, and the gated form of one.
//!
//! Computed in F32 (F64 for F64) from the input as stored, rounded once. `table.rs` lists the operators.

mod cpu;
mod cuda;
mod functions;
mod halves;
mod lookup;
mod math;
mod pointwise;
pub(in crate::kernels) mod portable;
pub(crate) mod prelu;
pub(crate) mod table;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor};

pub(crate) use math::Math;
pub(crate) use pointwise::Pointwise;

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// `function(x)`, in the dtype of `x`.
pub(crate) fn value(function: Pointwise, x: &Tensor) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::value(gpu, function, &x);
    }
    if x.device().is_cpu() { cpu::value(function, &x) } else { portable::value(function, &x) }
}

/// The gradient of [`value`]: `function'(x) * grad`, in the dtype of `x`, which `grad` has too.
pub(crate) fn derivative(function: Pointwise, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (x, grad) = (plain(x)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::derivative(gpu, function, &x, &grad);
    }
    if x.device().is_cpu() {
        cpu::derivative(function, &x, &grad)
    } else {
        portable::derivative(function, &x, &grad)
    }
}

/// [`derivative`] in the place of `grad`, of the shape and in the dtype of `x`.
pub(crate) fn derivative_assign(function: Pointwise, grad: Tensor, x: &Tensor) -> Result<Tensor> {
    if grad.elem_count() == 0 {
        return Ok(grad); // strides of 0, which candle takes for repeats
    }
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| grad.is_contiguous()) {
        cuda::derivative_over(gpu, function, &x, &grad, &grad)?;
        return Ok(grad);
    }
    if x.device().is_cpu() && grad.is_contiguous() {
        cpu::derivative_assign(function, &grad, &x)?;
        return Ok(grad);
    }
    derivative(function, &x, &grad)
}

/// `silu(a) * b` of the halves of the last dimension of `x (…, 2 n)`: `(…, n)`.
pub(crate) fn swiglu(x: &Tensor) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::swiglu(gpu, &x);
    }
    if x.device().is_cpu() { cpu::swiglu(&x) } else { portable::swiglu(&x) }
}

/// The gradient of [`swiglu`], of the shape and in the dtype of `x`, which `grad` has too.
pub(crate) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (x, grad) = (plain(x)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::swiglu_backward(gpu, &x, &grad);
    }
    if x.device().is_cpu() {
        cpu::swiglu_backward(&x, &grad)
    } else {
        portable::swiglu_backward(&x, &grad)
    }
}
