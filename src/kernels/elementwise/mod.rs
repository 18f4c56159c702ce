//! Pointwise kernels: activations, sums, dropout.
//!
//! Both operands of a binary kernel have one shape and, but for [`add_assign`], one dtype; the
//! result has theirs.

pub(crate) mod blocks;
pub(crate) mod cpu;
pub(crate) mod lane;
pub(crate) mod portable;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use candle_core::{Result, Tensor};

/// `x`, detached and contiguous, as kernels take their arguments.
pub(crate) fn plain(x: &Tensor) -> Result<Tensor> {
    x.detach().contiguous()
}

/// `max(x, 0)`; NaN stays NaN.
pub(crate) fn relu(x: &Tensor) -> Result<Tensor> {
    let x = plain(x)?;
    if x.device().is_cpu() { cpu::relu(&x) } else { portable::relu(&x) }
}

/// The gradient of [`relu`], from its result: `grad` where `y > 0`, else 0.
pub(crate) fn relu_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (y, grad) = (plain(y)?, plain(grad)?);
    if y.device().is_cpu() {
        cpu::relu_backward(&y, &grad)
    } else {
        portable::relu_backward(&y, &grad)
    }
}

/// `a + b`.
pub(crate) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (plain(a)?, plain(b)?);
    if a.device().is_cpu() { cpu::add(&a, &b) } else { portable::add(&a, &b) }
}

/// `relu(a + b)`, rounded once.
pub(crate) fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (plain(a)?, plain(b)?);
    if a.device().is_cpu() { cpu::add_relu(&a, &b) } else { portable::add_relu(&a, &b) }
}

/// `dst + src` in `dst`'s dtype, whatever float dtype `src` has.
///
/// A contiguous `dst` on the CPU is overwritten and returned: nobody else may rely on its values,
/// and `src` must not share its storage. Elsewhere the sum is a new tensor.
pub(crate) fn add_assign(dst: Tensor, src: &Tensor) -> Result<Tensor> {
    let src = plain(src)?;
    if dst.device().is_cpu() && dst.is_contiguous() {
        cpu::add_assign(dst, &src)
    } else {
        portable::add_assign(&dst, &src)
    }
}

/// `x * scale` where the U8 mask `keep`, of `x`'s shape, is not 0, and exactly 0 elsewhere, even
/// where `x` is not finite. Its own gradient, with the same mask and scale.
pub(crate) fn dropout(x: &Tensor, keep: &Tensor, scale: f64) -> Result<Tensor> {
    let (x, keep) = (plain(x)?, plain(keep)?);
    if x.device().is_cpu() {
        cpu::dropout(&x, &keep, scale)
    } else {
        portable::dropout(&x, &keep, scale)
    }
}
