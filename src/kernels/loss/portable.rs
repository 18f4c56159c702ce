use candle_core::{DType, Result, Tensor};

use crate::kernels::elementwise::portable::upcast;

pub(super) fn cross_entropy_forward(
    logits: &Tensor,
    targets: &Tensor,
    label_smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let wide = upcast(logits)?;
    let max = wide.max_keepdim(1)?;
    let log_sum = wide.broadcast_sub(&max)?.exp()?.sum_keepdim(1)?.log()?;
    let log_sum_exp = (max + log_sum)?;
    let target = wide.gather(&targets.unsqueeze(1)?, 1)?;
    let mut losses = (&log_sum_exp - (target * (1.0 - label_smoothing))?)?;
    if label_smoothing != 0.0 {
        losses = (losses - (wide.mean_keepdim(1)? * label_smoothing)?)?;
    }
    Ok((losses.mean_all()?, log_sum_exp.squeeze(1)?))
}

pub(super) fn cross_entropy_backward(
    logits: &Tensor,
    targets: &Tensor,
    log_sum_exp: &Tensor,
    grad_scale: &Tensor,
    label_smoothing: f64,
    out: DType,
) -> Result<Tensor> {
    let (n, classes) = logits.dims2()?;
    let wide = upcast(logits)?;
    let probabilities = wide.broadcast_sub(&log_sum_exp.unsqueeze(1)?)?.exp()?;
    let rest = Tensor::full(label_smoothing - 1.0, (n, 1), wide.device())?;
    let difference = (probabilities - label_smoothing / classes as f64)?.scatter_add(
        &targets.unsqueeze(1)?,
        &rest.to_dtype(wide.dtype())?,
        1,
    )?;
    let scale = (grad_scale.detach().to_dtype(wide.dtype())? / n as f64)?;
    difference.broadcast_mul(&scale)?.to_dtype(out)
}

pub(super) fn mse_forward(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    upcast(input)?.sub(&upcast(target)?)?.sqr()?.mean_all()
}

pub(super) fn mse_backward(
    input: &Tensor,
    target: &Tensor,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let difference = upcast(input)?.sub(&upcast(target)?)?;
    let scale = grad_scale.detach().to_dtype(difference.dtype())?;
    let scale = (scale * (2.0 / input.elem_count() as f64))?;
    difference.broadcast_mul(&scale)?.to_dtype(out)
}
