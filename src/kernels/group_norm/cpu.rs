//! Group norm on the CPU.
//!
//! The tensor is read as two matrices. For the statistics, a row is a group of a sample. For weight and bias, a row
//! is a plane: one channel of one sample. Mean, `weight / std` and shift are computed once per plane, in F64, so that
//! the pass over the elements is `(x - mean) * scale + shift`.
//!
//! Backward sums the gradient and its product with `x` once per plane. The sums of a group's planes give `dx`, those of
//! a channel's planes give the gradients of weight and bias.

use candle_core::{DType, Result, Tensor};

use crate::kernels::cast;
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::with_output;
use crate::kernels::reduce::channels::Channels;
use crate::kernels::reduce::norm::parameter;

/// Two views of the images as matrices: a row per group, and a row per channel of each sample.
struct Layouts {
    channels: usize,
    groups: Channels,
    planes: Channels,
}

impl Layouts {
    fn of(x: &Tensor, groups: usize) -> Result<Self> {
        let (n, channels) = (x.dim(0)?, x.dim(1)?);
        let inner: usize = x.dims()[2..].iter().product();
        Ok(Self {
            channels,
            groups: Channels::rows(n * groups, channels / groups * inner),
            planes: Channels::rows(n * channels, inner),
        })
    }

    /// `f` of every plane: of its number, its channel, and its group's statistics.
    fn of_planes<A: Real>(
        &self,
        statistics: &[[f64; 3]],
        f: impl Fn(usize, usize, [f64; 3]) -> f64,
    ) -> Vec<A> {
        let size = self.planes.channels / self.groups.channels.max(1);
        let of = |plane| A::of(f(plane, plane % self.channels, statistics[plane / size]));
        (0..self.planes.channels).map(of).collect()
    }
}

pub(super) fn forward(
    x: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    fn typed<T: Lane>(
        x: &Tensor,
        layouts: Layouts,
        weight: Vec<f64>,
        bias: Vec<f64>,
        eps: f64,
    ) -> Result<(Tensor, Tensor)> {
        let data = Elements::<T>::of(x)?;
        let statistics = statistics::<T>(&data, layouts.groups, eps);
        let mean = layouts.of_planes(&statistics, |_, _, [mean, ..]| mean);
        let scale = layouts.of_planes(&statistics, |_, c, [.., inv_std]| weight[c] * inv_std);
        let shift = layouts.of_planes(&statistics, |_, c, [_, rest, inv_std]| {
            bias[c] - rest * weight[c] * inv_std
        });
        let y = layouts.planes.normalise::<T>(&data, [&mean, &scale, &shift]);
        let rows = statistics.len();
        let statistics = statistics.into_iter().flatten().map(T::Acc::of).collect();
        Ok((tensor(y, x.dims()), tensor::<T::Acc>(statistics, &[rows, 3])))
    }
    let layouts = Layouts::of(x, groups)?;
    let weight = parameter::<f64>(weight, layouts.channels, 1.0)?;
    let bias = parameter::<f64>(bias, layouts.channels, 0.0)?;
    with_element!(x.dtype(), T => typed::<T>(x, layouts, weight, bias, eps))
}

/// The mean of every group, what it is short of once rounded, and `1 / std`.
fn statistics<T: Lane>(x: &[T], groups: Channels, eps: f64) -> Vec<[f64; 3]> {
    let count = groups.count() as f64;
    let mean: Vec<_> = groups.sum(x).into_iter().map(|sum| T::Acc::of(sum / count)).collect();
    let sums = groups.deviations(x, &mean);
    let row = |(mean, [sum, squares]): (&T::Acc, [f64; 2])| {
        let rest = sum / count;
        let var = squares / count - rest * rest;
        let var = if var < 0.0 { 0.0 } else { var };
        [mean.to_double(), rest, 1.0 / (var + eps).sqrt()]
    };
    mean.iter().zip(sums).map(row).collect()
}

