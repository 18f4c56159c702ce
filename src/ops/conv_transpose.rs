//! Transposed convolution: the gradient of a convolution in its input, as an operator.

use candle_core::{Result, Tensor};
use candle_nn::{ConvTranspose1dConfig, ConvTranspose2dConfig};

use super::check::{check_dims, check_operand, shape_error};
use super::conv::{FURTHEST, WEIGHTS, check_geometry, expected, gradients, images, of_rank};
use super::wants::{reads_other_operand, trim_operand};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::contiguous;
use crate::kernels::conv::{self, Geometry};
use crate::kernels::tensors::format::Format;

/// The transposed cross-correlation of sequences with `weight`, plus `bias`.
///
/// # Shapes
///
/// `x (b, c_in, l)`, `weight (c_in, c_out / groups, k)`, `bias (c_out)` → `(b, c_out, l_out)`,
/// where `l_out = (l - 1) stride - 2 padding + dilation (k - 1) + output_padding + 1`.
///
/// # Precision
///
/// As [`conv_transpose2d`]. (candle's has no gradient.)
///
/// # Errors
///
/// As [`conv_transpose2d`].
///
/// # References
///
/// `torch.nn.functional.conv_transpose1d`.
pub fn conv_transpose1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: ConvTranspose1dConfig,
) -> Result<Tensor> {
    conv_transpose1d_of(Format::ChannelsFirst, x, weight, bias, config)
}

pub(super) fn conv_transpose1d_of(
    format: Format,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: ConvTranspose1dConfig,
) -> Result<Tensor> {
    let ConvTranspose1dConfig { padding, output_padding, stride, dilation, groups } = config;
    let geometry = Geometry { stride, padding: (0, padding), dilation, groups, format };
    let op = Op::ConvTranspose1d;
    transpose(ConvTranspose { op, geometry, output_padding }, x, weight, bias)
}

/// The transposed cross-correlation of `x` with `weight`, plus `bias`: every pixel of `x` adds its
/// multiple of the kernel to the output, `stride` apart.
///
/// # Shapes
///
/// `x (b, c_in, h, w)`, `weight (c_in, c_out, kh, kw)`, `bias (c_out)` → `(b, c_out, h_out, w_out)`,
/// where `h_out = (h - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1`. In groups:
/// [`conv_transpose2d_grouped`].
///
/// # Precision
///
/// As [`conv2d`](super::conv2d): cast to the compute dtype under autocast, sums in `F32` over all
/// channels and taps, rounded once. Gradients of weight and bias are accumulated as there.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; a stride or dilation of 0; a padding that leaves no
/// output.
///
/// # References
///
/// `torch.nn.functional.conv_transpose2d`.
pub fn conv_transpose2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: ConvTranspose2dConfig,
) -> Result<Tensor> {
    conv_transpose2d_of(Format::ChannelsFirst, x, weight, bias, config, 1)
}

/// As [`conv_transpose2d`], of `groups` of channels that do not see each other, which candle's configuration has no
/// place for.
///
/// # Shapes
///
/// As [`conv_transpose2d`], with `weight (c_in, c_out / groups, kh, kw)`.
///
/// # Precision
///
/// As [`conv_transpose2d`], also under autocast.
///
/// # Errors
///
/// As [`conv_transpose2d`]; a number of groups that does not divide `c_in`.
///
/// # Examples
///
/// Upsampling each channel by itself:
///
/// ```
/// use candle_amp::{nn::ConvTranspose2dConfig, ops};
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::rand(0f32, 1., (2, 8, 5, 5), &Device::Cpu)?;
/// let weight = Tensor::ones((8, 1, 2, 2), DType::F32, &Device::Cpu)?;
/// let config = ConvTranspose2dConfig { stride: 2, ..Default::default() };
/// let y = ops::conv_transpose2d_grouped(&x, &weight, None, config, 8)?;
/// assert_eq!(y.dims(), [2, 8, 10, 10]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.conv_transpose2d` with `groups`.
pub fn conv_transpose2d_grouped(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: ConvTranspose2dConfig,
    groups: usize,
) -> Result<Tensor> {
    conv_transpose2d_of(Format::ChannelsFirst, x, weight, bias, config, groups)
}

pub(super) fn conv_transpose2d_of(
    format: Format,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: ConvTranspose2dConfig,
    groups: usize,
) -> Result<Tensor> {
    let ConvTranspose2dConfig { padding, output_padding, stride, dilation } = config;
    let geometry = Geometry { stride, padding: (padding, padding), dilation, groups, format };
    let op = Op::ConvTranspose2d;
    transpose(ConvTranspose { op, geometry, output_padding }, x, weight, bias)
}

fn transpose(
    op: ConvTranspose,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    check_geometry(op.geometry)?;
    if op.output_padding > FURTHEST {
        let (name, got) = ("output_padding", op.output_padding as f64);
        return Err(ArgumentError::Setting { name, got, expected: "at most 2147483647" }.into());
    }
    match bias {
        Some(bias) => apply(op, &[x, weight, bias]),
        None => apply(op, &[x, weight]),
    }
}

