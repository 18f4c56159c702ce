//! Losses: F32 scalars (F64 for F64 inputs), averaged over the batch.

mod cpu;
mod cuda;
mod pairwise;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result, Tensor};

pub(crate) use pairwise::{Pairwise, Side};

use crate::error::bail;
use crate::kernels::accumulator;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// The mean over `n` of the cross entropy of `logits` `(n, c)` with the classes `targets` `(n)`,
/// U32, and every row's `ln(sum(exp(logits)))`, both in the dtype of the arithmetic. The latter is in two parts, `(2, n)`,
/// the maximum and the rest, as one number could not hold the digits of both.
///
/// The target distribution gives each class `label_smoothing / c`, and the target the rest.
/// A target that is no class is an error; on a GPU, where naming it would wait, its loss is NaN.
/// There rows may be longer than the `classes`: [`room`] says when, and no more of them is read.
pub(crate) fn cross_entropy_forward(
    logits: &Tensor,
    targets: &Tensor,
    classes: usize,
    label_smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let (logits, targets) = (plain(logits)?, plain(targets)?);
    if let Some(gpu) = Gpu::of(logits.device()) {
        return cuda::cross_entropy_forward(&gpu, &logits, &targets, classes, label_smoothing);
    }
    check_targets("cross_entropy", &logits, &targets)?;
    if logits.device().is_cpu() {
        cpu::cross_entropy_forward(&logits, &targets, label_smoothing)
    } else {
        portable::cross_entropy_forward(&logits, &targets, label_smoothing)
    }
}

/// How long rows of logits are to be for products on this device to be fast, which want all sizes to be multiples of
/// 128 bytes: at least the `classes`, and those alone where they are few.
pub(crate) fn room(classes: usize, device: &Device) -> usize {
    const MANY: usize = 1024;
    if classes < MANY || Gpu::of(device).is_none() { classes } else { classes.next_multiple_of(64) }
}

/// The gradient of the loss in `logits`, times the scalar `grad_scale`, in `out`:
/// `(softmax - target distribution) * grad_scale / n`; zeros after the `classes`.
pub(crate) fn cross_entropy_backward(
    [logits, targets, log_sum_exp, grad_scale]: [&Tensor; 4],
    classes: usize,
    label_smoothing: f64,
    out: DType,
) -> Result<Tensor> {
    let (logits, targets, log_sum_exp) = (plain(logits)?, plain(targets)?, plain(log_sum_exp)?);
    let tensors = [&logits, &targets, &log_sum_exp, grad_scale];
    if let Some(gpu) = Gpu::of(logits.device()) {
        return cuda::cross_entropy_backward(&gpu, tensors, classes, label_smoothing, out);
    }
    if logits.device().is_cpu() {
        cpu::cross_entropy_backward(tensors, label_smoothing, out)
    } else {
        portable::cross_entropy_backward(tensors, label_smoothing, out)
    }
}

/// As [`cross_entropy_backward`], in the place of `logits`, which nobody else may hold.
pub(crate) fn cross_entropy_backward_assign(
    [logits, targets, log_sum_exp, grad_scale]: [&Tensor; 4],
    classes: usize,
    label_smoothing: f64,
) -> Result<Tensor> {
    let tensors = [logits, &plain(targets)?, &plain(log_sum_exp)?, grad_scale];
    if !logits.is_contiguous() {
        return cross_entropy_backward(tensors, classes, label_smoothing, logits.dtype());
    }
    if let Some(gpu) = Gpu::of(logits.device()) {
        let over = logits.detach();
        return cuda::cross_entropy_backward_into(&gpu, tensors, classes, label_smoothing, over);
    }
    if logits.device().is_cpu() {
        return cpu::cross_entropy_backward_assign(tensors, label_smoothing);
    }
    portable::cross_entropy_backward(tensors, label_smoothing, logits.dtype())
}

/// The mean over `n` of minus the `log_probs` `(n, c)` of the classes `targets` `(n)`, U32, in the
/// dtype of the arithmetic. A target that is no class is an error; on a GPU its loss is NaN.
pub(crate) fn nll_forward(log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (log_probs, targets) = (plain(log_probs)?, plain(targets)?);
    if let Some(gpu) = Gpu::of(log_probs.device()) {
        return cuda::nll_forward(&gpu, &log_probs, &targets);
    }
    check_targets("nll", &log_probs, &targets)?;
    if log_probs.device().is_cpu() {
        cpu::nll_forward(&log_probs, &targets)
    } else {
        portable::nll_forward(&log_probs, &targets)
    }
}

/// The gradient of [`nll_forward`], times the scalar `grad_scale`: of shape `(n, classes)`, in `out`.
pub(crate) fn nll_backward(
    targets: &Tensor,
    classes: usize,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    if let Some(gpu) = Gpu::of(targets.device()) {
        return cuda::nll_backward(&gpu, &plain(targets)?, classes, grad_scale, out);
    }
    let (n, wide) = (targets.dim(0)?, accumulator(out));
    let share = (grad_scale.detach().to_dtype(wide)? / -(n as f64))?.reshape((1, 1))?;
    let zeros = Tensor::zeros((n, classes), wide, targets.device())?;
    let share = share.broadcast_as((n, 1))?.contiguous()?;
    zeros.scatter_add(&targets.detach().unsqueeze(1)?, &share, 1)?.to_dtype(out)
}

/// The mean of a [`Pairwise`] loss, in the dtype of the arithmetic; both of one shape and dtype.
pub(crate) fn pairwise_forward(loss: Pairwise, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    let (input, target) = (plain(input)?, plain(target)?);
    if let Some(gpu) = Gpu::of(input.device()) {
        return cuda::pairwise_forward(&gpu, loss, &input, &target);
    }
    if input.device().is_cpu() {
        cpu::pairwise_forward(loss, &input, &target)
    } else {
        portable::pairwise_forward(loss, &input, &target)
    }
}

/// The gradient of [`pairwise_forward`] in one side, times the scalar `grad_scale`, in `out`.
pub(crate) fn pairwise_backward(
    (loss, side): (Pairwise, Side),
    input: &Tensor,
    target: &Tensor,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let (input, target) = (plain(input)?, plain(target)?);
    if let Some(gpu) = Gpu::of(input.device()) {
        return cuda::pairwise_backward(&gpu, (loss, side), [&input, &target, grad_scale], out);
    }
    if input.device().is_cpu() {
        cpu::pairwise_backward((loss, side), &input, &target, grad_scale, out)
    } else {
        portable::pairwise_backward((loss, side), &input, &target, grad_scale, out)
    }
}

/// What would do for a target.
pub(crate) fn class_of(classes: usize) -> String {
    format!(
        "one of {classes} classes, from 0; rows that are not to count, PyTorch's -100, are left out before, by \
         `index_select`"
    )
}

fn check_targets(op: &str, logits: &Tensor, targets: &Tensor) -> Result<()> {
    let (_, classes) = logits.dims2()?;
    for (row, &target) in targets.to_vec1::<u32>()?.iter().enumerate() {
        if target as usize >= classes {
            bail!("{op}: the target of row {row} is {target}, expected {}", class_of(classes))
        }
    }
    Ok(())
}
