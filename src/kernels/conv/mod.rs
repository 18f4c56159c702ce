//! Two-dimensional convolutions and their gradients.
//!
//! Images are `(batch, channels, height, width)` or `(batch, height, width, channels)`, as their
//! [`Format`](super::tensors::format::Format) says. Weights are `(c_out, c_in / groups, kh, kw)`. Every argument is F16,
//! BF16, F32 or F64, not necessarily the same → F64 where one of them is F64, else F32 → rounded once to `out`.
//!
//! As in cuDNN, *dgrad* is the gradient with respect to the data, which is the input, and *wgrad* is the gradient with
//! respect to the weight.

mod algorithm;
mod columns;
mod cpu;
mod cuda;
mod depthwise;
mod geometry;
mod packed;
mod portable;
mod product;
mod shape;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use super::contiguous;
use super::cuda::PassKind;
use super::gemm::exact;
use super::tensors::format::{to_nchw, to_nhwc};
use crate::kernels::cast;
use crate::kernels::cpu::dtype::{is_near, with_single};
use algorithm::Algorithm;
pub(crate) use geometry::Geometry;
use packed::{Order, RunSums, few_channels, lanes, nhwc, winograd};
use shape::Shape;

/// `x (b,c_in,h,w) ⋆ weight + bias (c_out) → (b,c_out,h_out,w_out)`.
///
/// Padding is a zero like any other: times an infinite weight it is NaN. So it is in the gradient of the input at stride 1,
/// where the gradient has zeros around it.
pub(crate) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    geometry: Geometry,
    out: DType,
) -> Result<Tensor> {
    let shape = Shape::new(x.dims(), weight.dims(), geometry)?;
    let algorithm = Algorithm::of(PassKind::Forward, [x, weight], bias, &shape);
    match algorithm {
        Algorithm::Cuda(gpu) => {
            return cuda::run(gpu, PassKind::Forward, [x, weight], bias, &shape, out);
        }
        Algorithm::Portable => return portable::forward(x, weight, bias, &shape, out),
        _ => {}
    }
    algorithm.run(PassKind::Forward, &shape, |algorithm| {
        forward_by(algorithm, x, weight, bias, &shape, out)
    })
}

