//! Losses by candle's operators.

use candle_core::{DType, Result, Tensor};

use super::class::{ClassLoss, LogitsGradient, Reduced, Reduction, count};
use super::pairwise::{LEAST_VARIANCE, LOWEST_LOG, LossArgument, Pairwise};
use crate::kernels::accumulator;
use crate::kernels::activation::portable::log1p;
use crate::kernels::elementwise::portable::{at_least, clamped, upcast};

/// The targets of the rows, and how much each counts: tensors `(n, 1)`.
struct Targets {
    /// 1 where a row counts.
    counted: Tensor,
    /// Its class, 0 where it does not.
    classes: Tensor,
    /// The weight of its class, 0 where it does not count.
    weights: Tensor,
}

impl Targets {
    fn of(loss: &ClassLoss, targets: &Tensor, wide: DType) -> Result<Self> {
        let targets = targets.detach();
        let counted = match loss.ignored {
            Some(ignored) => targets.ne(ignored)?,
            None => targets.ones_like()?.to_dtype(DType::U8)?,
        };
        let classes = counted.where_cond(&targets, &targets.zeros_like()?)?;
        let weights = match &loss.weights {
            Some(weights) => weights.index_select(&classes, 0)?,
            None => classes.ones_like()?.to_dtype(wide)?,
        };
        let weights = counted.where_cond(&weights, &weights.zeros_like()?)?;
        let column = |x: Tensor| x.unsqueeze(1);
        Ok(Self { counted: column(counted)?, classes: column(classes)?, weights: column(weights)? })
    }

    /// `x`, `(n, m)`, and zeros where rows do not count.
    fn mask(&self, x: &Tensor) -> Result<Tensor> {
        self.counted.broadcast_as(x.shape())?.where_cond(x, &x.zeros_like()?)
    }

    fn reduce(&self, loss: &ClassLoss, losses: &Tensor) -> Result<Reduced> {
        let losses = self.mask(losses)?;
        let total = loss.sums_weights().then(|| self.weights.sum_all()).transpose()?;
        let loss = match (loss.reduction, &total) {
            (Reduction::None, _) => losses.squeeze(1)?,
            (Reduction::Sum, _) => losses.sum_all()?,
            (Reduction::Mean, None) => losses.mean_all()?,
            (Reduction::Mean, Some(total)) => (losses.sum_all()? / total)?,
        };
        Ok(Reduced { loss, total })
    }
}

/// The gradient of each row's loss, `(n, 1)`, or of all rows, `(1, 1)`.
fn scales(
    loss: &ClassLoss,
    n: usize,
    total: Option<&Tensor>,
    gradient: &Tensor,
    wide: DType,
) -> Result<Tensor> {
    let gradient = gradient.detach().to_dtype(wide)?.reshape(((), 1))?;
    match total {
        Some(total) => gradient.broadcast_div(&total.to_dtype(wide)?),
        None => gradient / loss.count(n),
    }
}

pub(super) fn cross_entropy_forward(
    loss: &ClassLoss,
    logits: &Tensor,
    targets: &Tensor,
) -> Result<(Reduced, Tensor)> {
    let wide = upcast(logits)?;
    let targets = Targets::of(loss, targets, wide.dtype())?;
    let max = wide.max_keepdim(1)?;
    let log_sum = wide.broadcast_sub(&max)?.exp()?.sum_keepdim(1)?.log()?;
    let log_sum_exp = (&max + &log_sum)?;
    let of_target = (&log_sum_exp - wide.gather(&targets.classes, 1)?)?;
    let mut losses = (of_target * &targets.weights)?.affine(1.0 - loss.label_smoothing, 0.0)?;
    if loss.label_smoothing != 0.0 {
        let mut all = wide.neg()?.broadcast_add(&log_sum_exp)?;
        if let Some(weights) = &loss.weights {
            all = all.broadcast_mul(weights)?;
        }
        losses = (losses + (all.mean_keepdim(1)? * loss.label_smoothing)?)?;
    }
    let log_sums = Tensor::stack(&[max.squeeze(1)?, log_sum.squeeze(1)?], 0)?;
    Ok((targets.reduce(loss, &losses)?, log_sums))
}

pub(super) fn cross_entropy_backward(of: LogitsGradient<'_>, out: DType) -> Result<Tensor> {
    let LogitsGradient { loss, logits, targets, log_sum_exp, total, gradient } = of;
    let (n, classes) = logits.dims2()?;
    let wide = upcast(logits)?;
    let targets = Targets::of(loss, targets, wide.dtype())?;
    let part = |i: usize| log_sum_exp.get(i)?.unsqueeze(1);
    let probabilities = wide.broadcast_sub(&part(0)?)?.broadcast_sub(&part(1)?)?.exp()?;
    let every = match &loss.weights {
        Some(weights) => weights.detach(),
        None => Tensor::ones(classes, wide.dtype(), wide.device())?,
    };
    let every = (every * (loss.label_smoothing / classes as f64))?;
    let right = (&targets.weights * (1.0 - loss.label_smoothing))?;
    let mass = right.broadcast_add(&every.sum_all()?)?;
    let difference = probabilities.broadcast_mul(&mass)?.broadcast_sub(&every)?;
    let difference = difference.scatter_add(&targets.classes, &right.neg()?, 1)?;
    let scales = scales(loss, n, total, gradient, wide.dtype())?;
    targets.mask(&difference.broadcast_mul(&scales)?)?.to_dtype(out)
}

