use candle_core::{DType, Device, Result, Tensor, WithDType};

use crate::kernels::element::{Element, Elements, Real, tensor, with_element};
use crate::kernels::elementwise::blocks::{generate, map, runs, widen, with_output};
use crate::kernels::elementwise::cpu::with_slice;
use crate::kernels::reduce::channels::Channels;
use crate::kernels::softmax::cpu::{Exp, maxima_and_sums};

pub(super) fn cross_entropy_forward(
    logits: &Tensor,
    targets: &Tensor,
    label_smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    fn typed<T: Element<Acc: Exp>>(
        logits: &Tensor,
        targets: &[u32],
        label_smoothing: f64,
    ) -> Result<(Tensor, Tensor)> {
        let (n, classes) = logits.dims2()?;
        let data: &[T] = &Elements::of(logits)?;
        let layout = Channels::rows(n, classes);
        let (max, sum) = maxima_and_sums(data, layout);
        let log_sum_exp: Vec<f64> =
            max.iter().zip(sum).map(|(max, sum)| max.to_double() + sum.ln()).collect();
        let mut loss = 0.0;
        for (row, &target) in targets.iter().enumerate() {
            let mut logit = [T::Acc::of(0.0)];
            T::widen(&data[row * classes + target as usize..][..1], &mut logit);
            loss += log_sum_exp[row] - (1.0 - label_smoothing) * logit[0].to_double();
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
        let log_sum_exp = log_sum_exp.into_iter().map(T::Acc::of).collect();
        let loss = tensor(vec![T::Acc::of(loss / n as f64)], &[]);
        Ok((loss, tensor::<T::Acc>(log_sum_exp, &[n])))
    }
    with_slice(
        targets,
        |targets: &[u32]| with_element!(logits.dtype(), T => typed::<T>(logits, targets, label_smoothing)),
    )
}

pub(super) fn cross_entropy_backward(
    logits: &Tensor,
    targets: &Tensor,
    log_sum_exp: &Tensor,
    grad_scale: &Tensor,
    label_smoothing: f64,
    out: DType,
) -> Result<Tensor> {
    fn typed<T: Element<Acc: Exp>, O: Element<Acc = T::Acc>>(
        logits: &Tensor,
        targets: &[u32],
        log_sum_exp: &Tensor,
        grad_scale: &Tensor,
        label_smoothing: f64,
    ) -> Result<Tensor> {
        let (n, classes) = logits.dims2()?;
        let data: &[T] = &Elements::of(logits)?;
        let log_sum_exp: &[T::Acc] = &Elements::of(log_sum_exp)?;
        let scale = T::Acc::of(scalar(grad_scale)? / n as f64);
        let other = T::Acc::of(label_smoothing / classes as f64);
        let rest = T::Acc::of(1.0 - label_smoothing);
        let dx = generate(
            n * classes,
            1,
            #[inline(always)]
            |start, wide, out: &mut [O]| {
                widen([data], start, out.len(), wide);
                let wide = &mut wide[0][..out.len()];
                for (row, run) in runs(start, out.len(), classes) {
                    let log_sum_exp = log_sum_exp[row];
                    let target = row * classes + targets[row] as usize;
                    let target = target.checked_sub(start).filter(|at| run.contains(at));
                    let logit = target.map(|at| wide[at]);
                    for x in &mut wide[run] {
                        *x = ((*x - log_sum_exp).exponential() - other) * scale;
                    }
                    if let (Some(at), Some(logit)) = (target, logit) {
                        let probability = (logit - log_sum_exp).exponential();
                        wide[at] = (probability - rest - other) * scale;
                    }
                }
                O::narrow(wide, out);
            },
        );
        Ok(tensor(dx, &[n, classes]))
    }
    with_slice(targets, |targets: &[u32]| {
        with_element!(logits.dtype(), T => with_output!(T, out, O => {
            typed::<T, O>(logits, targets, log_sum_exp, grad_scale, label_smoothing)
        }))
    })
}

pub(super) fn mse_forward(input: &Tensor, target: &Tensor) -> Result<Tensor> {
    fn typed<T: Element>(input: &Tensor, target: &Tensor) -> Result<Tensor> {
        let (a, b) = (Elements::<T>::of(input)?, Elements::<T>::of(target)?);
        let sums = Channels::rows(1, a.len()).sums::<T, 2, 0, 1>(
            [&a, &b],
            [],
            #[inline(always)]
            |[a, b], []| [(a - b) * (a - b)],
        );
        Tensor::new(sums[0][0] / a.len() as f64, &Device::Cpu)?.to_dtype(T::Acc::DTYPE)
    }
    with_element!(input.dtype(), T => typed::<T>(input, target))
}

pub(super) fn mse_backward(
    input: &Tensor,
    target: &Tensor,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    fn typed<T: Element, O: Element<Acc = T::Acc>>(
        input: &Tensor,
        target: &Tensor,
        grad_scale: &Tensor,
    ) -> Result<Tensor> {
        let (a, b) = (Elements::<T>::of(input)?, Elements::<T>::of(target)?);
        let scale = T::Acc::of(2.0 * scalar(grad_scale)? / a.len() as f64);
        let dx = map::<T, O, 2>(
            [&a, &b],
            #[inline(always)]
            |[a, b]| (a - b) * scale,
        );
        Ok(tensor(dx, input.dims()))
    }
    with_element!(input.dtype(), T => with_output!(T, out, O => {
        typed::<T, O>(input, target, grad_scale)
    }))
}

fn scalar(tensor: &Tensor) -> Result<f64> {
    tensor.detach().to_dtype(DType::F64)?.to_scalar()
}
