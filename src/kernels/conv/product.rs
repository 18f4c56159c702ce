//! 1 × 1 convolutions of stride 1 without padding, as matrix products: each pixel's channels times the weights.
//!
//! With channels last, the pixels of all images are the rows of one product. With channels first, each image is one
//! product of a batch, `weights × image (channels × pixels)`. A product reads all weights, so images with few pixels
//! are moved to channels last, for one product. A wgrad that is a product always is: its sum is over the pixels of all
//! images.
//!
//! A kernel as large as its image gives one pixel, as in a discriminator's last layer; its dgrad is a generator's first. With
//! channels first, that is a 1 × 1 convolution of images of one pixel, with a channel for each element of the image.
//!
//! [`suits`] leaves the other cases to packed convolutions. With channels first a column is a pixel, so a product
//! cannot add a bias. For some passes, packed convolutions avoid copies or transposes that a product makes.

use candle_core::{DType, Result, Tensor};

use super::geometry::Geometry;
use super::packed;
use super::shape::Shape;
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::gemm;
use crate::kernels::gemm::micro::InstructionSet;
use crate::kernels::tensors::format::{Format, to_nchw, to_nhwc};

/// Whether this module computes such a pass, of a bias or without.
pub(super) fn suits(
    pass: PassKind,
    operands: [&Tensor; 2],
    bias: Option<&Tensor>,
    shape: &Shape,
) -> bool {
    if one_pixel(shape).is_some() {
        return true;
    }
    let geometry = &shape.geometry;
    let one_tap = (shape.kernel_height, shape.kernel_width) == (1, 1)
        && geometry.stride == 1
        && geometry.padding == (0, 0)
        && geometry.groups == 1;
    let fits = match geometry.format {
        Format::ChannelsLast => true,
        // One sum over all images, moved to channels last, where with channels first each image would be packed by itself.
        Format::ChannelsFirst if pass == PassKind::Wgrad => {
            let bf16 = operands.iter().all(|x| x.dtype() == DType::BF16);
            let few = is_small(shape) || (shape.pixels() <= 256 && bf16);
            few && !packed::reads_wgrad_in_place(operands, shape)
        }
        Format::ChannelsFirst if is_small(shape) => true,
        // A product transposes the weights for each image.
        Format::ChannelsFirst if pass == PassKind::Dgrad && multiplies_pairs(operands, shape) => {
            bias.is_none() && shape.pixels() <= 256
        }
        // The bias of a product is one number per column, and here columns are pixels.
        Format::ChannelsFirst => bias.is_none(),
    };
    one_tap && fits
}

/// The same convolution of images of one pixel, where the kernel is as large as the image.
fn one_pixel(shape: &Shape) -> Option<Shape> {
    let Geometry { padding, dilation, groups, format, .. } = shape.geometry;
    let (image, kernel) = ((shape.height, shape.width), (shape.kernel_height, shape.kernel_width));
    // One that has a single pixel already is 1 × 1.
    let covers = kernel == image && image != (1, 1) && padding == (0, 0) && dilation == 1;
    let c_in = shape.c_in * shape.height * shape.width;
    let geometry = Geometry { stride: 1, ..shape.geometry };
    let (height, width, kernel_height, kernel_width) = (1, 1, 1, 1);
    let one = Shape { c_in, height, width, kernel_height, kernel_width, geometry, ..*shape };
    // With channels last an image has its elements in another order than the weights.
    (covers && groups == 1 && format == Format::ChannelsFirst).then_some(one)
}

/// Whether packed GEMM multiplies pairs of BF16.
fn multiplies_pairs(operands: [&Tensor; 2], shape: &Shape) -> bool {
    shape.c_in.min(shape.c_out) > 1
        && InstructionSet::of(operands) == Some(InstructionSet::Avx512Bf16)
}

/// Whether an image has so few pixels that a product of each would read the weights for little: then all are moved to
/// channels last, for one product.
fn is_small(shape: &Shape) -> bool {
    shape.geometry.format == Format::ChannelsFirst && shape.pixels() < 64
}

fn channels_last(shape: &Shape) -> Shape {
    Shape { geometry: Geometry { format: Format::ChannelsLast, ..shape.geometry }, ..*shape }
}

/// See [`super::forward`]; contiguous operands.
pub(super) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    if let Some(one) = one_pixel(shape) {
        return forward(&x.reshape(&one.input_dims()[..])?, weight, bias, &one, out);
    }
    if is_small(shape) {
        return to_nchw(&forward(&to_nhwc(x)?, weight, bias, &channels_last(shape), out)?);
    }
    let weight = matrix(weight, shape)?;
    let y = match shape.geometry.format {
        Format::ChannelsLast => gemm(&x.reshape(((), shape.c_in))?, &weight.t()?, bias, out)?,
        Format::ChannelsFirst => of_images(&weight, x, shape, out)?,
    };
    y.reshape(&shape.out_dims()[..])
}

/// See [`super::dgrad`]; contiguous operands.
pub(super) fn dgrad(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    if let Some(one) = one_pixel(shape) {
        let pixels = shape.height * shape.width;
        let of_each =
            |bias: &Tensor| bias.unsqueeze(1)?.broadcast_as((shape.c_in, pixels))?.flatten_all();
        let bias = bias.map(of_each).transpose()?;
        let dx = dgrad(grad, weight, bias.as_ref(), &one, out)?;
        return dx.reshape(&shape.input_dims()[..]);
    }
    if is_small(shape) {
        return to_nchw(&dgrad(&to_nhwc(grad)?, weight, bias, &channels_last(shape), out)?);
    }
    let weight = matrix(weight, shape)?;
    let dx = match shape.geometry.format {
        Format::ChannelsLast => gemm(&grad.reshape(((), shape.c_out))?, &weight, bias, out)?,
        Format::ChannelsFirst => of_images(&weight.t()?, grad, shape, out)?,
    };
    dx.reshape(&shape.input_dims()[..])
}

/// See [`super::wgrad`]; contiguous operands.
pub(super) fn wgrad(x: &Tensor, grad: &Tensor, shape: &Shape, out: DType) -> Result<Tensor> {
    if let Some(one) = one_pixel(shape) {
        let dw = wgrad(&x.reshape(&one.input_dims()[..])?, grad, &one, out)?;
        return dw.reshape(&shape.weight_dims()[..]);
    }
    if shape.geometry.format == Format::ChannelsFirst {
        return wgrad(&to_nhwc(x)?, &to_nhwc(grad)?, &channels_last(shape), out);
    }
    let (x, grad) = (x.reshape(((), shape.c_in))?, grad.reshape(((), shape.c_out))?);
    gemm(&grad.t()?, &x, None, out)?.reshape(&shape.weight_dims()[..])
}

/// The weights, `(c_out, c_in)`.
fn matrix(weight: &Tensor, shape: &Shape) -> Result<Tensor> {
    weight.reshape((shape.c_out, shape.c_in))
}

/// `matrix` times each of the images, `(channels, pixels)`.
fn of_images(matrix: &Tensor, images: &Tensor, shape: &Shape, out: DType) -> Result<Tensor> {
    let (rows, channels) = matrix.dims2()?;
    let images = images.reshape((shape.batch, channels, shape.pixels()))?;
    gemm(&matrix.broadcast_as((shape.batch, rows, channels))?, &images, None, out)
}
