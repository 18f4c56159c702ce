//! Losses of an input and a target of one shape.

use candle_core::{DType, Result, Tensor};

use super::Reduction;
use super::check::{check_dims, check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply, of_one_16_bit_dtype};
use crate::error::ArgumentError;
use crate::kernels::loss::{self, LossArgument, Pairwise};

/// The mean of `(input - target)²`.
///
/// # Shapes
///
/// Both of one shape → `()`.
///
/// # Precision
///
/// Under autocast both are cast to `F32`; outside they share a dtype. Differences and squares are `F32`. Their sum is `F32`
/// within a block of elements and `F64` over the blocks. The loss is `F32` even for 16-bit inputs (`F64` for `F64`). Both
/// get gradients.
///
/// # Errors
///
/// Shapes, dtypes or devices that differ.
///
/// # References
///
/// `torch.nn.functional.mse_loss`.
pub fn mse(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    pair_loss(Pairwise::Mse, Reduction::Mean, input, target)
}

/// The mean of `(input - target)² / 2` where that is no further apart than `delta`, and of
/// `delta (|input - target| - delta / 2)` beyond.
///
/// # Shapes, precision
///
/// As [`mse`].
///
/// # Errors
///
/// As [`mse`]; a `delta` that is not above 0.
///
/// # References
///
/// `torch.nn.functional.huber_loss`.
pub fn huber(input: &Tensor, target: &Tensor, delta: f64) -> Result<Tensor> {
    huber_with(input, target, delta, Reduction::Mean)
}

pub(crate) fn huber_with(
    input: &Tensor,
    target: &Tensor,
    delta: f64,
    reduction: Reduction,
) -> Result<Tensor> {
    if !(delta > 0.0 && delta.is_finite()) {
        let expected = "a finite number above 0";
        return Err(ArgumentError::Setting { name: "delta", got: delta, expected }.into());
    }
    pair_loss(Pairwise::Huber { delta }, reduction, input, target)
}

/// The mean of `|input - target|`.
///
/// # Shapes, errors
///
/// As [`mse`].
///
/// # Precision
///
/// As [`mse`]. The derivative is -1, 0 or 1: 0 where both are equal. Where a difference is NaN, so is its derivative;
/// PyTorch's is 0.
///
/// # Examples
///
/// ```
/// use candle_amp::{Autocast, ops};
/// use candle_core::{DType, Device, Tensor};
///
/// let (x, y) = (Tensor::ones(4096, DType::F16, &Device::Cpu)?, Tensor::zeros(4096, DType::F16, &Device::Cpu)?);
/// let loss = Autocast::new(DType::F16).scope(|| ops::l1(&x, &y))?;
/// assert_eq!(loss.to_scalar::<f32>()?, 1.0); // a sum of 4096 ones is 2048 in F16
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.l1_loss`.
pub fn l1(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    pair_loss(Pairwise::L1, Reduction::Mean, input, target)
}

/// The mean of `target (ln(target) - log_probs)`, 0 where `target` is; NaN where `log_probs` is -∞ too, as in PyTorch.
///
/// As in PyTorch, the mean is over all elements. The divergence of `n` distributions on average, PyTorch's `batchmean`, is
/// the sum of [`nn::KlDivLoss`](crate::nn::KlDivLoss) divided by `n`.
///
/// # Shapes, errors
///
/// As [`mse`].
///
/// # Precision
///
/// As [`mse`]. The derivative in a `target` of 0 is -∞; PyTorch's is NaN.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let log_probs = Tensor::new(&[0.5f32, 0.5], &Device::Cpu)?.log()?;
/// let loss = ops::kl_div(&log_probs, &Tensor::new(&[1f32, 0.0], &Device::Cpu)?)?;
/// assert!((loss.to_scalar::<f32>()? - 2f32.ln() / 2.0).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.kl_div`.
pub fn kl_div(log_probs: &Tensor, target: &Tensor) -> Result<Tensor> {
    let loss = Pairwise::KlDiv { log_target: false };
    pair_loss(loss, Reduction::Mean, log_probs, target)
}

