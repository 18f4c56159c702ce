//! Pooling.

use candle_core::{Result, Tensor, ToUsize2};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::pool::{self, Dims4, Window};
use crate::kernels::tensors::format::Format;

/// The maximum of every window of `x`.
///
/// # Shapes
///
/// `x (b, c, h, w)` → `(b, c, h_out, w_out)`, `h_out = (h + 2 padding - kernel) / stride + 1`; any
/// kernel and stride, padding of at most half the kernel. Each is one number or `(height, width)`.
///
/// # Precision
///
/// The dtype of `x` in and out. NaN wins over everything, padding over nothing. The gradient of a
/// window goes to its first maximum, as in PyTorch; where windows overlap, gradients are summed in
/// `F32`. (candle's is divided by the size of the window.)
///
/// # Errors
///
/// Shapes, a kernel or a padding that do not fit; an image of more than 2³² - 1 pixels.
///
/// # References
///
/// `torch.nn.functional.max_pool2d`.
pub fn max_pool2d(
    x: &Tensor,
    kernel: impl ToUsize2,
    stride: impl ToUsize2,
    padding: impl ToUsize2,
) -> Result<Tensor> {
    max_pool2d_of(Format::ChannelsFirst, x, kernel, stride, padding)
}

pub(super) fn max_pool2d_of(
    format: Format,
    x: &Tensor,
    kernel: impl ToUsize2,
    stride: impl ToUsize2,
    padding: impl ToUsize2,
) -> Result<Tensor> {
    apply(MaxPool2d(window(format, kernel, stride, padding)?), &[x])
}

/// The average of every window of `x`, padding counted as zeros.
///
/// # Shapes
///
/// As [`max_pool2d`].
///
/// # Precision
///
/// The dtype of `x` in and out; sums and gradients in `F32`, rounded once.
///
/// # Errors
///
/// As [`max_pool2d`].
///
/// # References
///
/// `torch.nn.functional.avg_pool2d`.
pub fn avg_pool2d(
    x: &Tensor,
    kernel: impl ToUsize2,
    stride: impl ToUsize2,
    padding: impl ToUsize2,
) -> Result<Tensor> {
    avg_pool2d_of(Format::ChannelsFirst, x, kernel, stride, padding)
}

pub(super) fn avg_pool2d_of(
    format: Format,
    x: &Tensor,
    kernel: impl ToUsize2,
    stride: impl ToUsize2,
    padding: impl ToUsize2,
) -> Result<Tensor> {
    apply(AvgPool2d(window(format, kernel, stride, padding)?), &[x])
}

/// The average of every plane of `x`.
///
/// # Shapes
///
/// `x (b, c, h, w)` → `(b, c)`.
///
/// # Precision
///
/// The dtype of `x` in and out, rounded once. On a CPU, with channels first, the sum of an image is `F32` within a block of
/// elements and `F64` over the blocks. With channels last, and elsewhere, it is `F32`.
///
/// # References
///
/// `torch.nn.functional.adaptive_avg_pool2d` to one pixel.
pub fn global_avg_pool2d(x: &Tensor) -> Result<Tensor> {
    apply(GlobalAvgPool2d(Format::ChannelsFirst), &[x])
}

pub(super) fn global_avg_pool2d_of(format: Format, x: &Tensor) -> Result<Tensor> {
    apply(GlobalAvgPool2d(format), &[x])
}

fn window(
    format: Format,
    kernel: impl ToUsize2,
    stride: impl ToUsize2,
    padding: impl ToUsize2,
) -> Result<Window> {
    let pair = |name, least: usize, (a, b): (usize, usize)| match a.min(b) {
        least_of_two if least_of_two >= least => Ok((a, b)),
        got => Err(ArgumentError::Setting { name, got: got as f64, expected: "at least 1" }),
    };
    let kernel = pair("kernel", 1, kernel.to_usize2())?;
    let stride = pair("stride", 1, stride.to_usize2())?;
    for (name, (a, b)) in [("kernel", kernel), ("stride", stride)] {
        if a.max(b) > i32::MAX as usize {
            let (got, expected) = (a.max(b) as f64, "at most 2147483647");
            return Err(ArgumentError::Setting { name, got, expected }.into());
        }
    }
    let padding = padding.to_usize2();
    if padding.0 > kernel.0 / 2 || padding.1 > kernel.1 / 2 {
        let got = padding.0.max(padding.1) as f64;
        let expected = "at most half the kernel";
        return Err(ArgumentError::Setting { name: "padding", got, expected }.into());
    }
    Ok(Window { kernel, stride, padding, format })
}

fn check(op: Op, x: &Tensor, window: Window) -> Result<()> {
    check_operand(op, x, "x", x, false)?;
    let &[a, b, c, d] = x.dims() else {
        return shape_error(op, "x", x, shape_of(window.format).into());
    };
    let [_, _, h, w] = window.format.split([a, b, c, d]);
    if h == 0 || w == 0 {
        return shape_error(op, "x", x, "at least one pixel".into());
    }
    if !window.fits((h, w)) {
        let kernel = window.kernel;
        return shape_error(op, "x", x, format!("at least as large as the kernel, {kernel:?}"));
    }
    // Pixels, and windows, are numbered by U32.
    if h.checked_mul(w).is_none_or(|pixels| pixels > u32::MAX as usize) {
        let expected =
            format!("{} of at most {} pixels an image", shape_of(window.format), u32::MAX);
        return shape_error(op, "x", x, expected);
    }
    Ok(())
}

pub(super) fn shape_of(format: Format) -> &'static str {
    match format {
        Format::ChannelsFirst => "(b, c, h, w)",
        Format::ChannelsLast => "(b, h, w, c)",
    }
}

struct MaxPool2d(Window);

impl Operator for MaxPool2d {
    /// Where each maximum was, and the dimensions of the input.
    type Saved = (Tensor, Dims4);

    fn op(&self) -> Op {
        Op::MaxPool2d
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let x = &inputs[0];
        check(self.op(), x, self.0)?;
        let (y, index) = pool::max_forward(x, self.0)?;
        Ok((y, (index, x.dims4()?)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (index, dims) = ctx.saved;
        let dx =
            ctx.wants[0].map(|out| pool::max_backward(ctx.gradient, index, *dims, self.0, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}

struct AvgPool2d(Window);

impl Operator for AvgPool2d {
    /// The dimensions of the input.
    type Saved = Dims4;

    fn op(&self) -> Op {
        Op::AvgPool2d
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let x = &inputs[0];
        check(self.op(), x, self.0)?;
        Ok((pool::avg_forward(x, self.0)?, x.dims4()?))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let dx = ctx.wants[0].map(|out| pool::avg_backward(ctx.gradient, *ctx.saved, self.0, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}

struct GlobalAvgPool2d(Format);

impl Operator for GlobalAvgPool2d {
    /// The dimensions of the input.
    type Saved = Dims4;

    fn op(&self) -> Op {
        Op::GlobalAvgPool2d
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let pixels = match x.dims4() {
            Ok(dims) => self.0.split(dims.into())[2..].iter().product(),
            Err(_) => 0,
        };
        if pixels == 0 {
            let expected = format!("{}, at least one pixel", shape_of(self.0));
            return shape_error(self.op(), "x", x, expected);
        }
        Ok((pool::global_avg_forward(x, self.0)?, x.dims4()?))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let dx = ctx.wants[0]
            .map(|out| pool::global_avg_backward(ctx.gradient, *ctx.saved, self.0, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}
