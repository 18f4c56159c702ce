//! Losses of classes: `F32` whatever comes in, so that they can be scaled.

use candle_core::{DType, Result, Tensor};

use super::check::{check_dims, check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply, of_one_16_bit_dtype};
use crate::error::{ArgumentError, bail};
use crate::kernels::loss::{self, ClassLoss, LogitsGradient, Reduction};
use crate::kernels::{accumulator, cast, contiguous};

/// The mean cross entropy of `logits` with the classes `targets`.
///
/// [`nn::CrossEntropyLoss`](crate::nn::CrossEntropyLoss) has class weights, an `ignore_index` and other reductions. Of
/// the logits of a language model's head, [`linear_cross_entropy`](super::linear_cross_entropy) is faster on a GPU.
///
/// # Shapes
///
/// `logits (n, classes, …)`, `targets (n, …)` → `()`: for images, a class for each pixel.
///
/// # Precision
///
/// `logits` in any floating-point dtype, `targets` in `U8`, `U32` or `I64`. Exponentials are `F32`. On a CPU their sum is
/// `F32` within a block of elements and `F64` over the blocks; elsewhere it is `F32`. Logarithms and the mean are `F64` on a
/// CPU and on CUDA. The loss is `F32` even for 16-bit logits (`F64` for `F64`).
///
/// # Errors
///
/// Shapes that do not fit; a target that is no class, naming its row. On CUDA they are not
/// checked, as that would synchronise: one that is no class makes the loss NaN.
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
    cross_entropy_with(logits, targets, ClassSettings::smoothed(label_smoothing))
}

pub(crate) fn cross_entropy_with(
    logits: &Tensor,
    targets: &Tensor,
    settings: ClassSettings,
) -> Result<Tensor> {
    settings.check(Op::CrossEntropy)?;
    apply(CrossEntropy(settings), &[logits, targets])
}

/// The settings of a class loss. Class weights are no input of an operator, because autocast casts inputs.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClassSettings {
    pub(crate) weight: Option<Tensor>,
    pub(crate) ignore_index: Option<i64>,
    pub(crate) label_smoothing: f64,
    pub(crate) reduction: Reduction,
}

impl ClassSettings {
    /// For [`Operator::captured`]: forward copies the weights, so only who computes it again reads them once more.
    pub(super) fn captured(&self, in_backward: bool) -> Vec<&Tensor> {
        self.weight.iter().filter(|_| !in_backward).collect()
    }

    pub(super) fn smoothed(label_smoothing: f64) -> Self {
        Self { label_smoothing, ..Self::default() }
    }

    pub(super) fn check(&self, op: Op) -> Result<()> {
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            let (name, expected) = ("label_smoothing", "a number from 0 to 1");
            return Err(ArgumentError::Setting { name, got: self.label_smoothing, expected }.into());
        }
        if self.weight.as_ref().is_some_and(Tensor::track_op) {
            bail!(
                "{}: weight is tracked, and class weights get no gradient: `detach` it",
                op.name()
            )
        }
        Ok(())
    }

    /// What kernels are given, and the classes of the rows as `U32`, of `x`, called `name`, whose rows have `classes`, and
    /// `targets` of the shape `dims`.
    pub(super) fn of_rows(
        &self,
        op: Op,
        (name, x): (&'static str, &Tensor),
        classes: usize,
        targets: &Tensor,
        dims: &[usize],
    ) -> Result<(ClassLoss, Tensor)> {
        if !matches!(targets.dtype(), DType::U8 | DType::U32 | DType::I64) {
            let expected = "U8, U32 or I64 class indices".to_string();
            let (op, got) = (op.name(), targets.dtype());
            return Err(ArgumentError::DType { op, name: "targets", got, expected }.into());
        }
        check_dims(op, "targets", targets, dims)?;
        let n = targets.elem_count();
        if n == 0 || classes == 0 {
            return shape_error(op, name, x, rows_and_classes(n));
        }
        let flat = targets.flatten_all()?;
        let (targets, ignored) = loss::class_targets(op.name(), &flat, classes, self.ignore_index)?;
        if let (Some(ignored), Reduction::Mean) = (ignored, self.reduction)
            && !targets.device().is_cuda()
            && targets.to_vec1::<u32>()?.iter().all(|&target| target == ignored)
        {
            return shape_error(op, name, x, rows_and_classes(0));
        }
        let loss = ClassLoss {
            classes,
            label_smoothing: self.label_smoothing,
            weights: self
                .weight
                .as_ref()
                .map(|weight| {
                    check_operand(op, x, "weight", weight, false)?;
                    check_dims(op, "weight", weight, &[classes])?;
                    // A copy, as the caller may write to it before backward.
                    cast(&weight.copy()?, accumulator(x.dtype()))
                })
                .transpose()?,
            ignored,
            reduction: self.reduction,
        };
        Ok((loss, targets))
    }
}

/// What a loss expects of its first argument, of which `n` rows count.
fn rows_and_classes(n: usize) -> String {
    let most = "at least one row and class";
    match n {
        0 => format!(
            "{most}: where every row of a batch is ignored, by an `ignore_index` or before, skip the batch, whose mean \
             is NaN"
        ),
        _ => most.into(),
    }
}

struct CrossEntropy(ClassSettings);

struct Saved {
    loss: ClassLoss,
    /// Of the logits.
    dims: Vec<usize>,
    /// The logits, `(rows, classes)`.
    rows: Tensor,
    targets: Tensor,
    log_sum_exp: Tensor,
    total: Option<Tensor>,
}

impl Operator for CrossEntropy {
    type Saved = Saved;

    fn op(&self) -> Op {
        Op::CrossEntropy
    }

    fn captured(&self, in_backward: bool) -> Vec<&Tensor> {
        self.0.captured(in_backward)
    }

