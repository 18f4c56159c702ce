//! Losses: F32 scalars (F64 for F64 inputs), averaged over the batch.

mod cpu;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::elementwise::plain;

/// The mean over `n` of the cross entropy of `logits` `(n, c)` with the classes `targets` `(n)`,
/// U32, and every row's `ln(sum(exp(logits)))`, both in the dtype of the arithmetic.
///
/// The target distribution gives each class `label_smoothing / c`, and the target the rest.
/// A target that is no class is an error.
pub(crate) fn cross_entropy_forward(
    logits: &Tensor,
    targets: &Tensor,
    label_smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let (logits, targets) = (plain(logits)?, plain(targets)?);
    check_targets(&logits, &targets)?;
    if logits.device().is_cpu() {
        cpu::cross_entropy_forward(&logits, &targets, label_smoothing)
    } else {
        portable::cross_entropy_forward(&logits, &targets, label_smoothing)
    }
}

/// The gradient of the loss in `logits`, times the scalar `grad_scale`, in `out`:
/// `(softmax - target distribution) * grad_scale / n`.
pub(crate) fn cross_entropy_backward(
    logits: &Tensor,
    targets: &Tensor,
    log_sum_exp: &Tensor,
    grad_scale: &Tensor,
    label_smoothing: f64,
    out: DType,
) -> Result<Tensor> {
    let (logits, targets, log_sum_exp) = (plain(logits)?, plain(targets)?, plain(log_sum_exp)?);
    if logits.device().is_cpu() {
        cpu::cross_entropy_backward(
            &logits,
            &targets,
            &log_sum_exp,
            grad_scale,
            label_smoothing,
            out,
        )
    } else {
        portable::cross_entropy_backward(
            &logits,
            &targets,
            &log_sum_exp,
            grad_scale,
            label_smoothing,
            out,
        )
    }
}

/// The mean of `(input - target)^2`, in the dtype of the arithmetic; both of one shape and dtype.
pub(crate) fn mse_forward(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    let (input, target) = (plain(input)?, plain(target)?);
    if input.device().is_cpu() {
        cpu::mse_forward(&input, &target)
    } else {
        portable::mse_forward(&input, &target)
    }
}

/// The gradient of [`mse_forward`] in `input`, times the scalar `grad_scale`, in `out`; the one in
/// `target` is its negative.
pub(crate) fn mse_backward(
    input: &Tensor,
    target: &Tensor,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let (input, target) = (plain(input)?, plain(target)?);
    if input.device().is_cpu() {
        cpu::mse_backward(&input, &target, grad_scale, out)
    } else {
        portable::mse_backward(&input, &target, grad_scale, out)
    }
}

fn check_targets(logits: &Tensor, targets: &Tensor) -> Result<()> {
    let (_, classes) = logits.dims2()?;
    for (row, &target) in targets.to_vec1::<u32>()?.iter().enumerate() {
        if target as usize >= classes {
            bail!("cross entropy: the target of row {row} is {target}, of {classes} classes")
        }
    }
    Ok(())
}
