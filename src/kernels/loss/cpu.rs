use candle_core::{DType, Device, Result, Tensor, WithDType};

use crate::kernels::element::{Elements, Real, tensor, with_element};
use crate::kernels::elementwise::blocks::{generate, map, runs, with_output};
use crate::kernels::elementwise::cpu::with_slice;
use crate::kernels::elementwise::lane::Lane;
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
        let log_sum_exp: Vec<f64> =
            max.iter().zip(sum).map(|(max, sum)| max.to_double() + sum.ln()).collect();
        let mut loss = 0.0;
        for (row, &target) in targets.iter().enumerate() {
            let logit = data[row * classes + target as usize].raise().to_double();
            loss += log_sum_exp[row] - (1.0 - label_smoothing) * logit;
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
    fn typed<T: Lane<Acc: Exp>, O: Lane<Acc = T::Acc>>(
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
            #[inline(always)]
            |start, out: &mut [O]| {
                // Copies that writes to `out` cannot change.
                let (scale, other, rest) = (scale, other, rest);
                for (row, run) in runs(start, out.len(), classes) {
                    let log_sum_exp = log_sum_exp[row];
                    let (from, out) = (start + run.start, &mut out[run]);
                    let data = &data[from..from + out.len()];
                    let probability = |x: &T| (x.raise() - log_sum_exp).exponential();
                    for (out, x) in out.iter_mut().zip(data) {
                        *out = O::lower((probability(x) - other) * scale);
                    }
                    let target = (row * classes + targets[row] as usize).wrapping_sub(from);
                    if let (Some(out), Some(x)) = (out.get_mut(target), data.get(target)) {
                        *out = O::lower((probability(x) - rest - other) * scale);
                    }
                }
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
    fn typed<T: Lane>(input: &Tensor, target: &Tensor) -> Result<Tensor> {
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
    fn typed<T: Lane, O: Lane<Acc = T::Acc>>(
        input: &Tensor,
        target: &Tensor,
        grad_scale: &Tensor,
    ) -> Result<Tensor> {
        let (a, b) = (Elements::<T>::of(input)?, Elements::<T>::of(target)?);
        let scale = T::Acc::of(2.0 * scalar(grad_scale)? / a.len() as f64);
        let dx = map::<T, O, 2>(
            [&a, &b],
            #[inline(always)]
            move |[a, b]| (a - b) * scale,
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
