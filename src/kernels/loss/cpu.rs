//! Losses of classes on the CPU.
//!
//! Cross entropy never stores probabilities. Forward keeps two numbers per row: the largest logit, and the logarithm of
//! the sum of exponentials relative to it. Backward gets each probability from these as `exp((x - largest) - log_sum)`,
//! and turns it into the gradient in the same pass. If nothing else needs the logits, it overwrites them, which saves
//! the largest buffer of a language model's step.

use candle_core::{DType, Result, Tensor};

use super::class::{ClassLoss, LogitsGradient, Reduced, Reduction};
use crate::kernels::cpu::dtype::{Element, Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::in_place::write;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{GRAIN, for_each_chunk, generate, runs, with_output};
use crate::kernels::elementwise::cpu::with_slice;
use crate::kernels::reduce::channels::Channels;
use crate::kernels::softmax::cpu::{Exp, maxima_and_sums};

/// The targets of the rows, and how much each counts.
#[derive(Clone, Copy)]
struct Targets<'a, A> {
    classes: &'a [u32],
    ignored: Option<u32>,
    weights: Option<&'a [A]>,
}

impl<A: Real> Targets<'_, A> {
    /// The class of a row that counts, and its weight.
    #[inline(always)]
    fn of(&self, row: usize) -> Option<(usize, f64)> {
        let class = self.classes[row];
        if Some(class) == self.ignored {
            return None;
        }
        let class = class as usize;
        Some((class, self.weights.map_or(1.0, |weights| weights[class].to_double())))
    }

    /// Reduces the losses of the rows, from which `less` is yet to be taken.
    fn reduce(&self, loss: &ClassLoss, losses: Vec<f64>, less: &[f64]) -> Reduced {
        let n = losses.len();
        if loss.reduction == Reduction::None {
            let less = less.iter().copied().chain(std::iter::repeat(0.0));
            let losses = losses.iter().zip(less).map(|(loss, less)| A::of(loss - less)).collect();
            return Reduced { loss: tensor(losses, &[n]), total: None };
        }
        let sum = less.iter().fold(losses.iter().fold(0.0, |a, b| a + b), |a, b| a - b);
        let total = loss.sums_weights().then(|| {
            (0..n).filter_map(|row| self.of(row)).fold(0.0, |total, (_, weight)| total + weight)
        });
        let mean = A::of(sum / total.unwrap_or(loss.count(n)));
        let total = total.map(|total| tensor(vec![A::of(total)], &[]));
        Reduced { loss: tensor(vec![mean], &[]), total }
    }
}

/// The weights of the classes, if they have any.
fn weights<A: Element>(loss: &ClassLoss) -> Result<Option<Elements<'_, A>>> {
    loss.weights.as_ref().map(Elements::of).transpose()
}

pub(super) fn cross_entropy_forward(
    loss: &ClassLoss,
    logits: &Tensor,
    targets: &Tensor,
) -> Result<(Reduced, Tensor)> {
    fn typed<T: Lane<Acc: Exp>>(
        loss: &ClassLoss,
        logits: &Tensor,
        targets: &[u32],
    ) -> Result<(Reduced, Tensor)> {
        let (n, classes) = logits.dims2()?;
        let data: &[T] = &Elements::of(logits)?;
        let weights = weights(loss)?;
        let weights: Option<&[T::Acc]> = weights.as_deref();
        let targets = Targets { classes: targets, ignored: loss.ignored, weights };
        let layout = Channels::rows(n, classes);
        let (max, sum) = maxima_and_sums(data, layout);
        let log_sums: Vec<f64> = sum.into_iter().map(f64::ln).collect();
        let (spread, right) = (loss.label_smoothing, 1.0 - loss.label_smoothing);
        let of_target = |row: usize| {
            let Some((target, weight)) = targets.of(row) else { return 0.0 };
            let logit = data[row * classes + target].widened().to_double();
            let log_sum = max[row].to_double() + log_sums[row];
            match weights {
                None => log_sum - right * logit,
                Some(_) => right * weight * (log_sum - logit),
            }
        };
        let losses: Vec<f64> = (0..n).map(of_target).collect();
        // Without smoothing, the logits of other classes may be negative infinities.
        let less: Vec<f64> = match (spread, weights) {
            (0.0, _) => Vec::new(),
            (_, None) => {
                let counts = |row: usize| targets.of(row).is_some();
                let less = |(row, sum): (usize, f64)| match counts(row) {
                    true => spread * sum / classes as f64,
                    false => 0.0,
                };
                layout.sum(data).into_iter().enumerate().map(less).collect()
            }
            (_, Some(weights)) => {
                let all: f64 = weights.iter().map(|weight| weight.to_double()).sum();
                let less = |(row, sum): (usize, f64)| match targets.of(row) {
                    Some(_) => {
                        let log_sum = max[row].to_double() + log_sums[row];
                        spread / classes as f64 * (sum - all * log_sum)
                    }
                    None => 0.0,
                };
                weighted_sums(data, weights).into_iter().enumerate().map(less).collect()
            }
        };
        let reduced = targets.reduce(loss, losses, &less);
        // Apart, as their sum would be rounded to the last place of the larger: `exp(x - log_sum_exp)` would lose as
        // many digits as the logits are far from 0.
        let parts = max.into_iter().chain(log_sums.into_iter().map(T::Acc::of)).collect();
        Ok((reduced, tensor::<T::Acc>(parts, &[2, n])))
    }
    let _held = hold([logits, targets].into_iter().chain(&loss.weights));
    with_slice(
        targets,
        |targets: &[u32]| with_element!(logits.dtype(), T => typed::<T>(loss, logits, targets)),
    )
}

