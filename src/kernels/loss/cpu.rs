//! Losses on the CPU.
//!
//! Cross entropy never stores probabilities. Forward keeps two numbers a row: the largest logit, and the logarithm of
//! the sum of exponentials relative to it. Backward gets each probability from these as `exp((x - largest) - log_sum)`,
//! and turns it into the gradient in the same pass. If nothing else needs the logits, it overwrites them, which saves
//! the largest buffer of a language model's step.
//!
//! Pairwise losses read both tensors once, and their backward is one pass that computes the derivative.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Result, Tensor, WithDType};

use super::pairwise::{self, Pairwise, Side};
use crate::kernels::activation::Math;
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{BLOCK, GRAIN, for_each_chunk, generate, runs, with_output};
use crate::kernels::elementwise::cpu::with_slice;
use crate::kernels::reduce::channels::Channels;
use crate::kernels::softmax::cpu::{Exp, maxima_and_sums};

pub(super) fn cross_entropy_forward(
    logits: &Tensor,
    targets: &Tensor,
    label_smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    fn typed<T: Lane<Acc: Exp>>(
        logits: &Tensor,
        targets: &[u32],
        label_smoothing: f64,
    ) -> Result<(Tensor, Tensor)> {
        let (n, classes) = logits.dims2()?;
        let data: &[T] = &Elements::of(logits)?;
        let layout = Channels::rows(n, classes);
        let (max, sum) = maxima_and_sums(data, layout);
        let log_sums: Vec<f64> = sum.into_iter().map(f64::ln).collect();
        let mut loss = 0.0;
        for (row, &target) in targets.iter().enumerate() {
            let logit = data[row * classes + target as usize].widened().to_double();
            loss += max[row].to_double() + log_sums[row] - (1.0 - label_smoothing) * logit;
        }
        // Without smoothing, the logits of other classes may be negative infinities.
        if label_smoothing != 0.0 {
            let sums = layout.sums::<T, 1, 0, 1>(
                [data],
                [],
                #[inline(always)]
                |x, []| x,
            );
            for [sum] in sums {
                loss -= label_smoothing * sum / classes as f64;
            }
        }
        // Apart, as their sum would be rounded to the last place of the larger: `exp(x - log_sum_exp)` would lose as
        // many digits as the logits are far from 0.
        let parts = max.into_iter().chain(log_sums.into_iter().map(T::Acc::of)).collect();
        let loss = tensor(vec![T::Acc::of(loss / n as f64)], &[]);
        Ok((loss, tensor::<T::Acc>(parts, &[2, n])))
    }
    let _held = hold([logits, targets]);
    with_slice(
        targets,
        |targets: &[u32]| with_element!(logits.dtype(), T => typed::<T>(logits, targets, label_smoothing)),
    )
}

pub(super) fn cross_entropy_backward(
    [logits, targets, log_sum_exp, grad_scale]: [&Tensor; 4],
    label_smoothing: f64,
    out: DType,
) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Exp>, O: Lane<Acc = T::Acc>>(
        logits: &Tensor,
        targets: &[u32],
        log_sum_exp: &Tensor,
        grad_scale: &Tensor,
        label_smoothing: f64,
    ) -> Result<Tensor> {
        let (n, classes) = logits.dims2()?;
        let data: &[T] = &Elements::of(logits)?;
        let parts: &[T::Acc] = &Elements::of(log_sum_exp)?;
        let derivative =
            LogitsGradient::<T::Acc>::new([n, classes], scalar(grad_scale)?, label_smoothing);
        let dx = generate(
            n * classes,
            #[inline(always)]
            |start, out: &mut [O]| {
                let own = derivative; // a copy that writes to `out` cannot change
                for (row, run) in runs(start, out.len(), classes) {
                    let (max, log_sum) = (parts[row], parts[n + row]);
                    let (from, out) = (start + run.start, &mut out[run]);
                    let data = &data[from..from + out.len()];
                    for (out, x) in out.iter_mut().zip(data) {
                        *out = O::narrowed(own.elsewhere(x.widened() - max - log_sum));
                    }
                    let target = (row * classes + targets[row] as usize).wrapping_sub(from);
                    if let (Some(out), Some(x)) = (out.get_mut(target), data.get(target)) {
                        *out = O::narrowed(own.at_target(x.widened() - max - log_sum));
                    }
                }
            },
        );
        Ok(tensor(dx, &[n, classes]))
    }
    let _held = hold([logits, targets, log_sum_exp]);
    with_slice(targets, |targets: &[u32]| {
        with_element!(logits.dtype(), T => with_output!(T, out, O => {
            typed::<T, O>(logits, targets, log_sum_exp, grad_scale, label_smoothing)
        }))
    })
}

