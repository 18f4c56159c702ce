//! Element-wise arithmetic on two tensors, ReLU and dropout.
//!
//! A kernel reads its operands once: elements are widened to F32 (F64 for F64), go through the operation in
//! registers, and are rounded once. On a CPU a closure over numbers is compiled for each dtype and instruction set
//! (`cpu/simd.rs`), and threads take blocks whose bounds depend on the length alone. On CUDA a thread takes a pack,
//! 16 bytes of the narrowest dtype; operands that were broadcast are read by their strides, and elsewhere are copied first. ReLU's
//! gradient needs the result alone, and those of ReLU and of products can take the place of the gradient that
//! they get. NaN is neither below nor above zero: a maximum keeps it, and ReLU passes its gradient on.
//!
//! Both operands of a binary kernel have one shape and one dtype, but for [`add`] and [`add_assign`] of F32 and 16 bits; the
//! result has theirs, unless it is asked for in another.

pub(crate) mod cpu;
pub(crate) mod cuda;
mod plain;
pub(crate) mod portable;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result, Shape, Tensor};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::cuda::Gpu;
use super::ordered;
pub(crate) use plain::plain;

/// `max(x, 0)`; NaN stays NaN.
pub(crate) fn relu(x: &Tensor) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::relu(gpu, &x);
    }
    if x.device().is_cpu() { cpu::relu(&x) } else { portable::relu(&x) }
}

/// The gradient of [`relu`], from its result: 0 where `y <= 0`, else `grad`, also where `y` is NaN.
pub(crate) fn relu_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (y, grad) = (plain(y)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(y.device()) {
        return cuda::flat(gpu, "relu_backward", &y, &grad, y.dtype());
    }
    if y.device().is_cpu() {
        cpu::relu_backward(&y, &grad)
    } else {
        portable::relu_backward(&y, &grad)
    }
}

/// [`relu_backward`] in the place of `grad`, of `y`'s shape and dtype.
pub(crate) fn relu_backward_assign(grad: Tensor, y: &Tensor) -> Result<Tensor> {
    if grad.elem_count() == 0 {
        return Ok(grad); // strides of 0, which candle takes for repeats
    }
    let y = plain(y)?;
    if let Some(gpu) = Gpu::of(y.device()).filter(|_| grad.is_contiguous()) {
        cuda::flat_over(gpu, "relu_backward", [&y, &grad], &grad)?;
        return Ok(grad);
    }
    if y.device().is_cpu() && grad.is_contiguous() {
        cpu::relu_backward_assign(grad, &y)
    } else {
        relu_backward(&y, &grad)
    }
}

/// `a + b`; in `F32`, where one has that dtype and the other has 16 bits.
pub(crate) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.dtype() != b.dtype() {
        let (wide, narrow) = if a.dtype() == DType::F32 { (a, b) } else { (b, a) };
        return add_mixed(wide, narrow);
    }
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::binary(gpu, "add", a, b, a.dtype());
    }
    let (a, b) = (plain(a)?, plain(b)?);
    if a.device().is_cpu() { cpu::add(&a, &b) } else { portable::add(&a, &b) }
}

/// `a + b`, of `F32` and of 16 bits, in `F32`.
fn add_mixed(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    // Of what is repeated, a copy is small.
    let gpu = Gpu::of(a.device());
    if !(a.is_contiguous() && b.is_contiguous()) || !(gpu.is_some() || a.device().is_cpu()) {
        return add(a, &super::cast(b, DType::F32)?);
    }
    match gpu {
        Some(gpu) => cuda::add_mixed(gpu, a, b),
        None => cpu::add_mixed(a, b),
    }
}

/// `a - b`.
pub(crate) fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::binary(gpu, "sub", a, b, a.dtype());
    }
    let (a, b) = (plain(a)?, plain(b)?);
    if a.device().is_cpu() { cpu::sub(&a, &b) } else { portable::sub(&a, &b) }
}

/// `a * b`, in `out`.
pub(crate) fn mul(a: &Tensor, b: &Tensor, out: DType) -> Result<Tensor> {
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::binary(gpu, "mul", a, b, out);
    }
    let (a, b) = (plain(a)?, plain(b)?);
    if a.device().is_cpu() { cpu::mul(&a, &b, out) } else { portable::mul(&a, &b, out) }
}

/// candle's, of tensors of one shape. Its CUDA kernel refuses tensors of no elements or of no dimension.
pub(crate) fn where_cond(
    condition: &Tensor,
    on_true: &Tensor,
    on_false: &Tensor,
) -> Result<Tensor> {
    if on_true.elem_count() == 0 {
        return Ok(on_true.clone());
    }
    ordered(on_true.device(), || {
        if on_true.rank() > 0 {
            return condition.where_cond(on_true, on_false);
        }
        condition.reshape(1)?.where_cond(&on_true.reshape(1)?, &on_false.reshape(1)?)?.reshape(())
    })
}