/// A transposed convolution in one dimension or two.
struct ConvTranspose {
    op: Op,
    geometry: Geometry,
    output_padding: usize,
}

/// `size` is `(height, width)` of the image.
impl ConvTranspose {
    /// The rank of `x`, weight and output.
    fn rank(&self) -> usize {
        if self.op == Op::ConvTranspose1d { 3 } else { 4 }
    }

    /// The rows and columns that `output_padding` adds to the output.
    fn output_padding(&self) -> (usize, usize) {
        if self.rank() == 3 { (0, self.output_padding) } else { [self.output_padding; 2].into() }
    }

    /// The output's height and width; none where the padding leaves nothing, or it has more pixels than there are numbers.
    fn out_size(&self, size: (usize, usize), kernel: (usize, usize)) -> Option<(usize, usize)> {
        let Geometry { stride, padding, dilation, .. } = self.geometry;
        let added = self.output_padding();
        let axis = |input: usize, kernel: usize, padding: usize, added: usize| {
            let reach = dilation.checked_mul(kernel.checked_sub(1)?)?.checked_add(1)?;
            let full = input.checked_sub(1)?.checked_mul(stride)?.checked_add(reach)?;
            let full = full.checked_add(added)?;
            full.checked_sub(padding.checked_mul(2)?).filter(|&out| out > 0)
        };
        let height = axis(size.0, kernel.0, padding.0, added.0)?;
        Some((height, axis(size.1, kernel.1, padding.1, added.1)?))
    }

    /// The image, with zeros below and to the right where `output_padding` makes room for them. The
    /// output is the input gradient of a convolution, which has a position wherever one fits.
    fn extend(&self, image: &Tensor) -> Result<Tensor> {
        let (below, right) = self.output_padding();
        let Geometry { stride, format, .. } = self.geometry;
        let height = format.height();
        image.pad_with_zeros(height, 0, below / stride)?.pad_with_zeros(
            height + 1,
            0,
            right / stride,
        )
    }
}

impl Operator for ConvTranspose {
    /// `x`, extended, and the weight; the height and width of `x`.
    type Saved = (Tensor, Tensor, (usize, usize));

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
        let Geometry { padding: (_, padding), groups, format, .. } = self.geometry;
        check_operand(self.op, x, "x", x, false)?;
        check_operand(self.op, x, "weight", weight, true)?;
        let (of_x, of_kernel) = expected(self.rank(), format);
        let pixels = format.height()..format.height() + self.rank() - 2;
        if x.rank() != self.rank() || x.dims()[pixels].contains(&0) {
            return shape_error(self.op, "x", x, format!("{of_x} of at least one pixel"));
        }
        let c_in = x.dims()[format.channels(self.rank())];
        let full = weight.rank() == self.rank() && weight.elem_count() > 0;
        if !full || weight.dims()[0] != c_in || c_in % groups != 0 {
            let expected = format!("({c_in}, c_out / {groups}, {of_kernel}), {groups} | {c_in}");
            return shape_error(self.op, "weight", weight, expected);
        }
        let (image, kernels) = (images(x, format)?, images(weight, WEIGHTS)?);
        let (_, group_out, kh, kw) = kernels.dims4()?;
        let [b, _, h, w] = format.split(image.dims4()?.into());
        let Some((out_h, out_w)) = self.out_size((h, w), (kh, kw)) else {
            let Geometry { stride, dilation, .. } = self.geometry;
            let expected = format!(
                "a kernel that, with {h} x {w} pixels {stride} apart and taps {dilation} apart, reaches beyond the \
                 padding of {padding}, and no further than there are numbers"
            );
            return shape_error(self.op, "weight", weight, expected);
        };
        let Some(c_out) = group_out.checked_mul(groups) else {
            let expected = format!("({c_in}, c_out / {groups}, {of_kernel}), {groups} | {c_in}");
            return shape_error(self.op, "weight", weight, expected);
        };
        if let Some(bias) = bias {
            check_operand(self.op, x, "bias", bias, false)?;
            check_dims(self.op, "bias", bias, &[c_out])?;
        }
        let (image, dims) = (self.extend(&image)?, format.join([b, c_out, out_h, out_w]));
        let y = conv::dgrad(&image, &kernels, bias, &dims, self.geometry, x.dtype())?;
        Ok((of_rank(y, self.rank(), format)?, (image, kernels, (h, w))))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (rank, format) = (self.rank(), self.geometry.format);
        let ((x, weight, (h, w)), gradient) = (ctx.saved, images(ctx.gradient, format)?);
        let dx = ctx.wants[0].map(|out| {
            let dx = conv::forward(&gradient, weight, None, self.geometry, out)?;
            contiguous(&dx.narrow(format.height(), 0, *h)?.narrow(format.height() + 1, 0, *w)?)
        });
        let dweight =
            ctx.wants[1].map(|out| conv::wgrad(&gradient, x, weight.dims(), self.geometry, out));
        gradients([dx, dweight], &gradient, ctx.wants.get(2).copied(), rank, format)
    }
}
