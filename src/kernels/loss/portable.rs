use candle_core::{DType, Result, Tensor};

use super::pairwise::{LEAST_VARIANCE, LOWEST_LOG, Pairwise, Side};
use crate::kernels::elementwise::portable::upcast;

pub(super) fn cross_entropy_forward(
    logits: &Tensor,
    targets: &Tensor,
    label_smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let wide = upcast(logits)?;
    let max = wide.max_keepdim(1)?;
    let log_sum = wide.broadcast_sub(&max)?.exp()?.sum_keepdim(1)?.log()?;
    let log_sum_exp = (&max + &log_sum)?;
    let target = wide.gather(&targets.unsqueeze(1)?, 1)?;
    let mut losses = (&log_sum_exp - (target * (1.0 - label_smoothing))?)?;
    if label_smoothing != 0.0 {
        losses = (losses - (wide.mean_keepdim(1)? * label_smoothing)?)?;
    }
    Ok((losses.mean_all()?, Tensor::stack(&[max.squeeze(1)?, log_sum.squeeze(1)?], 0)?))
}

pub(super) fn cross_entropy_backward(
    [logits, targets, log_sum_exp, grad_scale]: [&Tensor; 4],
    label_smoothing: f64,
    out: DType,
) -> Result<Tensor> {
    let (n, classes) = logits.dims2()?;
    let wide = upcast(logits)?;
    let part = |i: usize| log_sum_exp.get(i)?.unsqueeze(1);
    let probabilities = wide.broadcast_sub(&part(0)?)?.broadcast_sub(&part(1)?)?.exp()?;
    let rest = Tensor::full(label_smoothing - 1.0, (n, 1), wide.device())?;
    let difference = (probabilities - label_smoothing / classes as f64)?.scatter_add(
        &targets.unsqueeze(1)?,
        &rest.to_dtype(wide.dtype())?,
        1,
    )?;
    let scale = (grad_scale.detach().to_dtype(wide.dtype())? / n as f64)?;
    difference.broadcast_mul(&scale)?.to_dtype(out)
}

pub(super) fn nll_forward(log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    upcast(log_probs)?.gather(&targets.unsqueeze(1)?, 1)?.mean_all()?.neg()
}

pub(super) fn pairwise_forward(loss: Pairwise, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    let (a, b) = (upcast(input)?, upcast(target)?);
    let terms = match loss {
        Pairwise::Mse => a.sub(&b)?.sqr()?,
        Pairwise::Huber { delta } => {
            let d = a.sub(&b)?.abs()?;
            let far = d.affine(delta, -0.5 * delta * delta)?;
            d.gt(delta)?.where_cond(&far, &(d.sqr()? * 0.5)?)?
        }
        Pairwise::BinaryCrossEntropy => {
            let present = (&b * bounded_log(&a)?)?;
            let absent = (one_minus(&b)? * bounded_log(&one_minus(&a)?)?)?;
            (present + absent)?.neg()?
        }
        Pairwise::BinaryCrossEntropyWithLogit => {
            let log = (a.abs()?.neg()?.exp()? + 1.0)?.log()?;
            ((a.relu()? - (&a * &b)?)? + log)?
        }
    };
    terms.mean_all()
}

pub(super) fn pairwise_backward(
    (loss, side): (Pairwise, Side),
    input: &Tensor,
    target: &Tensor,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let (a, b) = (upcast(input)?, upcast(target)?);
    let sign = if side == Side::Input { 1.0 } else { -1.0 };
    let derivatives = match (loss, side) {
        (Pairwise::Mse, _) => (a.sub(&b)? * (2.0 * sign))?,
        (Pairwise::Huber { delta }, _) => (a.sub(&b)?.clamp(-delta, delta)? * sign)?,
        (Pairwise::BinaryCrossEntropy, Side::Input) => {
            (a.sub(&b)? / (&a * one_minus(&a)?)?.maximum(LEAST_VARIANCE)?)?
        }
        (Pairwise::BinaryCrossEntropy, Side::Target) => {
            (bounded_log(&one_minus(&a)?)? - bounded_log(&a)?)?
        }
        (Pairwise::BinaryCrossEntropyWithLogit, Side::Input) => {
            ((a.neg()?.exp()? + 1.0)?.recip()? - b)?
        }
        (Pairwise::BinaryCrossEntropyWithLogit, Side::Target) => a.neg()?,
    };
    let scale = grad_scale.detach().to_dtype(derivatives.dtype())?;
    let scale = (scale / input.elem_count() as f64)?;
    derivatives.broadcast_mul(&scale)?.to_dtype(out)
}

fn one_minus(x: &Tensor) -> Result<Tensor> {
    x.affine(-1.0, 1.0)
}

fn bounded_log(x: &Tensor) -> Result<Tensor> {
    x.log()?.maximum(LOWEST_LOG)
}
