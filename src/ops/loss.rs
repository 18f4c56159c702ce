//! Losses: `F32` whatever comes in, so that they can be scaled.

use candle_core::{DType, Result, Tensor};

use super::{check_dims, check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply, of_one_half};
use crate::error::ArgumentError;
use crate::error::bail;
use crate::kernels::{embedding, loss};

/// The mean cross entropy of `logits` with the classes `targets`. Of the logits of a language model's head,
/// [`linear_cross_entropy`](super::linear_cross_entropy) is faster on a GPU.
///
/// # Shapes
///
/// `logits (n, classes)`, `targets (n)` → `()`.
///
/// # Precision
///
/// `logits` in any floating-point dtype, `targets` in `U8`, `U32` or `I64`. Exponentials,
/// logarithm and mean in `F32`; the loss is `F32` even for 16-bit logits.
///
/// # Errors
///
/// Shapes that do not fit; a target that is no class, naming its row. On a CUDA device nobody waits
/// to look at the targets: one that is no class makes the loss NaN.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor};
///
/// let logits = Tensor::zeros((1, 50257), DType::BF16, &Device::Cpu)?;
/// let loss = ops::cross_entropy(&logits, &Tensor::new(&[3u32], &Device::Cpu)?)?;
/// assert!((loss.to_scalar::<f32>()? - 50257f32.ln()).abs() < 1e-5); // candle says 5.5, not 10.8
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.cross_entropy`.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_smoothed(logits, targets, 0.0)
}

/// As [`cross_entropy`], with targets of `1 - label_smoothing`, the rest spread over all classes.
///
/// # Errors
///
/// As [`cross_entropy`], and a `label_smoothing` below 0 or above 1.
pub fn cross_entropy_smoothed(
    logits: &Tensor,
    targets: &Tensor,
    label_smoothing: f64,
) -> Result<Tensor> {
    check_smoothing(label_smoothing)?;
    apply(CrossEntropy { label_smoothing }, &[logits, targets])
}

pub(super) fn check_smoothing(label_smoothing: f64) -> Result<()> {
    if !(0.0..=1.0).contains(&label_smoothing) {
        let (name, expected) = ("label_smoothing", "a number from 0 to 1");
        return Err(ArgumentError::Setting { name, got: label_smoothing, expected }.into());
    }
    Ok(())
}

/// What a loss expects of its first argument, which has `n` rows.
pub(super) fn rows_and_classes(n: usize) -> String {
    let most = "at least one row and class";
    match n {
        0 => format!(
            "{most}: where every row of a batch is ignored, and none left, skip the batch, whose mean is NaN"
        ),
        _ => most.into(),
    }
}

struct CrossEntropy {
    label_smoothing: f64,
}

impl Operator for CrossEntropy {
    /// Logits, targets, log-sum-exp.
    type Saved = (Tensor, Tensor, Tensor);

    fn op(&self) -> Op {
        Op::CrossEntropy
    }

    fn widens(&self, inputs: &[DType]) -> bool {
        of_one_half(inputs)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (logits, targets) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), logits, "logits", logits, false)?;
        let &[n, classes] = logits.dims() else {
            return shape_error(self.op(), "logits", logits, "(n, classes)".into());
        };
        if n == 0 || classes == 0 {
            return shape_error(self.op(), "logits", logits, rows_and_classes(n));
        }
        let targets = class_indices(self.op(), targets, n, classes)?;
        let (loss, log_sum_exp) =
            loss::cross_entropy_forward(logits, &targets, classes, self.label_smoothing)?;
        Ok((loss, (logits.clone(), targets, log_sum_exp)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (logits, targets, log_sum_exp) = ctx.saved;
        let dlogits = ctx.wants[0].map(|out| {
            let tensors = [logits, targets, log_sum_exp, ctx.gradient];
            loss::cross_entropy_backward(tensors, logits.dim(1)?, self.label_smoothing, out)
        });
        Ok(vec![dlogits.transpose()?.map(Gradient::owned), None])
    }
}

/// `targets` as `U32`: the classes of `n` rows.
pub(super) fn class_indices(op: Op, targets: &Tensor, n: usize, classes: usize) -> Result<Tensor> {
    if !matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64) {
        let expected = "U8, U32 or I64 class indices".to_string();
        let (op, got) = (op.name(), targets.dtype());
        return Err(ArgumentError::DType { op, name: "targets", got, expected }.into());
    }
    check_dims(op, "targets", targets, &[n])?;
    if targets.dtype() == DType::I64 && !targets.device().is_cuda() {
        // Before the cast to U32, which would wrap a negative class around.
        let wrong = |&(_, &class): &(usize, &i64)| class < 0 || class >= classes as i64;
        if let Some((row, class)) = targets.to_vec1()?.iter().enumerate().find(wrong) {
            let op = op.name();
            bail!("{op}: the target of row {row} is {class}, expected {}", loss::class_of(classes))
        }
    }
    embedding::numbers(targets)
}

/// Minus the mean of the log-probabilities of the classes `targets`.
///
/// # Shapes
///
/// `log_probs (n, classes)`, as [`log_softmax`](super::log_softmax) gives them, `targets (n)` → `()`.
///
/// # Precision
///
/// `log_probs` in any floating-point dtype, `targets` in `U8`, `U32` or `I64`; the mean and the
/// loss in `F32`.
///
/// # Errors
///
/// As [`cross_entropy`].
///
/// # References
///
/// `torch.nn.functional.nll_loss`.
pub fn nll(log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    apply(Nll, &[log_probs, targets])
}

struct Nll;

impl Operator for Nll {
    /// Targets, and the number of classes.
    type Saved = (Tensor, usize);

    fn op(&self) -> Op {
        Op::Nll
    }

    fn widens(&self, inputs: &[DType]) -> bool {
        of_one_half(inputs)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (log_probs, targets) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), log_probs, "log_probs", log_probs, false)?;
        let &[n, classes] = log_probs.dims() else {
            return shape_error(self.op(), "log_probs", log_probs, "(n, classes)".into());
        };
        if n == 0 || classes == 0 {
            return shape_error(self.op(), "log_probs", log_probs, rows_and_classes(n));
        }
        let targets = class_indices(self.op(), targets, n, classes)?;
        Ok((loss::nll_forward(log_probs, &targets)?, (targets, classes)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (targets, classes) = ctx.saved;
        let dx = ctx.wants[0].map(|out| loss::nll_backward(targets, *classes, ctx.gradient, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned), None])
    }
}