/// The gradient of a logit, from the logarithm of its probability.
#[derive(Clone, Copy)]
struct LogitsGradient<A> {
    scale: A,
    /// What the target distribution gives every class, and the target more than that.
    every: A,
    more: A,
}

impl<A: Exp> LogitsGradient<A> {
    fn new([n, classes]: [usize; 2], grad_scale: f64, label_smoothing: f64) -> Self {
        Self {
            scale: A::of(grad_scale / n as f64),
            every: A::of(label_smoothing / classes as f64),
            more: A::of(1.0 - label_smoothing),
        }
    }

    #[inline(always)]
    fn elsewhere(self, log_probability: A) -> A {
        (log_probability.exponential() - self.every) * self.scale
    }

    #[inline(always)]
    fn at_target(self, log_probability: A) -> A {
        (log_probability.exponential() - self.more - self.every) * self.scale
    }
}

pub(super) fn cross_entropy_backward_assign(
    [logits, targets, log_sum_exp, grad_scale]: [&Tensor; 4],
    label_smoothing: f64,
) -> Result<Tensor> {
    let grad_scale = scalar(grad_scale)?;
    with_slice(targets, |targets: &[u32]| {
        logits.inplace_op1(&GradientInPlace { targets, log_sum_exp, grad_scale, label_smoothing })
    })?;
    Ok(logits.clone())
}

/// Makes logits their gradient.
struct GradientInPlace<'a> {
    targets: &'a [u32],
    log_sum_exp: &'a Tensor,
    grad_scale: f64,
    label_smoothing: f64,
}

impl InplaceOp1 for GradientInPlace<'_> {
    fn name(&self) -> &'static str {
        "cross_entropy_backward_assign"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        fn typed<T: Lane<Acc: Exp>>(
            storage: &mut CpuStorage,
            layout: &Layout,
            this: &GradientInPlace<'_>,
        ) -> Result<()> {
            let ((n, classes), start) = (layout.shape().dims2()?, layout.start_offset());
            let data = &mut T::slice_mut(storage)?[start..][..layout.shape().elem_count()];
            let parts: &[T::Acc] = &Elements::of(this.log_sum_exp)?;
            let derivative =
                LogitsGradient::<T::Acc>::new([n, classes], this.grad_scale, this.label_smoothing);
            for_each_chunk::<T::Acc, _>(
                data,
                GRAIN,
                #[inline(always)]
                |chunk, data| {
                    let (own, start) = (derivative, chunk * GRAIN);
                    for (row, run) in runs(start, data.len(), classes) {
                        let (max, log_sum) = (parts[row], parts[n + row]);
                        let (from, data) = (start + run.start, &mut data[run]);
                        let target = row * classes + this.targets[row] as usize;
                        let target = target.wrapping_sub(from);
                        let logit = data.get(target).map(|x| x.widened());
                        for x in data.iter_mut() {
                            *x = T::narrowed(own.elsewhere(x.widened() - max - log_sum));
                        }
                        if let (Some(x), Some(logit)) = (data.get_mut(target), logit) {
                            *x = T::narrowed(own.at_target(logit - max - log_sum));
                        }
                    }
                },
            );
            Ok(())
        }
        with_element!(storage.dtype(), T => typed::<T>(storage, layout, self))
    }
}

