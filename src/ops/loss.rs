//! Losses: `F32` whatever comes in, so that they can be scaled.

use candle_core::{DType, Result, Tensor};

use super::{check_dims, check_operand, shape_error};
use crate::kernels::loss;
use crate::operator::{Backward, Gradient, Operator, apply};
use crate::{Error, Op};

/// The mean cross entropy of `logits` with the classes `targets`.
///
/// # Shapes
///
/// `logits (n, classes)`, `targets (n)` → `()`.
///
/// # Precision
///
/// `logits` in any floating-point dtype, `targets` in `U8`, `U32` or `I64`. Exponentials,
/// logarithm and mean in `F32`; the loss is `F32` even for half logits.
///
/// # Errors
///
/// Shapes that do not fit; a target that is no class, naming its row.
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
    if !(0.0..=1.0).contains(&label_smoothing) {
        let (name, expected) = ("label_smoothing", "a number from 0 to 1");
        return Err(Error::Setting { name, got: label_smoothing, expected }.into());
    }
    apply(CrossEntropy { label_smoothing }, &[logits, targets])
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

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (logits, targets) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), logits, "logits", logits, false)?;
        let &[n, classes] = logits.dims() else {
            return shape_error(self.op(), "logits", logits, "(n, classes)".into());
        };
        if n == 0 || classes == 0 {
            return shape_error(self.op(), "logits", logits, "at least one row and class".into());
        }
        if !matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64) {
            let expected = "U8, U32 or I64 class indices".to_string();
            let (op, got) = (self.op().name(), targets.dtype());
            return Err(Error::DType { op, name: "targets", got, expected }.into());
        }
        check_dims(self.op(), "targets", targets, &[n])?;
        if targets.dtype() == DType::I64 {
            // Before the cast to U32, which would wrap a negative class around.
            let wrong = |&(_, &class): &(usize, &i64)| class < 0 || class >= classes as i64;
            if let Some((row, class)) = targets.to_vec1()?.iter().enumerate().find(wrong) {
                candle_core::bail!(
                    "cross_entropy: the target of row {row} is {class}, expected one of {classes} \
                     classes, from 0"
                )
            }
        }
        let targets = targets.to_dtype(DType::U32)?;
        let (loss, log_sum_exp) =
            loss::cross_entropy_forward(logits, &targets, self.label_smoothing)?;
        Ok((loss, (logits.clone(), targets, log_sum_exp)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (logits, targets, log_sum_exp) = ctx.saved;
        let dlogits = ctx.wants[0].map(|out| {
            loss::cross_entropy_backward(
                logits,
                targets,
                log_sum_exp,
                ctx.gradient,
                self.label_smoothing,
                out,
            )
        });
        Ok(vec![dlogits.transpose()?.map(Gradient::owned), None])
    }
}

/// The mean of `(input - target)²`.
///
/// # Shapes
///
/// Both of one shape → `()`.
///
/// # Precision
///
/// Under autocast both are cast to `F32`; outside they share a dtype. Differences, squares and
/// mean in `F32`; the loss is `F32` even for half inputs. Both get gradients.
///
/// # Errors
///
/// Shapes, dtypes or devices that differ.
///
/// # References
///
/// `torch.nn.functional.mse_loss`.
pub fn mse(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    apply(Mse, &[input, target])
}

struct Mse;

impl Operator for Mse {
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        Op::Mse
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (input, target) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), input, "input", input, false)?;
        check_operand(self.op(), input, "target", target, true)?;
        check_dims(self.op(), "target", target, input.dims())?;
        if input.elem_count() == 0 {
            return shape_error(self.op(), "input", input, "at least one element".into());
        }
        Ok((loss::mse_forward(input, target)?, (input.clone(), target.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (input, target) = ctx.saved;
        let gradient = |a, b, want: Option<DType>| match want {
            Some(out) => loss::mse_backward(a, b, ctx.gradient, out).map(Gradient::owned).map(Some),
            None => Ok(None),
        };
        // The target's gradient is the input's with the two exchanged.
        Ok(vec![gradient(input, target, ctx.wants[0])?, gradient(target, input, ctx.wants[1])?])
    }
}