/// The sum of each row, each class times its weight.
fn weighted_sums<T: Lane>(data: &[T], weights: &[T::Acc]) -> Vec<f64> {
    const LANES: usize = 16;
    let classes = weights.len();
    let mut sums = vec![0.0; data.len() / classes];
    let per_task = GRAIN.div_ceil(classes);
    for_each_chunk::<T::Acc, _>(
        &mut sums,
        per_task,
        #[inline(always)]
        |task, sums| {
            for (row, sum) in sums.iter_mut().enumerate() {
                let row = &data[(task * per_task + row) * classes..][..classes];
                let mut lanes = [0.0; LANES];
                for (x, weights) in row.chunks(LANES).zip(weights.chunks(LANES)) {
                    for ((lane, x), weight) in lanes.iter_mut().zip(x).zip(weights) {
                        *lane += (x.widened() * *weight).to_double();
                    }
                }
                *sum = lanes.iter().sum();
            }
        },
    );
    sums
}

pub(super) fn cross_entropy_backward(of: LogitsGradient<'_>, out: DType) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Exp>, O: Lane<Acc = T::Acc>>(
        of: LogitsGradient<'_>,
        targets: &[u32],
    ) -> Result<Tensor> {
        let (n, classes) = of.logits.dims2()?;
        let data: &[T] = &Elements::of(of.logits)?;
        let (parts, weights) = (Elements::of(of.log_sum_exp)?, weights(of.loss)?);
        let weights: Option<&[T::Acc]> = weights.as_deref();
        let rows = RowGradients::<T::Acc>::new(of, &parts, targets, weights)?;
        let dx = generate(
            n * classes,
            #[inline(always)]
            |start, out: &mut [O]| {
                for (row, run) in runs(start, out.len(), classes) {
                    let (from, out) = (start + run.start, &mut out[run]);
                    let Some((target, own)) = rows.of(row) else {
                        out.fill(O::default());
                        continue;
                    };
                    let (own, column) = (own, from - row * classes); // a copy that writes to `out` cannot change
                    let data = &data[from..from + out.len()];
                    match weights {
                        None => {
                            for (out, x) in out.iter_mut().zip(data) {
                                *out = O::narrowed(own.elsewhere(x.widened()));
                            }
                        }
                        Some(weights) => {
                            let classes = data.iter().zip(&weights[column..]);
                            for (out, (x, weight)) in out.iter_mut().zip(classes) {
                                *out = O::narrowed(own.weighted(x.widened(), *weight));
                            }
                        }
                    }
                    let target = target.wrapping_sub(column);
                    if let (Some(out), Some(x)) = (out.get_mut(target), data.get(target)) {
                        *out = O::narrowed(own.at_target(x.widened()));
                    }
                }
            },
        );
        Ok(tensor(dx, &[n, classes]))
    }
    let _held = hold([of.logits, of.targets, of.log_sum_exp].into_iter().chain(&of.loss.weights));
    with_slice(of.targets, |targets: &[u32]| {
        with_element!(of.logits.dtype(), T => with_output!(T, out, O => {
            typed::<T, O>(of, targets)
        }))
    })
}

/// What the gradients of all rows are computed from.
struct RowGradients<'a, A> {
    targets: Targets<'a, A>,
    parts: &'a [A],
    /// Of each row's loss, or of all rows.
    scales: Vec<A>,
    stride: usize,
    /// What the target distribution gives every class, and the target more than that.
    every: f64,
    more: f64,
    /// Of a row where all classes weigh 1.
    even: RowGradient<A>,
    /// The sum of the weights.
    sum: f64,
}

/// The gradient of a row's logits.
#[derive(Clone, Copy)]
struct RowGradient<A> {
    max: A,
    log_sum: A,
    scale: A,
    /// The sum of the target distribution.
    mass: A,
    /// What it gives every class before weights, the target after them, and the target more than that.
    every: A,
    target: A,
    more: A,
}

