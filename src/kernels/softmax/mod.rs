//! Softmax and log-softmax along one dimension.
//!
//! Any float dtype in, F32 arithmetic (F64 for F64), results in the dtype asked for.

pub(crate) mod cpu;
mod cuda;
mod exp;
mod lines;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cpu::dtype::with_element;
use crate::kernels::cpu::simd::with_output;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use crate::kernels::in_dtype;
use crate::kernels::reduce::lines::Lines;

/// `$kernel` along `$dim` of `$x`, in `$out`: of rows, or of lines side by side.
macro_rules! on_cpu {
    ($x:ident, $dim:expr, $out:expr, $kernel:ident($($argument:expr),*)) => {
        with_element!($x.dtype(), T => with_output!(T, $out, O => match Lines::of($x.dims(), $dim) {
            Some(lines) => lines::$kernel::<T, O>($($argument,)* lines),
            None => cpu::$kernel::<T, O>($($argument),*),
        }))
    };
}

/// `exp(x) / sum(exp(x))` along `dim`. A line with an infinity or NaN, or of negative infinities, is NaN.
pub(crate) fn softmax(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    along(dim, [x], |[x], dim| match Gpu::of(x.device()) {
        Some(gpu) => cuda::rows(gpu, "softmax", &[x], out),
        None if x.device().is_cpu() => on_cpu!(x, dim, out, softmax(x)),
        None => portable::softmax(x, out),
    })
}

/// The gradient of [`softmax`], from its result: `y * (grad - sum(y * grad))`, in `y`'s dtype.
pub(crate) fn softmax_backward(y: &Tensor, grad: &Tensor, dim: usize) -> Result<Tensor> {
    let grad = in_dtype(grad, y.dtype())?;
    along(dim, [y, &grad], |[y, grad], dim| match Gpu::of(y.device()) {
        Some(gpu) => cuda::rows(gpu, "softmax_backward", &[y, grad], y.dtype()),
        None if y.device().is_cpu() => {
            with_element!(y.dtype(), T => match Lines::of(y.dims(), dim) {
                Some(lines) => lines::softmax_backward::<T>(y, grad, lines),
                None => cpu::softmax_backward::<T>(y, grad),
            })
        }
        None => portable::softmax_backward(y, grad),
    })
}

/// `x - ln(sum(exp(x)))` along `dim`.
pub(crate) fn log_softmax(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    along(dim, [x], |[x], dim| match Gpu::of(x.device()) {
        Some(gpu) => cuda::rows(gpu, "log_softmax", &[x], out),
        None if x.device().is_cpu() => on_cpu!(x, dim, out, log_softmax(x)),
        None => portable::log_softmax(x, out),
    })
}

/// The gradient of [`log_softmax`], from its result: `grad - exp(y) * sum(grad)`, in `out`.
pub(crate) fn log_softmax_backward(
    y: &Tensor,
    grad: &Tensor,
    dim: usize,
    out: DType,
) -> Result<Tensor> {
    let grad = in_dtype(grad, y.dtype())?;
    along(dim, [y, &grad], |[y, grad], dim| match Gpu::of(y.device()) {
        Some(gpu) => cuda::rows(gpu, "log_softmax_backward", &[y, grad], out),
        None if y.device().is_cpu() => on_cpu!(y, dim, out, log_softmax_backward(y, grad)),
        None => portable::log_softmax_backward(y, grad, out),
    })
}

/// Calls `kernel` with contiguous tensors, and the dimension among theirs: the last, where no kernel goes along another.
fn along<const N: usize>(
    dim: usize,
    tensors: [&Tensor; N],
    kernel: impl Fn([&Tensor; N], usize) -> Result<Tensor>,
) -> Result<Tensor> {
    let last = tensors[0].rank() - 1;
    let stays =
        dim == last || tensors[0].device().is_cpu() && Lines::of(tensors[0].dims(), dim).is_some();
    if stays {
        let tensors = tensors.into_iter().map(plain).collect::<Result<Vec<_>>>()?;
        return kernel(std::array::from_fn(|i| &tensors[i]), dim);
    }
    let turned = tensors.into_iter().map(|tensor| plain(&tensor.transpose(dim, last)?));
    let turned = turned.collect::<Result<Vec<_>>>()?;
    kernel(std::array::from_fn(|i| &turned[i]), last)?.transpose(dim, last)?.contiguous()
}