/// `a * b` in the place of `a`; both of one shape and dtype.
pub(crate) fn mul_assign(a: Tensor, b: &Tensor) -> Result<Tensor> {
    if a.elem_count() == 0 {
        return Ok(a); // strides of 0, which candle takes for repeats
    }
    let b = plain(b)?;
    if let Some(gpu) = Gpu::of(b.device()).filter(|_| a.is_contiguous()) {
        cuda::flat_over(gpu, "mul", [&a, &b], &a)?;
        return Ok(a);
    }
    if b.device().is_cpu() && a.is_contiguous() {
        cpu::mul_assign(a, &b)
    } else {
        mul(&a, &b, a.dtype())
    }
}

/// `a / b`, in `out`.
pub(crate) fn div(a: &Tensor, b: &Tensor, out: DType) -> Result<Tensor> {
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::binary(gpu, "div", a, b, out);
    }
    let (a, b) = (plain(a)?, plain(b)?);
    if a.device().is_cpu() { cpu::div(&a, &b, out) } else { portable::div(&a, &b, out) }
}

/// The larger of `a` and `b`; NaN where either is.
pub(crate) fn maximum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::binary(gpu, "maximum", a, b, a.dtype());
    }
    let (a, b) = (plain(a)?, plain(b)?);
    if a.device().is_cpu() { cpu::maximum(&a, &b) } else { portable::maximum(&a, &b) }
}

/// The smaller of `a` and `b`; NaN where either is.
pub(crate) fn minimum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::binary(gpu, "minimum", a, b, a.dtype());
    }
    let (a, b) = (plain(a)?, plain(b)?);
    if a.device().is_cpu() { cpu::minimum(&a, &b) } else { portable::minimum(&a, &b) }
}

/// The gradient of [`maximum`] in `a`, and that of [`minimum`] in `b`: `grad`, half of it where the two are equal,
/// and 0 where `a < b`.
pub(crate) fn selection_gradient(a: &Tensor, b: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (a, b, grad) = (plain(a)?, plain(b)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::selection_gradient(gpu, [&a, &b, &grad]);
    }
    if a.device().is_cpu() {
        cpu::selection_gradient(&a, &b, &grad)
    } else {
        portable::selection_gradient(&a, &b, &grad)
    }
}

/// `-(grad * (a / b)) / b`, in `out`: the gradient of [`div`] in `b`.
pub(crate) fn divisor_gradient(
    a: &Tensor,
    b: &Tensor,
    grad: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let (a, b, grad) = (plain(a)?, plain(b)?, plain(grad)?);
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::divisor_gradient(gpu, [&a, &b, &grad], out);
    }
    if a.device().is_cpu() {
        cpu::divisor_gradient(&a, &b, &grad, out)
    } else {
        portable::divisor_gradient(&a, &b, &grad, out)
    }
}

/// `relu(a + b)`, rounded once.
pub(crate) fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (a, b) = (plain(a)?, plain(b)?);
    if let Some(gpu) = Gpu::of(a.device()) {
        return cuda::flat(gpu, "add_relu", &a, &b, a.dtype());
    }
    if a.device().is_cpu() { cpu::add_relu(&a, &b) } else { portable::add_relu(&a, &b) }
}

/// `dst + src` in `dst`'s dtype, whatever float dtype `src` has.
///
/// A contiguous `dst` on the CPU or a GPU is overwritten and returned: nobody else may rely on its values,
/// and `src` must not share its storage. Elsewhere the sum is a new tensor.
pub(crate) fn add_assign(dst: Tensor, src: &Tensor) -> Result<Tensor> {
    if dst.elem_count() == 0 {
        return Ok(dst); // strides of 0, which candle takes for repeats
    }
    let src = plain(src)?;
    if let Some(gpu) = Gpu::of(dst.device()).filter(|_| dst.is_contiguous()) {
        cuda::add_assign(gpu, &dst, &src)?;
        return Ok(dst);
    }
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
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::dropout(gpu, &x, &keep, scale);
    }
    if x.device().is_cpu() {
        cpu::dropout(&x, &keep, scale)
    } else {
        portable::dropout(&x, &keep, scale)
    }
}

/// U8: 1 where the number that `rng`, fresh, draws for an element is below `threshold`, else 0. The
/// same on every device.
pub(crate) fn keep_mask(
    mut rng: ChaCha8Rng,
    threshold: u64,
    shape: &Shape,
    device: &Device,
) -> Result<Tensor> {
    if let Some(gpu) = Gpu::of(device) {
        return cuda::keep_mask(gpu, shape, threshold, &rng);
    }
    let keep = |_| u8::from(u64::from(rng.random::<u32>()) < threshold);
    let mask: Vec<u8> = (0..shape.elem_count()).map(keep).collect();
    Tensor::from_vec(mask, shape, device)
}
