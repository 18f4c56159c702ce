//! Batch normalisation.

use std::sync::{Arc, OnceLock};

use candle_core::{Result, Tensor};

use super::{arithmetic, check_dims, check_eps, check_operand, shape_error};
use crate::Op;
use crate::kernels::{self, batch_norm as kernel};
use crate::operator::{Backward, Gradient, Operator, apply};

/// The statistics of one batch, for running averages: `F32`, `(c)`, detached.
#[derive(Clone, Debug)]
pub struct BatchStatistics {
    /// The mean of each channel.
    pub mean: Tensor,
    /// The biased variance of each channel.
    pub var: Tensor,
    /// How many values each is taken over.
    pub count: usize,
}

/// Normalises each channel of a batch by the batch's own mean and variance, then scales and
/// shifts it. For training.
///
/// # Shapes
///
/// `x (n, c, …)`, `weight (c)`, `bias (c)` → that of `x`.
///
/// # Precision
///
/// `x` in any floating-point dtype, which the result has too; `weight` and `bias` in any.
/// Statistics (taken about a shift, so that a large mean costs no digits), normalisation and all
/// gradients in `F32`; rounded once.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; only one value a channel, which has no variance.
///
/// # References
///
/// Ioffe and Szegedy, [Batch Normalization](https://arxiv.org/abs/1502.03167);
/// `torch.nn.functional.batch_norm`.
pub fn batch_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, BatchStatistics)> {
    let statistics = Arc::new(OnceLock::new());
    let mode = Mode::Train(statistics.clone());
    let y = run(x, weight, bias, eps, mode)?;
    match statistics.get() {
        Some(statistics) => Ok((y, statistics.clone())),
        None => candle_core::bail!("batch_norm left no statistics"),
    }
}

/// Normalises each channel by a given mean and variance, then scales and shifts it. For
/// evaluation.
///
/// # Shapes, precision, errors
///
/// As [`batch_norm`]; `mean (c)` and `var (c)` in any floating-point dtype, without gradient.
pub fn batch_norm_eval(
    x: &Tensor,
    mean: &Tensor,
    var: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    run(x, weight, bias, eps, Mode::Eval { mean: mean.detach(), var: var.detach() })
}

fn run(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    mode: Mode,
) -> Result<Tensor> {
    check_eps(eps)?;
    let op = BatchNorm { eps, mode, weight: weight.is_some() };
    let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    apply(op, &inputs)
}

struct BatchNorm {
    eps: f64,
    mode: Mode,
    /// Whether the second input is the weight.
    weight: bool,
}

enum Mode {
    Train(Arc<OnceLock<BatchStatistics>>),
    Eval { mean: Tensor, var: Tensor },
}

struct Saved {
    x: Tensor,
    weight: Option<Tensor>,
    statistics: Option<kernel::Statistics>,
}

impl Operator for BatchNorm {
    type Saved = Saved;

    fn op(&self) -> Op {
        Op::BatchNorm
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let &[_, c, ..] = x.dims() else {
            return shape_error(self.op(), "x", x, "(n, c, …)".into());
        };
        let mut affine = inputs[1..].iter();
        let weight = if self.weight { affine.next() } else { None };
        let bias = affine.next();
        for (name, tensor) in [("weight", weight), ("bias", bias)] {
            let Some(tensor) = tensor else { continue };
            check_operand(self.op(), x, name, tensor, false)?;
            check_dims(self.op(), name, tensor, &[c])?;
        }
        let (y, statistics) = match &self.mode {
            Mode::Train(out) => {
                let count = x.elem_count() / c.max(1);
                if count < 2 {
                    let expected = "more than one value a channel to take a variance of";
                    return shape_error(self.op(), "x", x, expected.into());
                }
                let (y, statistics) = kernel::forward_train(x, weight, bias, self.eps)?;
                let (mean, var) = (statistics.mean.clone(), statistics.var.clone());
                out.get_or_init(|| BatchStatistics { mean, var, count });
                (y, Some(statistics))
            }
            Mode::Eval { mean, var } => {
                for (name, tensor) in [("mean", mean), ("var", var)] {
                    check_operand(self.op(), x, name, tensor, false)?;
                    check_dims(self.op(), name, tensor, &[c])?;
                }
                let [mean, var] = self.given(x, mean, var)?;
                (kernel::forward_eval(x, &mean, &var, weight, bias, self.eps)?, None)
            }
        };
        Ok((y, Saved { x: x.clone(), weight: weight.cloned(), statistics }))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Saved { x, weight, statistics } = ctx.saved;
        let weight = weight.as_ref();
        let (dx, dweight, dbias) = match (&self.mode, statistics) {
            (Mode::Eval { mean, var }, _) => {
                let [mean, var] = self.given(x, mean, var)?;
                kernel::backward_eval(x, ctx.gradient, &mean, &var, weight, self.eps)?
            }
            (_, Some(statistics)) => kernel::backward_train(x, ctx.gradient, weight, statistics)?,
            (_, None) => candle_core::bail!("batch_norm saved no statistics"),
        };
        let mut gradients = vec![dx];
        gradients.extend(self.weight.then_some(dweight));
        if gradients.len() < ctx.wants.len() {
            gradients.push(dbias);
        }
        Ok(gradients.into_iter().map(|g| Some(Gradient::owned(g))).collect())
    }
}

impl BatchNorm {
    /// Given statistics in the dtype of the arithmetic.
    fn given(&self, x: &Tensor, mean: &Tensor, var: &Tensor) -> Result<[Tensor; 2]> {
        let dtype = arithmetic(x.dtype());
        Ok([kernels::cast(mean, dtype)?, kernels::cast(var, dtype)?])
    }
}
