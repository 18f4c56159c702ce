//! Losses: F32 (F64 for F64 inputs), of rows of classes or of pairs of elements.

mod class;
#[cfg(test)]
mod class_tests;
mod cpu;
mod cpu_pairwise;
mod cuda;
mod pairwise;
mod portable;
mod targets;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result, Tensor};

pub use class::Reduction;
pub(crate) use class::{ClassLoss, LogitsGradient, Reduced};
pub(crate) use pairwise::{LossArgument, Pairwise};
pub(crate) use targets::class_targets;

use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use targets::check_targets;

/// The cross entropy of `logits` `(n, classes)` with the classes `targets` `(n)`, U32, and every row's
/// `ln(sum(exp(logits)))` in the dtype of the arithmetic. The latter is in two parts, `(2, n)`, the maximum and the rest,
/// as one number could not hold the digits of both.
///
/// The target distribution gives each class `label_smoothing / classes`, and the target the rest; each class times its
/// weight. A target that is neither a class nor ignored is an error; on a GPU, where naming it would wait, its loss is
/// NaN. So is a mean of no rows. There rows may be longer than the classes: [`room`] says when, and no more of them is
/// read.
pub(crate) fn cross_entropy_forward(
    loss: &ClassLoss,
    logits: &Tensor,
    targets: &Tensor,
) -> Result<(Reduced, Tensor)> {
    let (logits, targets) = (plain(logits)?, plain(targets)?);
    if let Some(gpu) = Gpu::of(logits.device()) {
        return cuda::cross_entropy_forward(gpu, loss, &logits, &targets);
    }
    check_targets("cross_entropy", loss, &targets)?;
    if logits.device().is_cpu() {
        cpu::cross_entropy_forward(loss, &logits, &targets)
    } else {
        portable::cross_entropy_forward(loss, &logits, &targets)
    }
}

/// How long rows of logits are to be: at least the `classes`. Products on a GPU are fast if all sizes are multiples
/// of 128 bytes, so many classes are padded to that.
pub(crate) fn room(classes: usize, device: &Device) -> usize {
    const MANY: usize = 1024;
    if classes < MANY || Gpu::of(device).is_none() { classes } else { classes.next_multiple_of(64) }
}

/// `x` with as many rows as there is [`room`] for: zeros after its own.
pub(crate) fn with_room(x: &Tensor, rows: usize) -> Result<Tensor> {
    let more = rows.saturating_sub(x.dim(0)?);
    match Gpu::of(x.device()) {
        _ if more == 0 => Ok(x.clone()),
        Some(gpu) => gpu.padded(&plain(x)?, rows),
        None => x.pad_with_zeros(0, 0, more),
    }
}

/// The gradient of the logits, in `out`: of each row that of its loss over the total, times
/// `softmax * sum(target distribution) - target distribution`. Zeros where rows are ignored, and after the classes.
pub(crate) fn cross_entropy_backward(of: LogitsGradient<'_>, out: DType) -> Result<Tensor> {
    let (logits, targets, log_sum_exp, gradient) =
        (plain(of.logits)?, plain(of.targets)?, plain(of.log_sum_exp)?, plain(of.gradient)?);
    let of = LogitsGradient {
        logits: &logits,
        targets: &targets,
        log_sum_exp: &log_sum_exp,
        gradient: &gradient,
        ..of
    };
    if let Some(gpu) = Gpu::of(logits.device()) {
        return cuda::cross_entropy_backward(gpu, of, out);
    }
    if logits.device().is_cpu() {
        cpu::cross_entropy_backward(of, out)
    } else {
        portable::cross_entropy_backward(of, out)
    }
}

/// As [`cross_entropy_backward`], in the place of the logits, which nobody else may hold.
pub(crate) fn cross_entropy_backward_assign(of: LogitsGradient<'_>) -> Result<Tensor> {
    let logits = of.logits;
    let gpu = Gpu::of(logits.device());
    if !logits.is_contiguous() || gpu.is_none() && !logits.device().is_cpu() {
        return cross_entropy_backward(of, logits.dtype());
    }
    let (targets, log_sum_exp, gradient) =
        (plain(of.targets)?, plain(of.log_sum_exp)?, plain(of.gradient)?);
    let of =
        LogitsGradient { targets: &targets, log_sum_exp: &log_sum_exp, gradient: &gradient, ..of };
    match gpu {
        Some(gpu) => cuda::cross_entropy_backward_into(gpu, of, logits.detach()),
        None => cpu::cross_entropy_backward_assign(of),
    }
}

/// Minus the `log_probs` `(n, classes)` of the classes `targets` `(n)`, U32, each times its weight. Targets as
/// [`cross_entropy_forward`].
pub(crate) fn nll_forward(
    loss: &ClassLoss,
    log_probs: &Tensor,
    targets: &Tensor,
) -> Result<Reduced> {
    let (log_probs, targets) = (plain(log_probs)?, plain(targets)?);
    if let Some(gpu) = Gpu::of(log_probs.device()) {
        return cuda::nll_forward(gpu, loss, &log_probs, &targets);
    }
    check_targets("nll", loss, &targets)?;
    if log_probs.device().is_cpu() {
        cpu::nll_forward(loss, &log_probs, &targets)
    } else {
        portable::nll_forward(loss, &log_probs, &targets)
    }
}

/// The gradient of [`nll_forward`] from that of the loss, one number or `n`: `(n, classes)`, in `out`.
pub(crate) fn nll_backward(
    loss: &ClassLoss,
    targets: &Tensor,
    total: Option<&Tensor>,
    gradient: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let (targets, gradient) = (plain(targets)?, plain(gradient)?);
    match Gpu::of(targets.device()) {
        Some(gpu) => cuda::nll_backward(gpu, loss, [&targets, &gradient], total, out),
        None => portable::nll_backward(loss, [&targets, &gradient], total, out),
    }
}

/// A [`Pairwise`] loss, in the dtype of the arithmetic; both of one shape and dtype.
pub(crate) fn pairwise_forward(
    loss: Pairwise,
    reduction: Reduction,
    input: &Tensor,
    target: &Tensor,
) -> Result<Tensor> {
    let (input, target) = (plain(input)?, plain(target)?);
    match Gpu::of(input.device()) {
        _ if input.elem_count() == 0 => {
            portable::pairwise_forward(loss, reduction, &input, &target)
        }
        Some(gpu) => cuda::pairwise_forward(gpu, loss, reduction, [&input, &target]),
        None if input.device().is_cpu() => {
            cpu_pairwise::pairwise_forward(loss, reduction, &input, &target)
        }
        None => portable::pairwise_forward(loss, reduction, &input, &target),
    }
}

/// The gradient of [`pairwise_forward`] by one argument, in `out`, from that of the loss, which has one element or, of
/// [`Reduction::None`], as many as the arguments.
pub(crate) fn pairwise_backward(
    of: (Pairwise, LossArgument),
    reduction: Reduction,
    [input, target, gradient]: [&Tensor; 3],
    out: DType,
) -> Result<Tensor> {
    let (input, target, gradient) = (plain(input)?, plain(target)?, plain(gradient)?);
    let tensors = [&input, &target, &gradient];
    match Gpu::of(input.device()) {
        _ if input.elem_count() == 0 => portable::pairwise_backward(of, reduction, tensors, out),
        Some(gpu) => cuda::pairwise_backward(gpu, of, reduction, tensors, out),
        None if input.device().is_cpu() => {
            cpu_pairwise::pairwise_backward(of, reduction, tensors, out)
        }
        None => portable::pairwise_backward(of, reduction, tensors, out),
    }
}
