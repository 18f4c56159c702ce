//! Convolution.

use candle_core::{Result, Tensor};
use candle_nn::Conv2dConfig;

use super::{check_dims, check_operand, shape_error};
use crate::kernels::conv2d::{self, Geometry};
use crate::kernels::reduce;
use crate::operator::{Backward, Gradient, Operator, apply};
use crate::{Error, Op};

/// The cross-correlation of `x` with `weight`, plus `bias`.
///
/// # Shapes
///
/// `x (b, c_in, h, w)`, `weight (c_out, c_in / groups, kh, kw)`, `bias (c_out)` →
/// `(b, c_out, h_out, w_out)`, where `h_out = (h + 2 padding - dilation (kh - 1) - 1) / stride + 1`.
///
/// # Precision
///
/// Under autocast all are cast to the compute dtype. Outside, `x` and `weight` share a dtype;
/// `bias` may have any. Products and sums in `F32` over all channels and taps, rounded once to the
/// dtype of `x`. The gradients of weight and bias are accumulated in `F32` over the whole batch, in
/// one order for any number of threads.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; a stride, dilation or number of groups of 0.
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
    let Conv2dConfig { padding, stride, dilation, groups, .. } = config;
    for (name, got) in [("stride", stride), ("dilation", dilation), ("groups", groups)] {
        if got == 0 {
            return Err(Error::Setting { name, got: 0.0, expected: "at least 1" }.into());
        }
    }
    let op = Conv2d(Geometry { stride, padding, dilation, groups });
    match bias {
        Some(bias) => apply(op, &[x, weight, bias]),
        None => apply(op, &[x, weight]),
    }
}

struct Conv2d(Geometry);

impl Operator for Conv2d {
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        Op::Conv2d
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (&inputs[0], &inputs[1], inputs.get(2));
        let Geometry { padding, groups, .. } = self.0;
        check_operand(self.op(), x, "x", x, false)?;
        check_operand(self.op(), x, "weight", weight, true)?;
        let &[_, c_in, h, w] = x.dims() else {
            return shape_error(self.op(), "x", x, "(b, c_in, h, w)".into());
        };
        let fits = match *weight.dims() {
            [c_out, c, kh, kw] => {
                kh > 0 && kw > 0 && c * groups == c_in && c_out % groups == 0 && c_out > 0
            }
            _ => false,
        };
        if !fits {
            let expected = format!("(c_out, {c_in} / {groups}, kh, kw), {groups} | c_out");
            return shape_error(self.op(), "weight", weight, expected);
        }
        let (c_out, _, kh, kw) = weight.dims4()?;
        if self.0.out_size(h, kh) == 0 || self.0.out_size(w, kw) == 0 {
            let expected = format!("a kernel that fits {h} x {w} pixels padded by {padding}");
            return shape_error(self.op(), "weight", weight, expected);
        }
        if let Some(bias) = bias {
            check_operand(self.op(), x, "bias", bias, false)?;
            check_dims(self.op(), "bias", bias, &[c_out])?;
        }
        let y = conv2d::forward(x, weight, bias, self.0, x.dtype())?;
        Ok((y, (x.clone(), weight.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (x, weight) = ctx.saved;
        let dx = ctx.wants[0]
            .map(|out| conv2d::input_gradient(ctx.gradient, weight, x.dims(), self.0, out));
        let dweight = ctx.wants[1]
            .map(|out| conv2d::weight_gradient(x, ctx.gradient, weight.dims(), self.0, out));
        let mut gradients = vec![dx.transpose()?, dweight.transpose()?];
        if let Some(want) = ctx.wants.get(2) {
            let dbias = want.map(|out| reduce::sum_to_channel(ctx.gradient, 1, out));
            gradients.push(dbias.transpose()?);
        }
        Ok(gradients.into_iter().map(|g| g.map(Gradient::owned)).collect())
    }
}
