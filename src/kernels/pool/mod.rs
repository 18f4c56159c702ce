//! Pooling over the rows and columns of `(n, c, h, w)`, or of `(n, h, w, c)`.
//!
//! Forward results have `x`'s dtype; gradients have the dtype asked for, and overlapping windows
//! accumulate in F32 (F64 for F64). Windows are those of PyTorch: only whole ones, padding at
//! most half the kernel.

pub(crate) mod cpu;
mod cuda;
mod nhwc;
mod portable;
#[cfg(test)]
mod tests;
mod window;

use candle_core::{DType, Result, Tensor};

pub(crate) use window::{Dims4, Window};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use crate::kernels::tensors::format::{self, Format};

/// The maximum of every window, and where it is: a U32 index into the `h * w` pixels.
///
/// The first of equal maxima wins, and NaN wins over everything. Padding never wins.
pub(crate) fn max_forward(x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
    let x = plain(x)?;
    if let Some(gpu) = gpu_of(&x) {
        return cuda::max_forward(gpu, &x, window);
    }
    if window.format == Format::ChannelsLast {
        if x.device().is_cpu() {
            return nhwc::max_forward(&x, window);
        }
        let (y, index) = max_forward(&format::to_nchw(&x)?, window.channels_first())?;
        return Ok((format::to_nhwc(&y)?, format::to_nhwc(&index)?));
    }
    if x.device().is_cpu() {
        cpu::max_forward(&x, window)
    } else {
        portable::max_forward(&x, window)
    }
}

/// The gradient of [`max_forward`]: all of a window's gradient goes to its maximum.
pub(crate) fn max_backward(
    grad: &Tensor,
    index: &Tensor,
    input_dims: Dims4,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    let (grad, index) = (plain(grad)?, plain(index)?);
    if let Some(gpu) = gpu_of(&grad) {
        return cuda::max_backward(gpu, &grad, &index, input_dims, window, out);
    }
    if window.format == Format::ChannelsLast {
        if grad.device().is_cpu() {
            return nhwc::max_backward(&grad, &index, input_dims, out);
        }
        let (grad, index) = (format::to_nchw(&grad)?, format::to_nchw(&index)?);
        let (n, h, w, c) = input_dims;
        let dx = max_backward(&grad, &index, (n, c, h, w), window.channels_first(), out)?;
        return format::to_nhwc(&dx);
    }
    if grad.device().is_cpu() {
        cpu::max_backward(&grad, &index, input_dims, out)
    } else {
        portable::max_backward(&grad, &index, input_dims, out)
    }
}

/// The gradient of maxima at any pixels `index (n, c, …)`, of windows of any sizes.
pub(crate) fn max_scatter(
    grad: &Tensor,
    index: &Tensor,
    input_dims: Dims4,
    out: DType,
) -> Result<Tensor> {
    let (grad, index) = (plain(grad)?, plain(index)?);
    match grad.device().is_cpu() {
        true => cpu::max_backward(&grad, &index, input_dims, out),
        false => portable::max_backward(&grad, &index.flatten_from(2)?, input_dims, out),
    }
}

/// The average of every window, padding included as zeros.
pub(crate) fn avg_forward(x: &Tensor, window: Window) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = gpu_of(&x) {
        return cuda::avg_forward(gpu, &x, window);
    }
    if window.format == Format::ChannelsLast {
        if x.device().is_cpu() {
            return nhwc::avg_forward(&x, window);
        }
        return format::to_nhwc(&avg_forward(&format::to_nchw(&x)?, window.channels_first())?);
    }
    if x.device().is_cpu() {
        cpu::avg_forward(&x, window)
    } else {
        portable::avg_forward(&x, window)
    }
}

/// The gradient of [`avg_forward`].
pub(crate) fn avg_backward(
    grad: &Tensor,
    input_dims: Dims4,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    let grad = plain(grad)?;
    if let Some(gpu) = gpu_of(&grad) {
        return cuda::avg_backward(gpu, &grad, input_dims, window, out);
    }
    if window.format == Format::ChannelsLast {
        if grad.device().is_cpu() {
            return nhwc::avg_backward(&grad, input_dims, window, out);
        }
        let (grad, (n, h, w, c)) = (format::to_nchw(&grad)?, input_dims);
        return format::to_nhwc(&avg_backward(&grad, (n, c, h, w), window.channels_first(), out)?);
    }
    if grad.device().is_cpu() {
        cpu::avg_backward(&grad, input_dims, window, out)
    } else {
        portable::avg_backward(&grad, input_dims, window, out)
    }
}

/// The average over all pixels, to `(n, c)`.
pub(crate) fn global_avg_forward(x: &Tensor, format: Format) -> Result<Tensor> {
    let x = plain(x)?;
    if let Some(gpu) = gpu_of(&x) {
        return cuda::global_avg_forward(gpu, &x, format);
    }
    if format == Format::ChannelsLast {
        if x.device().is_cpu() {
            return nhwc::global_avg_forward(&x);
        }
        return global_avg_forward(&format::to_nchw(&x)?, Format::ChannelsFirst);
    }
    if x.device().is_cpu() { cpu::global_avg_forward(&x) } else { portable::global_avg_forward(&x) }
}

/// The gradient of [`global_avg_forward`]: `(n, c)` to `input_dims`.
pub(crate) fn global_avg_backward(
    grad: &Tensor,
    input_dims: Dims4,
    format: Format,
    out: DType,
) -> Result<Tensor> {
    let grad = plain(grad)?;
    if let Some(gpu) = gpu_of(&grad) {
        return cuda::global_avg_backward(gpu, &grad, input_dims, format, out);
    }
    if format == Format::ChannelsLast {
        if grad.device().is_cpu() {
            return nhwc::global_avg_backward(&grad, input_dims, out);
        }
        let (n, h, w, c) = input_dims;
        let dx = global_avg_backward(&grad, (n, c, h, w), Format::ChannelsFirst, out)?;
        return format::to_nhwc(&dx);
    }
    if grad.device().is_cpu() {
        cpu::global_avg_backward(&grad, input_dims, out)
    } else {
        portable::global_avg_backward(&grad, input_dims, out)
    }
}

/// Where a tensor is, if that is a GPU and there is something of it.
fn gpu_of(x: &Tensor) -> Option<&Gpu> {
    Gpu::of(x.device()).filter(|_| x.elem_count() > 0)
}