/// [`forward`] by this algorithm, if that can compute with these operands; not by those for other devices.
fn forward_by(
    algorithm: Algorithm,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Option<Tensor>> {
    if let Algorithm::ViaNchw = algorithm {
        let geometry = shape.geometry.channels_first();
        return to_nhwc(&forward(&to_nchw(x)?, weight, bias, geometry, out)?).map(Some);
    }
    let (x, weight) = (&contiguous(x)?, &contiguous(weight)?);
    let bias = bias.map(contiguous).transpose()?;
    let bias = bias.as_ref();
    let y = match algorithm {
        Algorithm::Im2colF64 => {
            let bias = bias.map(exact).transpose()?;
            Some(cpu::forward::<f64>(&exact(x)?, &exact(weight)?, bias.as_ref(), shape)?)
        }
        Algorithm::Product => Some(product::forward(x, weight, bias, shape, out)?),
        _ => with_single!(near(x, out), O => match algorithm {
            Algorithm::Packed(isa) => Some(packed::forward::<O>(x, weight, bias, shape, isa)?),
            Algorithm::PackedNhwc(isa) => nhwc::forward::<O>(x, weight, bias, shape, isa)?,
            Algorithm::Winograd(isa) => {
                winograd::convolve::<O>(x, weight, bias, shape, Order::Forward, (isa, false))?
            }
            Algorithm::LargeTiles(isa) => {
                winograd::convolve::<O>(x, weight, bias, shape, Order::Forward, (isa, true))?
            }
            Algorithm::FewChannels(isa) => few_channels::forward::<O>(x, weight, bias, shape, isa)?,
            Algorithm::ImagesInLanes(isa) => {
                lanes::convolve::<O>(x, weight, bias, shape, Order::Forward, isa)?
            }
            Algorithm::Depthwise => Some(depthwise::forward::<O>(x, weight, bias, shape)?),
            Algorithm::DepthwiseRows(v) => {
                Some(depthwise::rows::forward::<O>(x, weight, bias, shape, v)?)
            }
            Algorithm::DepthwiseLanes(v) => {
                depthwise::lanes::forward::<O>(x, weight, bias, shape, v)?
            }
            _ => Some(cpu::forward::<O>(x, weight, bias, shape)?),
        }),
    };
    y.map(|y| y.to_dtype(out)).transpose()
}

/// The gradient of [`forward`] with respect to `x`, of dimensions `input_dims`, from `grad
/// (b,c_out,h_out,w_out)`, plus `bias (c_in)`: a transposed convolution is this one's gradient.
///
/// A bias wants a `grad` of at least one pixel.
pub(crate) fn dgrad(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    input_dims: &[usize],
    geometry: Geometry,
    out: DType,
) -> Result<Tensor> {
    let shape = Shape::new(input_dims, weight.dims(), geometry)?;
    let algorithm = Algorithm::of(PassKind::Dgrad, [grad, weight], bias, &shape);
    match algorithm {
        Algorithm::Cuda(gpu) => {
            return cuda::run(gpu, PassKind::Dgrad, [grad, weight], bias, &shape, out);
        }
        Algorithm::Portable => return portable::dgrad(grad, weight, bias, &shape, out),
        _ => {}
    }
    algorithm.run(PassKind::Dgrad, &shape, |algorithm| {
        dgrad_by(algorithm, grad, weight, bias, &shape, out)
    })
}

/// [`dgrad`], as [`forward_by`].
fn dgrad_by(
    algorithm: Algorithm,
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Option<Tensor>> {
    if let Algorithm::ViaNchw = algorithm {
        let dims = [shape.batch, shape.c_in, shape.height, shape.width];
        let geometry = shape.geometry.channels_first();
        return to_nhwc(&dgrad(&to_nchw(grad)?, weight, bias, &dims, geometry, out)?).map(Some);
    }
    let (grad, weight) = (&contiguous(grad)?, &contiguous(weight)?);
    let bias = bias.map(contiguous).transpose()?;
    let bias = bias.as_ref();
    let dx = match algorithm {
        Algorithm::Im2colF64 => {
            let bias = bias.map(exact).transpose()?;
            Some(cpu::dgrad::<f64>(&exact(grad)?, &exact(weight)?, bias.as_ref(), shape)?)
        }
        Algorithm::Product => Some(product::dgrad(grad, weight, bias, shape, out)?),
        _ => with_single!(near(grad, out), O => match algorithm {
            Algorithm::Packed(isa) => packed::dgrad::<O>(grad, weight, bias, shape, isa)?,
            Algorithm::PackedNhwc(isa) => nhwc::dgrad::<O>(grad, weight, bias, shape, isa)?,
            Algorithm::Winograd(isa) => {
                winograd::convolve::<O>(grad, weight, bias, shape, Order::Backward, (isa, false))?
            }
            Algorithm::LargeTiles(isa) => {
                winograd::convolve::<O>(grad, weight, bias, shape, Order::Backward, (isa, true))?
            }
            Algorithm::ImagesInLanes(isa) => {
                lanes::convolve::<O>(grad, weight, bias, shape, Order::Backward, isa)?
            }
            Algorithm::Depthwise => depthwise::dgrad::<O>(grad, weight, bias, shape)?,
            Algorithm::DepthwiseRows(v) => {
                depthwise::rows::dgrad::<O>(grad, weight, bias, shape, v)?
            }
            Algorithm::DepthwiseLanes(v) => {
                depthwise::lanes::dgrad::<O>(grad, weight, bias, shape, v)?
            }
            _ => Some(cpu::dgrad::<O>(grad, weight, bias, shape)?),
        }),
    };
    dx.map(|dx| dx.to_dtype(out)).transpose()
}

/// The gradient of [`forward`] with respect to the weight, of dimensions `weight_dims`, from `x (b,c_in,h,w)`
/// and `grad (b,c_out,h_out,w_out)`.
///
/// The sum over the batch has one order, whatever the number of threads.
pub(crate) fn wgrad(
    x: &Tensor,
    grad: &Tensor,
    weight_dims: &[usize],
    geometry: Geometry,
    out: DType,
) -> Result<Tensor> {
    let shape = Shape::new(x.dims(), weight_dims, geometry)?;
    let algorithm = Algorithm::of(PassKind::Wgrad, [x, grad], None, &shape);
    match algorithm {
        Algorithm::Cuda(gpu) => {
            return cuda::run(gpu, PassKind::Wgrad, [x, grad], None, &shape, out);
        }
        Algorithm::Portable => return portable::wgrad(x, grad, &shape, out),
        _ => {}
    }
    algorithm.run(PassKind::Wgrad, &shape, |algorithm| wgrad_by(algorithm, x, grad, &shape, out))
}

/// [`wgrad`], as [`forward_by`].
fn wgrad_by(
    algorithm: Algorithm,
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    out: DType,
) -> Result<Option<Tensor>> {
    if let Algorithm::ViaNchw = algorithm {
        let (x, grad, geometry) = (to_nchw(x)?, to_nchw(grad)?, shape.geometry);
        return wgrad(&x, &grad, &shape.weight_dims(), geometry.channels_first(), out).map(Some);
    }
    let (mut x, mut grad) = (contiguous(x)?, contiguous(grad)?);
    if x.dtype() != grad.dtype() && !matches!(algorithm, Algorithm::Im2colF64) {
        // Rare, and not worth a compiled kernel for each pair.
        (x, grad) = (cast(&x, DType::F32)?, cast(&grad, DType::F32)?);
    }
    let (x, grad) = (&x, &grad);
    let dw = match algorithm {
        Algorithm::Im2colF64 => Some(cpu::wgrad::<f64>(&exact(x)?, &exact(grad)?, shape)?),
        Algorithm::Product => Some(product::wgrad(x, grad, shape, out)?),
        Algorithm::Packed(isa) => packed::wgrad(x, grad, shape, RunSums::RowPanels(isa))?,
        Algorithm::PackedNhwc(isa) => nhwc::wgrad(x, grad, shape, isa)?,
        Algorithm::Winograd(isa) => packed::wgrad(x, grad, shape, RunSums::Tiles(isa.vectors()))?,
        Algorithm::LargeTiles(isa) => {
            packed::wgrad(x, grad, shape, RunSums::LargeTiles(isa.vectors()))?
        }
        Algorithm::FewChannels(isa) => {
            packed::wgrad(x, grad, shape, RunSums::Strips(isa.vectors()))?
        }
        Algorithm::ImagesInLanes(isa) => lanes::wgrad(x, grad, shape, isa)?,
        Algorithm::Depthwise => Some(depthwise::wgrad(x, grad, shape)?),
        Algorithm::DepthwiseRows(v) => depthwise::rows::wgrad(x, grad, shape, v)?,
        Algorithm::DepthwiseLanes(v) => depthwise::lanes::wgrad(x, grad, shape, v)?,
        _ => Some(cpu::wgrad::<f32>(x, grad, shape)?),
    };
    dw.map(|dw| dw.to_dtype(out)).transpose()
}

/// What a kernel with F32 sums writes of this operand, for a result in `out`.
fn near(operand: &Tensor, out: DType) -> DType {
    if is_near(operand.dtype(), out) { out } else { DType::F32 }
}
