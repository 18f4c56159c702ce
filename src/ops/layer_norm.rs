//! Normalisation of the last dimension.

use candle_core::{Result, Tensor};

use super::check::{check_dims, check_eps, check_operand, shape_error};
use super::wants::affine_wants;
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::layer_norm as kernel;

/// Normalises each row of the last dimension by its own mean and variance, then scales and shifts
/// it.
///
/// # Shapes
///
/// `x (…, d)`, `weight (d)`, `bias (d)` → that of `x`.
///
/// # Precision
///
/// `x` in any floating-point dtype, which the result has too; `weight` and `bias` in any.
/// Statistics are taken in two passes, so that a large mean costs no digits. They, the normalisation and all gradients are
/// in `F32`. Rounded once, together with that of a residual which left `x` before.
///
/// On a CPU, the sums of a row are `F32` within a block of elements and `F64` over the blocks; elsewhere they are `F32`. The
/// gradients of weight and bias are summed in `F32` over a few rows, and these sums in `F64`, in one order for any number of
/// threads. With [`Policy::pytorch`](crate::Policy::pytorch), `F32` in and out.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; an `eps` below zero.
///
/// # Examples
///
/// candle's fused layer norm gives no gradient; this one does:
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor, Var};
///
/// let x = Tensor::new(&[[1f32, 2., 3.], [4., 6., 8.]], &Device::Cpu)?;
/// let weight = Var::new(&[1f32, 1., 1.], &Device::Cpu)?;
/// let bias = Var::zeros(3, x.dtype(), x.device())?;
/// let theirs = candle_nn::ops::layer_norm(&x, &weight, &bias, 1e-5)?;
/// assert!(theirs.sum_all()?.backward()?.get(&bias).is_none());
/// let ours = ops::layer_norm(&x, Some(&weight), Some(&bias), 1e-5)?;
/// let grads = ours.sum_all()?.backward()?;
/// assert_eq!(grads.get(&bias).unwrap().to_vec1::<f32>()?, [2.0; 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// Ba, Kiros and Hinton, [Layer Normalization](https://arxiv.org/abs/1607.06450);
/// `torch.nn.functional.layer_norm` over one dimension.
pub fn layer_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    row_norm(x, weight, bias, eps, true)
}

/// Divides each row of the last dimension by the root of its mean square, then scales it.
///
/// # Shapes
///
/// `x (…, d)`, `weight (d)` → that of `x`.
///
/// # Precision, errors
///
/// As [`layer_norm`].
///
/// # References
///
/// Zhang and Sennrich, [Root Mean Square Layer Normalization](https://arxiv.org/abs/1910.07467);
/// `torch.nn.functional.rms_norm` over one dimension.
pub fn rms_norm(x: &Tensor, weight: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    row_norm(x, weight, None, eps, false)
}

/// [`layer_norm`] where `centred`, else [`rms_norm`] with a bias.
pub(crate) fn row_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    centred: bool,
) -> Result<Tensor> {
    check_eps(eps)?;
    let op = RowNorm { eps, centred, weight: weight.is_some() };
    let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    apply(op, &inputs)
}

struct RowNorm {
    eps: f64,
    /// Whether the mean is taken off.
    centred: bool,
    /// Whether the second input is the weight.
    weight: bool,
}

struct Saved {
    x: Tensor,
    weight: Option<Tensor>,
    statistics: Tensor,
}

impl Operator for RowNorm {
    type Saved = Saved;

    fn op(&self) -> Op {
        if self.centred { Op::LayerNorm } else { Op::RmsNorm }
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let Some(&d) = x.dims().last().filter(|&&d| d > 0) else {
            return shape_error(self.op(), "x", x, "(…, d), at least one element a row".into());
        };
        let mut affine = inputs[1..].iter();
        let weight = if self.weight { affine.next() } else { None };
        let bias = affine.next();
        for (name, tensor) in [("weight", weight), ("bias", bias)] {
            let Some(tensor) = tensor else { continue };
            check_operand(self.op(), x, name, tensor, false)?;
            check_dims(self.op(), name, tensor, &[d])?;
        }
        let (y, statistics) = kernel::forward(x, weight, bias, self.eps, self.centred)?;
        Ok((y, Saved { x: x.clone(), weight: weight.cloned(), statistics }))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Saved { x, weight, statistics } = ctx.saved;
        let (wants, given) = affine_wants(ctx.wants, self.weight);
        let (grad, weight) = (ctx.gradient, weight.as_ref());
        // A residual's, mostly.
        let adds = wants[0].is_some_and(|want| kernel::adds(x.dtype(), want));
        let pending = if adds { ctx.take_pending(0)? } else { None };
        let pending = pending.as_ref().map(Gradient::tensor);
        let gradients =
            kernel::backward(x, grad, weight, statistics, self.centred, wants, pending)?;
        let gradients = gradients.into_iter().zip(given).filter(|&(_, given)| given);
        Ok(gradients.map(|(gradient, _)| gradient.map(Gradient::owned)).collect())
    }
}