pub(super) fn nll_forward(
    loss: &ClassLoss,
    log_probs: &Tensor,
    targets: &Tensor,
) -> Result<Reduced> {
    let wide = upcast(log_probs)?;
    let targets = Targets::of(loss, targets, wide.dtype())?;
    let losses = (wide.gather(&targets.classes, 1)?.neg()? * &targets.weights)?;
    targets.reduce(loss, &losses)
}

pub(super) fn nll_backward(
    loss: &ClassLoss,
    [targets, gradient]: [&Tensor; 2],
    total: Option<&Tensor>,
    out: DType,
) -> Result<Tensor> {
    let (n, wide) = (targets.dim(0)?, accumulator(out));
    let targets = Targets::of(loss, targets, wide)?;
    let scales = scales(loss, n, total, gradient, wide)?;
    let shares = targets.weights.to_dtype(wide)?.broadcast_mul(&scales)?.neg()?;
    let zeros = Tensor::zeros((n, loss.classes), wide, shares.device())?;
    zeros.scatter_add(&targets.classes, &targets.mask(&shares)?, 1)?.to_dtype(out)
}

/// The loss of each element.
fn pairwise_terms(loss: Pairwise, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    let (a, b) = (upcast(input)?, upcast(target)?);
    match loss {
        Pairwise::Mse => a.sub(&b)?.sqr(),
        Pairwise::Huber { delta } => {
            let d = a.sub(&b)?.abs()?;
            let far = d.affine(delta, -0.5 * delta * delta)?;
            d.gt(delta)?.where_cond(&far, &(d.sqr()? * 0.5)?)
        }
        Pairwise::BinaryCrossEntropy => {
            let present = (&b * bounded_log(&a)?)?;
            let absent = (one_minus(&b)? * bounded(&log1p(&a.neg()?)?)?)?;
            (present + absent)?.neg()
        }
        Pairwise::BinaryCrossEntropyWithLogit => {
            let log = (a.abs()?.neg()?.exp()? + 1.0)?.log()?;
            (a.relu()? - (&a * &b)?)? + log
        }
        Pairwise::L1 => a.sub(&b)?.abs(),
        Pairwise::KlDiv { log_target: false } => {
            let entropy = b.eq(0.0)?.where_cond(&b, &(&b * b.log()?)?)?;
            entropy - (&b * &a)?
        }
        Pairwise::KlDiv { log_target: true } => b.exp()? * b.sub(&a)?,
    }
}

pub(super) fn pairwise_forward(
    loss: Pairwise,
    reduction: Reduction,
    input: &Tensor,
    target: &Tensor,
) -> Result<Tensor> {
    let terms = pairwise_terms(loss, input, target)?;
    match reduction {
        Reduction::Mean => terms.mean_all(),
        Reduction::Sum => terms.sum_all(),
        Reduction::None => Ok(terms),
    }
}

/// The derivative of each element's loss by one argument.
fn pairwise_derivatives(
    (loss, argument): (Pairwise, LossArgument),
    input: &Tensor,
    target: &Tensor,
) -> Result<Tensor> {
    let (a, b) = (upcast(input)?, upcast(target)?);
    let sign = if argument == LossArgument::Input { 1.0 } else { -1.0 };
    match (loss, argument) {
        (Pairwise::Mse, _) => a.sub(&b)? * (2.0 * sign),
        (Pairwise::Huber { delta }, _) => clamped(&a.sub(&b)?, -delta, delta)? * sign,
        (Pairwise::BinaryCrossEntropy, LossArgument::Input) => {
            a.sub(&b)? / at_least(&(&a * one_minus(&a)?)?, LEAST_VARIANCE)?
        }
        (Pairwise::BinaryCrossEntropy, LossArgument::Target) => {
            bounded(&log1p(&a.neg()?)?)? - bounded_log(&a)?
        }
        (Pairwise::BinaryCrossEntropyWithLogit, LossArgument::Input) => {
            (a.neg()?.exp()? + 1.0)?.recip()? - b
        }
        (Pairwise::BinaryCrossEntropyWithLogit, LossArgument::Target) => a.neg(),
        (Pairwise::L1, _) => {
            let d = a.sub(&b)?;
            let up = d.gt(0.0)?.where_cond(&d.ones_like()?, &d)?;
            d.lt(0.0)?.where_cond(&d.ones_like()?.neg()?, &up)? * sign
        }
        (Pairwise::KlDiv { log_target: false }, LossArgument::Input) => b.neg(),
        (Pairwise::KlDiv { log_target: false }, LossArgument::Target) => (b.log()? + 1.0)? - a,
        (Pairwise::KlDiv { log_target: true }, LossArgument::Input) => b.exp()?.neg(),
        (Pairwise::KlDiv { log_target: true }, LossArgument::Target) => {
            b.exp()? * (b.sub(&a)? + 1.0)?
        }
    }
}

pub(super) fn pairwise_backward(
    of: (Pairwise, LossArgument),
    reduction: Reduction,
    [input, target, gradient]: [&Tensor; 3],
    out: DType,
) -> Result<Tensor> {
    let derivatives = pairwise_derivatives(of, input, target)?;
    let gradient = gradient.detach().to_dtype(derivatives.dtype())?;
    let gradient = (gradient / count(reduction, input.elem_count()))?;
    derivatives.broadcast_mul(&gradient)?.to_dtype(out)
}

fn one_minus(x: &Tensor) -> Result<Tensor> {
    x.affine(-1.0, 1.0)
}

fn bounded(log: &Tensor) -> Result<Tensor> {
    at_least(log, LOWEST_LOG)
}

fn bounded_log(x: &Tensor) -> Result<Tensor> {
    bounded(&x.log()?)
}