pub(super) fn nll_forward(log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane>(log_probs: &Tensor, targets: &[u32]) -> Result<Tensor> {
        let (n, classes) = log_probs.dims2()?;
        let data: &[T] = &Elements::of(log_probs)?;
        let picked =
            targets.iter().enumerate().map(|(row, &target)| row * classes + target as usize);
        let sum: f64 = picked.map(|at| data[at].widened().to_double()).sum();
        Ok(tensor(vec![T::Acc::of(-sum / n as f64)], &[]))
    }
    let _held = hold([log_probs, targets]);
    with_slice(
        targets,
        |targets: &[u32]| with_element!(log_probs.dtype(), T => typed::<T>(log_probs, targets)),
    )
}

pub(super) fn pairwise_forward(loss: Pairwise, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Math>>(
        loss: Pairwise,
        input: &Tensor,
        target: &Tensor,
    ) -> Result<Tensor> {
        let _held = hold([input, target]);
        let (a, b): (&[T], &[T]) = (&Elements::of(input)?, &Elements::of(target)?);
        let terms = generate(
            a.len(),
            #[inline(always)]
            |start, out: &mut [T::Acc]| {
                let mut wide = [T::Acc::default(); BLOCK];
                let wide = widened(&b[start..], &mut wide[..out.len()]);
                pairwise::terms(loss, widened(&a[start..], out), wide);
            },
        );
        let layout = Channels::rows(1, terms.len());
        let sums = layout.sums::<T::Acc, 1, 0, 1>(
            [&terms],
            [],
            #[inline(always)]
            |x, []| x,
        );
        Tensor::new(sums[0][0] / a.len() as f64, &Device::Cpu)?.to_dtype(T::Acc::DTYPE)
    }
    with_element!(input.dtype(), T => typed::<T>(loss, input, target))
}

pub(super) fn pairwise_backward(
    (loss, side): (Pairwise, Side),
    input: &Tensor,
    target: &Tensor,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Math>, O: Lane<Acc = T::Acc>>(
        (loss, side): (Pairwise, Side),
        input: &Tensor,
        target: &Tensor,
        grad_scale: &Tensor,
    ) -> Result<Tensor> {
        let _held = hold([input, target]);
        let (a, b): (&[T], &[T]) = (&Elements::of(input)?, &Elements::of(target)?);
        let scale = T::Acc::of(scalar(grad_scale)? / a.len() as f64);
        let dx = generate(
            a.len(),
            #[inline(always)]
            |start, out: &mut [O]| {
                let [mut derivatives, mut wide] = [[T::Acc::default(); BLOCK]; 2];
                let wide = widened(&b[start..], &mut wide[..out.len()]);
                let derivatives = widened(&a[start..], &mut derivatives[..out.len()]);
                pairwise::derivatives(loss, side, derivatives, wide);
                for (out, derivative) in out.iter_mut().zip(derivatives) {
                    *out = O::narrowed(*derivative * scale);
                }
            },
        );
        Ok(tensor(dx, input.dims()))
    }
    with_element!(input.dtype(), T => with_output!(T, out, O => {
        typed::<T, O>((loss, side), input, target, grad_scale)
    }))
}

/// The first elements of `src` in `dst`.
#[inline(always)]
fn widened<'a, T: Lane>(src: &[T], dst: &'a mut [T::Acc]) -> &'a mut [T::Acc] {
    for (dst, src) in dst.iter_mut().zip(src) {
        *dst = src.widened();
    }
    dst
}

fn scalar(tensor: &Tensor) -> Result<f64> {
    tensor.detach().to_dtype(DType::F64)?.to_scalar()
}