/// The mean binary cross entropy of the probabilities `σ(logits)` with the probabilities `target`.
///
/// # Shapes
///
/// Both of one shape → `()`.
///
/// # Precision
///
/// As [`mse`]. Taken from the logits, without forming the probabilities: no logit is too large.
/// `target` may also be of integers, 0 and 1.
///
/// # Errors
///
/// As [`mse`].
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let (logit, target) = (Tensor::new(&[-200f32], &Device::Cpu)?, Tensor::new(&[1f32], &Device::Cpu)?);
/// let loss = ops::binary_cross_entropy_with_logit(&logit, &target)?;
/// assert_eq!(loss.to_scalar::<f32>()?, 200.0); // candle's is infinite
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.binary_cross_entropy_with_logits`.
pub fn binary_cross_entropy_with_logit(logits: &Tensor, target: &Tensor) -> Result<Tensor> {
    let target = probabilities(logits, target)?;
    pair_loss(Pairwise::BinaryCrossEntropyWithLogit, Reduction::Mean, logits, &target)
}

/// The mean binary cross entropy of the probabilities `input` with the probabilities `target`.
///
/// Prefer [`binary_cross_entropy_with_logit`]: a 16-bit probability is 1 from about 0.9998 (`F16`)
/// or 0.998 (`BF16`) on, and what the loss depends on is its distance from 1. Autocast to a 16-bit
/// dtype therefore refuses this one, as PyTorch's does.
///
/// # Shapes
///
/// Both of one shape → `()`.
///
/// # Precision
///
/// As [`mse`]. Logarithms are bounded by -100, and `p (1 - p)` in the gradient by 1e-12, as in
/// PyTorch.
///
/// # Errors
///
/// As [`mse`]; [`AutocastError::Banned`](crate::error::AutocastError::Banned) in a 16-bit scope.
///
/// # References
///
/// `torch.nn.functional.binary_cross_entropy`.
pub fn binary_cross_entropy(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    let target = probabilities(input, target)?;
    pair_loss(Pairwise::BinaryCrossEntropy, Reduction::Mean, input, &target)
}

pub(crate) fn pair_loss(
    loss: Pairwise,
    reduction: Reduction,
    input: &Tensor,
    target: &Tensor,
) -> Result<Tensor> {
    apply(PairLoss { loss, reduction }, &[input, target])
}

/// `target`, or integers as numbers.
pub(crate) fn probabilities(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    if target.dtype().is_int() { target.to_dtype(input.dtype()) } else { Ok(target.clone()) }
}

struct PairLoss {
    loss: Pairwise,
    reduction: Reduction,
}

impl Operator for PairLoss {
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        match self.loss {
            Pairwise::Mse => Op::Mse,
            Pairwise::Huber { .. } => Op::Huber,
            Pairwise::BinaryCrossEntropy => Op::BinaryCrossEntropy,
            Pairwise::BinaryCrossEntropyWithLogit => Op::BinaryCrossEntropyWithLogit,
            Pairwise::L1 => Op::L1,
            Pairwise::KlDiv { .. } => Op::KlDiv,
        }
    }

    fn widens(&self, inputs: &[DType]) -> bool {
        of_one_16_bit_dtype(inputs)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (input, target) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), input, "input", input, false)?;
        check_operand(self.op(), input, "target", target, true)?;
        check_dims(self.op(), "target", target, input.dims())?;
        if input.elem_count() == 0 && self.reduction == Reduction::Mean {
            return shape_error(self.op(), "input", input, "at least one element".into());
        }
        let y = loss::pairwise_forward(self.loss, self.reduction, input, target)?;
        Ok((y, (input.clone(), target.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (input, target) = ctx.saved;
        let arguments = [LossArgument::Input, LossArgument::Target].into_iter().zip(ctx.wants);
        let gradients = arguments.map(|(argument, want)| {
            let tensors = [input, target, ctx.gradient];
            let derivative =
                |out| loss::pairwise_backward((self.loss, argument), self.reduction, tensors, out);
            want.map(derivative).transpose().map(|derivative| derivative.map(Gradient::owned))
        });
        gradients.collect()
    }
}