impl<'a, A: Exp> RowGradients<'a, A> {
    fn new(
        of: LogitsGradient<'_>,
        parts: &'a [A],
        targets: &'a [u32],
        weights: Option<&'a [A]>,
    ) -> Result<Self> {
        let LogitsGradient { loss, total, gradient, .. } = of;
        let total = total.map(numbers).transpose()?;
        let total = total.map_or(loss.count(targets.len()), |total| total[0]);
        let scales = numbers(gradient)?.into_iter().map(|gradient| A::of(gradient / total));
        let every = loss.label_smoothing / loss.classes as f64;
        let more = 1.0 - loss.label_smoothing;
        let (zero, one) = (A::zero(), A::one());
        Ok(Self {
            targets: Targets { classes: targets, ignored: loss.ignored, weights },
            parts,
            scales: scales.collect(),
            stride: loss.gradient_stride(),
            every,
            more,
            even: RowGradient {
                max: zero,
                log_sum: zero,
                scale: zero,
                mass: one,
                every: A::of(every),
                target: A::of(every),
                more: A::of(more),
            },
            sum: weights.into_iter().flatten().map(|weight| weight.to_double()).sum(),
        })
    }

    /// The class of a row that counts, and its gradient.
    #[inline(always)]
    fn of(&self, row: usize) -> Option<(usize, RowGradient<A>)> {
        let (target, weight) = self.targets.of(row)?;
        let own = RowGradient {
            max: self.parts[row],
            log_sum: self.parts[self.targets.classes.len() + row],
            scale: self.scales[row * self.stride],
            ..self.even
        };
        if self.targets.weights.is_none() {
            return Some((target, own));
        }
        let mass = A::of(self.more * weight + self.every * self.sum);
        let (of_target, more) = (A::of(self.every * weight), A::of(self.more * weight));
        Some((target, RowGradient { mass, target: of_target, more, ..own }))
    }
}

impl<A: Exp> RowGradient<A> {
    #[inline(always)]
    fn probability(self, logit: A) -> A {
        (logit - self.max - self.log_sum).exponential()
    }

    /// Of a class that is not the target, where all weigh 1.
    #[inline(always)]
    fn elsewhere(self, logit: A) -> A {
        (self.probability(logit) - self.every) * self.scale
    }

    #[inline(always)]
    fn weighted(self, logit: A, weight: A) -> A {
        (self.probability(logit) * self.mass - self.every * weight) * self.scale
    }

    #[inline(always)]
    fn at_target(self, logit: A) -> A {
        (self.probability(logit) * self.mass - self.more - self.target) * self.scale
    }
}

/// Makes logits their gradient.
pub(super) fn cross_entropy_backward_assign(of: LogitsGradient<'_>) -> Result<Tensor> {
    fn typed<T: Lane<Acc: Exp>>(of: LogitsGradient<'_>, targets: &[u32]) -> Result<()> {
        let (_, classes) = of.logits.dims2()?;
        let (parts, weights) = (Elements::of(of.log_sum_exp)?, weights(of.loss)?);
        let weights: Option<&[T::Acc]> = weights.as_deref();
        let rows = RowGradients::<T::Acc>::new(of, &parts, targets, weights)?;
        write(of.logits, |data: &mut [T]| {
            for_each_chunk::<T::Acc, _>(
                data,
                GRAIN,
                #[inline(always)]
                |chunk, data| {
                    let start = chunk * GRAIN;
                    for (row, run) in runs(start, data.len(), classes) {
                        let (from, data) = (start + run.start, &mut data[run]);
                        let Some((target, own)) = rows.of(row) else {
                            data.fill(T::default());
                            continue;
                        };
                        let (own, column) = (own, from - row * classes);
                        let target = target.wrapping_sub(column);
                        let logit = data.get(target).map(|x| x.widened());
                        match weights {
                            None => {
                                for x in data.iter_mut() {
                                    *x = T::narrowed(own.elsewhere(x.widened()));
                                }
                            }
                            Some(weights) => {
                                for (x, weight) in data.iter_mut().zip(&weights[column..]) {
                                    *x = T::narrowed(own.weighted(x.widened(), *weight));
                                }
                            }
                        }
                        if let (Some(x), Some(logit)) = (data.get_mut(target), logit) {
                            *x = T::narrowed(own.at_target(logit));
                        }
                    }
                },
            );
        })
    }
    with_slice(
        of.targets,
        |targets: &[u32]| with_element!(of.logits.dtype(), T => typed::<T>(of, targets)),
    )?;
    Ok(of.logits.clone())
}

pub(super) fn nll_forward(
    loss: &ClassLoss,
    log_probs: &Tensor,
    targets: &Tensor,
) -> Result<Reduced> {
    fn typed<T: Lane>(loss: &ClassLoss, log_probs: &Tensor, targets: &[u32]) -> Result<Reduced> {
        let (n, classes) = log_probs.dims2()?;
        let data: &[T] = &Elements::of(log_probs)?;
        let weights = weights(loss)?;
        let targets: Targets<'_, T::Acc> =
            Targets { classes: targets, ignored: loss.ignored, weights: weights.as_deref() };
        let of_row = |row: usize| match targets.of(row) {
            Some((target, weight)) => -data[row * classes + target].widened().to_double() * weight,
            None => 0.0,
        };
        Ok(targets.reduce(loss, (0..n).map(of_row).collect(), &[]))
    }
    let _held = hold([log_probs, targets].into_iter().chain(&loss.weights));
    with_slice(
        targets,
        |targets: &[u32]| with_element!(log_probs.dtype(), T => typed::<T>(loss, log_probs, targets)),
    )
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.detach().to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}
