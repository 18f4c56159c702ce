//! Convolution.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Conv1dConfig, Conv2dConfig};

use super::check::{check_dims, check_operand, shape_error};
use super::wants::{reads_other_operand, trim_operand};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::conv::{self, Geometry};
use crate::kernels::reduce;
use crate::kernels::tensors::format::Format;

/// The cross-correlation of sequences with `weight`, plus `bias`.
///
/// # Shapes
///
/// `x (b, c_in, l)`, `weight (c_out, c_in / groups, k)`, `bias (c_out)` → `(b, c_out, l_out)`,
/// where `l_out = (l + 2 padding - dilation (k - 1) - 1) / stride + 1`.
///
/// # Precision
///
/// As [`conv2d`], of which it is the case of one row. (candle's has a wrong weight gradient.)
///
/// # Errors
///
/// As [`conv2d`].
///
/// # References
///
/// `torch.nn.functional.conv1d`.
pub fn conv1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: Conv1dConfig,
) -> Result<Tensor> {
    conv1d_of(Format::ChannelsFirst, x, weight, bias, config)
}

pub(super) fn conv1d_of(
    format: Format,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: Conv1dConfig,
) -> Result<Tensor> {
    let Conv1dConfig { padding, stride, dilation, groups, .. } = config;
    let geometry = Geometry { stride, padding: (0, padding), dilation, groups, format };
    convolve(Conv { op: Op::Conv1d, geometry }, x, weight, bias)
}

/// The cross-correlation of `x` with `weight`, plus `bias`.
///
/// # Shapes
///
/// `x (b, c_in, h, w)`, `weight (c_out, c_in / groups, kh, kw)`, `bias (c_out)` →
/// `(b, c_out, h_out, w_out)`, where `h_out = (h + 2 padding - dilation (kh - 1) - 1) / stride + 1`.
///
/// # Precision
///
/// Under autocast all are cast to the compute dtype. Outside, `x` and `weight` share a dtype; `bias` may
/// have any. Products and sums in `F32` over all channels and taps, rounded once to the dtype of `x`. The
/// gradient of the weight is accumulated in `F32` over the whole batch. That of the bias is summed in `F32` within a block of
/// pixels, and in `F64` over the blocks. Both have one order for any number of threads. On a GPU, cuDNN rounds the gradient of a
/// 16-bit weight to 16 bits once, unless
/// [`set_cudnn_f32_weight_gradients`](crate::backend::set_cudnn_f32_weight_gradients) says otherwise.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; a stride, dilation or number of groups of 0; a stride, dilation or padding
/// beyond 2³¹ - 1.
///
/// # Examples
///
/// candle's CPU has no `BF16` convolution:
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::ones((1, 3, 8, 8), DType::BF16, &Device::Cpu)?;
/// let w = Tensor::ones((4, 3, 3, 3), DType::BF16, &Device::Cpu)?;
/// assert!(x.conv2d(&w, 1, 1, 1, 1).is_err());
/// let y = ops::conv2d(&x, &w, None, Default::default())?;
/// assert_eq!((y.dims4()?, y.dtype()), ((1, 4, 6, 6), DType::BF16));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.conv2d`.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: Conv2dConfig,
) -> Result<Tensor> {
    conv2d_of(Format::ChannelsFirst, x, weight, bias, config)
}

pub(super) fn conv2d_of(
    format: Format,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: Conv2dConfig,
) -> Result<Tensor> {
    let Conv2dConfig { padding, stride, dilation, groups, .. } = config;
    let geometry = Geometry { stride, padding: (padding, padding), dilation, groups, format };
    convolve(Conv { op: Op::Conv2d, geometry }, x, weight, bias)
}

fn convolve(op: Conv, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    check_geometry(op.geometry)?;
    match bias {
        Some(bias) => apply(op, &[x, weight, bias]),
        None => apply(op, &[x, weight]),
    }
}

/// Pixels from one to another, of a stride, a dilation or a padding: what cuDNN takes, and so few that offsets, products
/// of two of them, do not overflow.
pub(super) const FURTHEST: usize = i32::MAX as usize;

pub(super) fn check_geometry(geometry: Geometry) -> Result<()> {
    let Geometry { stride, dilation, groups, padding, .. } = geometry;
    for (name, got) in [("stride", stride), ("dilation", dilation), ("groups", groups)] {
        if got == 0 {
            return Err(ArgumentError::Setting { name, got: 0.0, expected: "at least 1" }.into());
        }
    }
    for (name, got) in [("stride", stride), ("dilation", dilation), ("padding", padding.1)] {
        if got > FURTHEST {
            let expected = "at most 2147483647";
            return Err(ArgumentError::Setting { name, got: got as f64, expected }.into());
        }
    }
    Ok(())
}

/// Sequences as images of one row; images as they are.
pub(super) fn images(tensor: &Tensor, format: Format) -> Result<Tensor> {
    if tensor.rank() == 3 { tensor.unsqueeze(format.height()) } else { Ok(tensor.clone()) }
}