pub(super) fn backward(
    x: &Tensor,
    grad: &Tensor,
    groups: usize,
    weight: Option<&Tensor>,
    statistics: &Tensor,
    wants: [Option<DType>; 3],
) -> Result<[Option<Tensor>; 3]> {
    let layouts = Layouts::of(x, groups)?;
    let weight = parameter::<f64>(weight, layouts.channels, 1.0)?;
    let statistics = parameter::<f64>(Some(&statistics.flatten_all()?), 0, 0.0)?;
    let statistics = statistics.as_chunks::<3>().0;
    let sums = with_element!(x.dtype(), T => gradient_sums::<T>(x, grad, &layouts, statistics)?);
    let channels = layouts.channels;
    let total = |k: usize, dtype: DType| {
        let mut total = vec![0.0; channels];
        for (plane, sums) in sums.iter().enumerate() {
            total[plane % channels] += sums[k];
        }
        cast(&tensor(total, &[channels]), dtype)
    };
    let dx = |out: DType| {
        with_element!(x.dtype(), T => with_output!(T, out, O => {
            input_gradient::<T, O>(x, grad, &layouts, &weight, statistics, &sums)
        }))
    };
    Ok([
        wants[0].map(dx).transpose()?,
        wants[1].map(|dtype| total(1, dtype)).transpose()?,
        wants[2].map(|dtype| total(0, dtype)).transpose()?,
    ])
}

/// For every plane, the sums of `grad` and of `grad * normalised`.
fn gradient_sums<T: Lane>(
    x: &Tensor,
    grad: &Tensor,
    layouts: &Layouts,
    statistics: &[[f64; 3]],
) -> Result<Vec<[f64; 2]>> {
    let _held = hold([x, grad]);
    let (x, grad) = (Elements::<T>::of(x)?, Elements::<T>::of(grad)?);
    let mean = layouts.of_planes(statistics, |_, _, [mean, ..]| mean);
    let sums = layouts.planes.gradient_sums::<T>(&x, &grad, &mean);
    let dots: Vec<f64> = layouts.of_planes(statistics, |plane, _, [_, rest, inv_std]| {
        (sums[plane][1] - rest * sums[plane][0]) * inv_std
    });
    Ok(sums.into_iter().zip(dots).map(|([sum, _], dot)| [sum, dot]).collect())
}

/// `(weight * grad - average(weight * grad) - normalised * average(weight * grad * normalised)) /
/// std`, averages over a group.
fn input_gradient<T: Lane, O: Lane<Acc = T::Acc>>(
    x: &Tensor,
    grad: &Tensor,
    layouts: &Layouts,
    weight: &[f64],
    statistics: &[[f64; 3]],
    sums: &[[f64; 2]],
) -> Result<Tensor> {
    let size = layouts.planes.channels / layouts.groups.channels.max(1);
    let averages: Vec<[f64; 2]> = sums
        .chunks(size.max(1))
        .enumerate()
        .map(|(group, sums)| {
            let average = |k: usize| {
                let weigh = |(i, sums): (usize, &[f64; 2])| {
                    sums[k] * weight[(group * size + i) % layouts.channels]
                };
                sums.iter().enumerate().map(weigh).sum::<f64>() / layouts.groups.count() as f64
            };
            [average(0), average(1)]
        })
        .collect();
    let mean = layouts.of_planes(statistics, |_, _, [mean, ..]| mean);
    let scale = layouts.of_planes(statistics, |_, c, [.., inv_std]| weight[c] * inv_std);
    let deviation_scale = layouts.of_planes(statistics, |plane, _, [.., inv_std]| {
        -averages[plane / size][1] * inv_std * inv_std
    });
    let shift = layouts.of_planes(statistics, |plane, _, [_, rest, inv_std]| {
        let [average, along] = averages[plane / size];
        (rest * along * inv_std - average) * inv_std
    });
    let _held = hold([x, grad]);
    let (x_data, grad_data) = (Elements::<T>::of(x)?, Elements::<T>::of(grad)?);
    let parameters: [&[T::Acc]; 4] = [&mean, &scale, &deviation_scale, &shift];
    let dx = layouts.planes.input_gradient::<T, O>(&x_data, &grad_data, parameters);
    Ok(tensor(dx, x.dims()))
}