    fn widens(&self, inputs: &[DType]) -> bool {
        of_one_16_bit_dtype(inputs)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let (logits, targets) = (&inputs[0], &inputs[1]);
        let (rows, dims) = to_rows(self.op(), "logits", logits)?;
        let of = ("logits", logits);
        let (loss, targets) = self.0.of_rows(self.op(), of, rows.dim(1)?, targets, &dims)?;
        let (reduced, log_sum_exp) = loss::cross_entropy_forward(&loss, &rows, &targets)?;
        let total = reduced.total;
        let y = of_targets(&loss, reduced.loss, &dims)?;
        Ok((y, Saved { loss, dims: logits.dims().to_vec(), rows, targets, log_sum_exp, total }))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Saved { loss, dims, rows, targets, log_sum_exp, total } = ctx.saved;
        let total = total.as_ref();
        let dlogits = ctx.wants[0].map(|out| {
            let (logits, gradient) = (rows, ctx.gradient);
            let of = LogitsGradient { loss, logits, targets, log_sum_exp, total, gradient };
            from_rows(loss::cross_entropy_backward(of, out)?, dims)
        });
        Ok(vec![dlogits.transpose()?.map(Gradient::owned), None])
    }
}

/// A loss of the shape of the targets, `dims`, where each row keeps its own.
pub(super) fn of_targets(loss: &ClassLoss, y: Tensor, dims: &[usize]) -> Result<Tensor> {
    if loss.reduction == Reduction::None { y.reshape(dims) } else { Ok(y) }
}

/// `x (n, classes, …)` as rows `(rows, classes)`, and the shape of its targets, `(n, …)`.
fn to_rows(op: Op, name: &'static str, x: &Tensor) -> Result<(Tensor, Vec<usize>)> {
    check_operand(op, x, name, x, false)?;
    let &[n, classes, ref rest @ ..] = x.dims() else {
        return shape_error(op, name, x, "(n, classes) or (n, classes, …)".into());
    };
    let dims = [&[n], rest].concat();
    if rest.is_empty() {
        return Ok((x.clone(), dims));
    }
    let order: Vec<usize> = [0].into_iter().chain(2..x.rank()).chain([1]).collect();
    let rows = contiguous(&x.permute(order)?)?;
    Ok((rows.reshape((dims.iter().product::<usize>(), classes))?, dims))
}

/// Rows `(rows, classes)` as `(n, classes, …)`, of these dimensions.
fn from_rows(rows: Tensor, dims: &[usize]) -> Result<Tensor> {
    let &[n, classes, ref rest @ ..] = dims else { return Ok(rows) };
    if rest.is_empty() {
        return Ok(rows);
    }
    let last = dims.len() - 1;
    let order: Vec<usize> = [0, last].into_iter().chain(1..last).collect();
    contiguous(&rows.reshape([&[n], rest, &[classes]].concat())?.permute(order)?)
}

/// Minus the mean of the log-probabilities of the classes `targets`.
///
/// [`nn::NllLoss`](crate::nn::NllLoss) has class weights, an `ignore_index` and other reductions.
///
/// # Shapes
///
/// `log_probs (n, classes, …)`, as [`log_softmax`](super::log_softmax) gives them, `targets (n, …)` → `()`.
///
/// # Precision
///
/// `log_probs` in any floating-point dtype, `targets` in `U8`, `U32` or `I64`. The mean is summed in `F64` on a CPU and on
/// CUDA. The loss is `F32` (`F64` for `F64`).
///
/// # Errors
///
/// As [`cross_entropy`].
///
/// # References
///
/// `torch.nn.functional.nll_loss`.
pub fn nll(log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    nll_with(log_probs, targets, ClassSettings::default())
}

pub(crate) fn nll_with(
    log_probs: &Tensor,
    targets: &Tensor,
    settings: ClassSettings,
) -> Result<Tensor> {
    settings.check(Op::Nll)?;
    apply(Nll(settings), &[log_probs, targets])
}

struct Nll(ClassSettings);

struct NllSaved {
    loss: ClassLoss,
    /// Of the log-probabilities.
    dims: Vec<usize>,
    targets: Tensor,
    total: Option<Tensor>,
}

impl Operator for Nll {
    type Saved = NllSaved;

    fn op(&self) -> Op {
        Op::Nll
    }

    fn captured(&self, in_backward: bool) -> Vec<&Tensor> {
        self.0.captured(in_backward)
    }

    /// The targets.
    fn reads(&self, input: usize, _wanted: &[bool]) -> bool {
        input == 1
    }

    fn widens(&self, inputs: &[DType]) -> bool {
        of_one_16_bit_dtype(inputs)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, NllSaved)> {
        let (log_probs, targets) = (&inputs[0], &inputs[1]);
        let (rows, dims) = to_rows(self.op(), "log_probs", log_probs)?;
        let of = ("log_probs", log_probs);
        let (loss, targets) = self.0.of_rows(self.op(), of, rows.dim(1)?, targets, &dims)?;
        let reduced = loss::nll_forward(&loss, &rows, &targets)?;
        let y = of_targets(&loss, reduced.loss, &dims)?;
        let (dims, total) = (log_probs.dims().to_vec(), reduced.total);
        Ok((y, NllSaved { loss, dims, targets, total }))
    }

    fn backward(&self, ctx: &Backward<'_, NllSaved>) -> Result<Vec<Option<Gradient>>> {
        let NllSaved { loss, dims, targets, total } = ctx.saved;
        let dx = ctx.wants[0].map(|out| {
            let dx = loss::nll_backward(loss, targets, total.as_ref(), ctx.gradient, out)?;
            from_rows(dx, dims)
        });
        Ok(vec![dx.transpose()?.map(Gradient::owned), None])
    }
}
