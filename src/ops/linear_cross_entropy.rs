//! The end of a language model: logits that only their loss sees.

use candle_core::{Result, Tensor};

use super::loss::{ClassSettings, of_targets};
use super::product;
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::gemm::gemm;
use crate::kernels::loss::{self, ClassLoss, LogitsGradient};

/// The mean cross entropy of `x · weightᵀ + bias` with the classes `targets`.
///
/// [`linear`](super::linear) and [`cross_entropy`](super::cross_entropy) in one, with the same numbers. Nobody else sees
/// the logits, so they can have the size that is fastest. On a GPU, 1,024 classes and more are padded with zeros to a
/// multiple of 64, which tensor cores need for their full speed. GPT-2 has 50,257.
///
/// [`nn::CrossEntropyLoss::forward_linear`](crate::nn::CrossEntropyLoss::forward_linear) has an `ignore_index`, class weights
/// and other reductions.
///
/// # Shapes
///
/// `x (…, k)`, `weight (classes, k)`, `bias (classes)`, `targets` as `x` without `k` → `()`.
///
/// # Precision
///
/// Under autocast `x`, `weight` and `bias` are cast to the compute dtype. Outside, `x` and `weight` share a dtype;
/// `bias` may have any. Products, sums and the bias are added up in `F32`, and the logits rounded once to the dtype of
/// `x`, as are their gradients. From there on as [`cross_entropy`](super::cross_entropy); the loss is `F32` (`F64` for `F64`).
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit, and as [`cross_entropy`](super::cross_entropy).
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::ones((2, 3, 8), DType::BF16, &Device::Cpu)?;
/// let table = Tensor::zeros((50257, 8), DType::BF16, &Device::Cpu)?;
/// let next = Tensor::new(&[[1u32, 2, 3], [4, 5, 50256]], &Device::Cpu)?;
/// let loss = ops::linear_cross_entropy(&x, &table, None, &next)?;
/// assert!((loss.to_scalar::<f32>()? - 50257f32.ln()).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.linear_cross_entropy`, without its chunks: the logits are kept, and become their gradient
/// where a scaler's backward frees them.
pub fn linear_cross_entropy(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
) -> Result<Tensor> {
    linear_cross_entropy_smoothed(x, weight, bias, targets, 0.0)
}

/// As [`linear_cross_entropy`], with targets of `1 - label_smoothing`, the rest spread over all classes.
///
/// # Errors
///
/// As [`linear_cross_entropy`], and a `label_smoothing` below 0 or above 1.
pub fn linear_cross_entropy_smoothed(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    label_smoothing: f64,
) -> Result<Tensor> {
    linear_cross_entropy_with(x, weight, bias, targets, ClassSettings::smoothed(label_smoothing))
}

pub(crate) fn linear_cross_entropy_with(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    targets: &Tensor,
    settings: ClassSettings,
) -> Result<Tensor> {
    settings.check(Op::LinearCrossEntropy)?;
    let inputs: Vec<&Tensor> = [x, weight, targets].into_iter().chain(bias).collect();
    apply(LinearCrossEntropy(settings), &inputs)
}

struct LinearCrossEntropy(ClassSettings);

struct Saved {
    loss: ClassLoss,
    x: Tensor,
    /// With rows of zeros after the classes, as many as logits have.
    weight: Tensor,
    logits: Tensor,
    targets: Tensor,
    log_sum_exp: Tensor,
    total: Option<Tensor>,
}

impl Operator for LinearCrossEntropy {
    type Saved = Saved;

    fn op(&self) -> Op {
        Op::LinearCrossEntropy
    }

    fn captured(&self, in_backward: bool) -> Vec<&Tensor> {
        self.0.captured(in_backward)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let (x, weight, targets, bias) = (&inputs[0], &inputs[1], &inputs[2], inputs.get(3));
        let classes = product::outputs(self.op(), x, weight, bias)?;
        let dims = &x.dims()[..x.rank() - 1];
        let (loss, targets) = self.0.of_rows(self.op(), ("x", x), classes, targets, dims)?;
        let room = loss::room(classes, x.device());
        let weight = loss::with_room(weight, room)?;
        let bias = bias.map(|bias| loss::with_room(bias, room)).transpose()?;
        let logits = gemm(&product::rows(x)?, &weight.t()?, bias.as_ref(), x.dtype())?;
        let (reduced, log_sum_exp) = loss::cross_entropy_forward(&loss, &logits, &targets)?;
        let y = of_targets(&loss, reduced.loss, dims)?;
        let (x, total) = (x.clone(), reduced.total);
        Ok((y, Saved { loss, x, weight, logits, targets, log_sum_exp, total }))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Saved { loss, x, weight, logits, targets, log_sum_exp, total } = ctx.saved;
        let (total, gradient) = (total.as_ref(), ctx.gradient);
        let of = LogitsGradient { loss, logits, targets, log_sum_exp, total, gradient };
        // As large as logits, which nobody else has.
        let dlogits = match ctx.last {
            true => loss::cross_entropy_backward_assign(of)?,
            false => loss::cross_entropy_backward(of, logits.dtype())?,
        };
        let wants = [ctx.wants[0], ctx.wants[1], ctx.wants.get(3).copied().flatten()];
        let [dx, dweight, dbias] = product::gradients(x, weight, &dlogits, wants)?;
        let of_classes =
            |all: Option<Tensor>| all.map(|all| all.narrow(0, 0, loss.classes)).transpose();
        let all = [dx, of_classes(dweight)?, None, of_classes(dbias)?];
        Ok(all.into_iter().take(ctx.wants.len()).map(|dx| dx.map(Gradient::owned)).collect())
    }
}
