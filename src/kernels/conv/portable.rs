//! The convolutions out of candle's operators.

use candle_core::{DType, Result, Tensor};

use super::super::gemm::arithmetic;
use super::shape::Shape;

/// See [`super::forward`].
pub(super) fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    let wide = arithmetic([Some(x), Some(weight), bias]);
    let dims = &shape.out_dims();
    let mut y = if dims.contains(&0) {
        Tensor::zeros(dims, wide, x.device())?
    } else {
        convolve(&widen(x, wide)?, &widen(weight, wide)?, shape)?
    };
    if let Some(bias) = bias {
        y = y.broadcast_add(&widen(bias, wide)?.reshape((1, shape.c_out, 1, 1))?)?;
    }
    y.to_dtype(out)?.contiguous()
}

/// See [`super::dgrad`].
pub(super) fn dgrad(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    let wide = arithmetic([Some(grad), Some(weight), bias]);
    let dims = &shape.input_dims();
    if dims.contains(&0) || grad.elem_count() == 0 {
        return Tensor::zeros(dims, out, grad.device());
    }
    let (grad, weight) = (widen(grad, wide)?, widen(weight, wide)?);
    let (ins, outs) = (shape.group_in(), shape.group_out());
    let groups = (0..shape.geometry.groups).map(|group| {
        let grad = grad.narrow(1, group * outs, outs)?.contiguous()?;
        let weight = weight.narrow(0, group * outs, outs)?.contiguous()?;
        // Without padding: the edge that a stride of several pixels leaves over is added by hand,
        // and the padding cut off.
        let geometry = shape.geometry;
        let full = grad.conv_transpose2d(&weight, 0, 0, geometry.stride, geometry.dilation)?;
        let (_, _, height, width) = full.dims4()?;
        full.pad_with_zeros(2, 0, shape.padded_height() - height)?
            .pad_with_zeros(3, 0, shape.padded_width() - width)?
            .narrow(1, 0, ins)?
            .narrow(2, geometry.padding.0, shape.height)?
            .narrow(3, geometry.padding.1, shape.width)
    });
    let mut dx = Tensor::cat(&groups.collect::<Result<Vec<_>>>()?, 1)?;
    if let Some(bias) = bias {
        dx = dx.broadcast_add(&widen(bias, wide)?.reshape((1, shape.c_in, 1, 1))?)?;
    }
    dx.to_dtype(out)?.contiguous()
}

/// See [`super::wgrad`].
pub(super) fn wgrad(x: &Tensor, grad: &Tensor, shape: &Shape, out: DType) -> Result<Tensor> {
    let wide = arithmetic([Some(x), Some(grad)]);
    let dims = &shape.weight_dims();
    if x.elem_count() == 0 || grad.elem_count() == 0 {
        return Tensor::zeros(dims, out, x.device());
    }
    let (x, grad) = (pad(&widen(x, wide)?, shape)?, widen(grad, wide)?);
    let (ins, outs) = (shape.group_in(), shape.group_out());
    let geometry = shape.geometry;
    let groups = (0..geometry.groups).map(|group| {
        // The images become the channels of a convolution by the gradient, whose stride and
        // dilation change places.
        let x = x.narrow(1, group * ins, ins)?.transpose(0, 1)?.contiguous()?;
        let grad = grad.narrow(1, group * outs, outs)?.transpose(0, 1)?.contiguous()?;
        x.conv2d(&grad, 0, geometry.dilation, geometry.stride, 1)?
            .transpose(0, 1)?
            .narrow(2, 0, shape.kernel_height)?
            .narrow(3, 0, shape.kernel_width)
    });
    let groups = groups.collect::<Result<Vec<_>>>()?;
    Tensor::cat(&groups, 0)?.to_dtype(out)?.contiguous()
}

/// candle's convolution, group by group.
fn convolve(x: &Tensor, weight: &Tensor, shape: &Shape) -> Result<Tensor> {
    let (ins, outs) = (shape.group_in(), shape.group_out());
    let (geometry, x) = (shape.geometry, pad(x, shape)?);
    let groups = (0..geometry.groups).map(|group| {
        let x = x.narrow(1, group * ins, ins)?.contiguous()?;
        let weight = weight.narrow(0, group * outs, outs)?.contiguous()?;
        x.conv2d(&weight, 0, geometry.stride, geometry.dilation, 1)
    });
    Tensor::cat(&groups.collect::<Result<Vec<_>>>()?, 1)
}

/// By hand, as candle pads both dimensions alike.
fn pad(x: &Tensor, shape: &Shape) -> Result<Tensor> {
    let (above, left) = shape.geometry.padding;
    x.pad_with_zeros(2, above, above)?.pad_with_zeros(3, left, left)
}

fn widen(tensor: &Tensor, wide: DType) -> Result<Tensor> {
    tensor.detach().to_dtype(wide)?.contiguous()
}