/// Images of one row as sequences, where `rank` is 3.
pub(super) fn of_rank(images: Tensor, rank: usize, format: Format) -> Result<Tensor> {
    if rank == 3 { images.squeeze(format.height()) } else { Ok(images) }
}

/// Weights have one format, whatever images have.
pub(super) const WEIGHTS: Format = Format::ChannelsFirst;

/// What to write of `x` and of a kernel's taps in an error.
pub(super) fn expected(rank: usize, format: Format) -> (&'static str, &'static str) {
    match (rank, format) {
        (3, Format::ChannelsFirst) => ("(b, c_in, l)", "k"),
        (3, Format::ChannelsLast) => ("(b, l, c_in)", "k"),
        (_, Format::ChannelsFirst) => ("(b, c_in, h, w)", "kh, kw"),
        (_, Format::ChannelsLast) => ("(b, h, w, c_in)", "kh, kw"),
    }
}

/// A convolution in one dimension or two.
struct Conv {
    op: Op,
    geometry: Geometry,
}

impl Conv {
    /// The rank of `x`, weight and output.
    fn rank(&self) -> usize {
        if self.op == Op::Conv1d { 3 } else { 4 }
    }
}

impl Operator for Conv {
    /// `x` and the weight.
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        self.op
    }

    fn reads(&self, input: usize, wanted: &[bool]) -> bool {
        reads_other_operand(input, wanted)
    }

    fn trim(&self, (x, ..): &mut Self::Saved, wanted: &[bool]) -> Result<()> {
        trim_operand(x, 0, wanted)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (&inputs[0], &inputs[1], inputs.get(2));
        let Geometry { padding, groups, .. } = self.geometry;
        check_operand(self.op, x, "x", x, false)?;
        check_operand(self.op, x, "weight", weight, true)?;
        let format = self.geometry.format;
        let (of_x, of_kernel) = expected(self.rank(), format);
        if x.rank() != self.rank() {
            return shape_error(self.op, "x", x, of_x.into());
        }
        let c_in = x.dims()[format.channels(self.rank())];
        let fits = weight.rank() == self.rank() && {
            let (c_out, c) = (weight.dims()[0], weight.dims()[1]);
            let full = weight.elem_count() > 0;
            full && c.checked_mul(groups) == Some(c_in) && c_out % groups == 0
        };
        if !fits {
            let expected = format!("(c_out, {c_in} / {groups}, {of_kernel}), {groups} | c_out");
            return shape_error(self.op, "weight", weight, expected);
        }
        let (images, kernels) = (images(x, format)?, images(weight, WEIGHTS)?);
        let (c_out, _, kh, kw) = kernels.dims4()?;
        let [_, _, h, w] = format.split(images.dims4()?.into());
        let size = self.geometry.out_size((h, w), (kh, kw));
        if size.0 == 0 || size.1 == 0 {
            let padding = padding.1;
            let expected = format!("a kernel that fits {h} x {w} pixels padded by {padding}");
            return shape_error(self.op, "weight", weight, expected);
        }
        if let Some(bias) = bias {
            check_operand(self.op, x, "bias", bias, false)?;
            check_dims(self.op, "bias", bias, &[c_out])?;
        }
        let y = conv::forward(&images, &kernels, bias, self.geometry, x.dtype())?;
        Ok((of_rank(y, self.rank(), format)?, (images, kernels)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (rank, format) = (self.rank(), self.geometry.format);
        let ((x, weight), gradient) = (ctx.saved, images(ctx.gradient, format)?);
        let dx = ctx.wants[0]
            .map(|out| conv::dgrad(&gradient, weight, None, x.dims(), self.geometry, out));
        let dweight =
            ctx.wants[1].map(|out| conv::wgrad(x, &gradient, weight.dims(), self.geometry, out));
        gradients([dx, dweight], &gradient, ctx.wants.get(2).copied(), rank, format)
    }
}

/// The gradients of image and weight in the user's `rank`, and the bias's, where there is one, from that of the output.
pub(super) fn gradients(
    [dx, dweight]: [Option<Result<Tensor>>; 2],
    gradient: &Tensor,
    bias: Option<Option<DType>>,
    rank: usize,
    format: Format,
) -> Result<Vec<Option<Gradient>>> {
    let mut gradients = Vec::with_capacity(3);
    for (gradient, format) in [(dx, format), (dweight, WEIGHTS)] {
        let gradient = gradient.transpose()?.map(|g| of_rank(g, rank, format));
        gradients.push(gradient.transpose()?);
    }
    if let Some(want) = bias {
        let channels = format.channels(gradient.rank());
        let dbias = want.map(|out| reduce::sum_to_channel(gradient, channels, out));
        gradients.push(dbias.transpose()?);
    }
    Ok(gradients.into_iter().map(|g| g.map(Gradient::owned)).collect())
}
