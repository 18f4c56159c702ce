//! Functions of one number, their slopes, and the gated form of one.
//!
//! Computed in F32 (F64 for F64) from the input as stored, rounded once.

mod cpu;
mod cuda;
mod curves;
mod math;
mod portable;
pub(crate) mod prelu;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor};

pub(crate) use math::Math;

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// A function of one number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Curve {
    /// `x Φ(x)` by its tanh approximation.
    Gelu,
    /// `x Φ(x)`.
    GeluErf,
    /// `x σ(x)`.
    Silu,
    Sigmoid,
    Tanh,
    /// `min(max(x, 0), 6)`.
    Relu6,
    /// `max(x, 0)²`.
    Relu2,
    /// `min(max(x / 6 + 1/2, 0), 1)`.
    HardSigmoid,
    /// `x hard_sigmoid(x)`.
    HardSwish,
    /// `x tanh(softplus(x))`.
    Mish,
    /// `scale x` above 0, `scale alpha (exp(x) - 1)` below.
    Elu {
        alpha: f64,
        scale: f64,
    },
    LeakyRelu {
        slope: f64,
    },
    /// `ln(1 + exp(x))`.
    Softplus,
    Exp,
    Log,
}

/// `curve(x)`, in the dtype of `x`.
pub(crate) fn value(curve: Curve, x: &Tensor) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::value(&gpu, curve, &x);
    }
    if x.device().is_cpu() { cpu::value(curve, &x) } else { portable::value(curve, &x) }
}

/// The gradient of [`value`]: `curve'(x) * grad`, in the dtype of `x`, which `grad` has too.
pub(crate) fn slope(curve: Curve, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (x, grad) = (plain(x)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::slope(&gpu, curve, &x, &grad);
    }
    if x.device().is_cpu() {
        cpu::slope(curve, &x, &grad)
    } else {
        portable::slope(curve, &x, &grad)
    }
}

/// [`slope`] in the place of `grad`, of the shape and in the dtype of `x`.
pub(crate) fn slope_assign(curve: Curve, grad: Tensor, x: &Tensor) -> Result<Tensor> {
    if grad.elem_count() == 0 {
        return Ok(grad); // strides of 0, which candle takes for repeats
    }
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| grad.is_contiguous()) {
        cuda::slope_over(&gpu, curve, &x, &grad, &grad)?;
        return Ok(grad);
    }
    if x.device().is_cpu() && grad.is_contiguous() {
        cpu::slope_assign(curve, &grad, &x)?;
        return Ok(grad);
    }
    slope(curve, &x, &grad)
}

/// `silu(a) * b` of the halves of the last dimension of `x (…, 2 n)`: `(…, n)`.
pub(crate) fn swiglu(x: &Tensor) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::swiglu(&gpu, &x);
    }
    if x.device().is_cpu() { cpu::swiglu(&x) } else { portable::swiglu(&x) }
}

/// The gradient of [`swiglu`], of the shape and in the dtype of `x`, which `grad` has too.
pub(crate) fn swiglu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (x, grad) = (plain(x)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::swiglu_backward(&gpu, &x, &grad);
    }
    if x.device().is_cpu() {
        cpu::swiglu_backward(&x, &grad)
    } else {
        portable::swiglu_backward(&x, &grad)
    }
}

/// The dtype and dimensions of half of the last dimension.
fn half_dims(x: &Tensor) -> Vec<usize> {
    let mut dims = x.dims().to_vec();
    if let Some(last) = dims.last_mut() {
        *last /= 2;
    }
    dims
}
