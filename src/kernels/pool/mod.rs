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

use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use crate::kernels::tensors::format::{self, Format};

/// The sizes of an input, in the order that its layout has them.
pub(crate) type Dims4 = (usize, usize, usize, usize);

/// Where windows lie: `(vertical, horizontal)` pairs, `padding` on both sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) kernel: (usize, usize),
    pub(crate) stride: (usize, usize),
    pub(crate) padding: (usize, usize),
    pub(crate) format: Format,
}

impl Window {
    /// How many windows fit a plane of `(h, w)`, which [`Self::fits`].
    pub(crate) fn out_size(self, (h, w): (usize, usize)) -> (usize, usize) {
        (
            (h + 2 * self.padding.0 - self.kernel.0) / self.stride.0 + 1,
            (w + 2 * self.padding.1 - self.kernel.1) / self.stride.1 + 1,
        )
    }

    /// Whether a window fits a plane of `(h, w)`.
    pub(crate) fn fits(self, (h, w): (usize, usize)) -> bool {
        let room = |size: usize, padding: usize| padding.checked_mul(2)?.checked_add(size);
        room(h, self.padding.0).is_some_and(|room| room >= self.kernel.0)
            && room(w, self.padding.1).is_some_and(|room| room >= self.kernel.1)
    }

    fn channels_first(self) -> Self {
        Self { format: Format::ChannelsFirst, ..self }
    }

    fn area(self) -> usize {
        self.kernel.0 * self.kernel.1
    }
}

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
