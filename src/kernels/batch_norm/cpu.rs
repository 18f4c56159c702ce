//! Batch norm on the CPU: sums for each channel, then one pass over the elements.
//!
//! All that depends on the channel alone is computed once per channel: forward is then `(x - mean) * scale + bias`,
//! backward a linear function of `x` and its gradient. A fused rectifier, with or without a residual, is part of the same
//! pass, so that nothing in between is written. Backward finds out again from `x` what the rectifier let through. It uses
//! the same numbers in the same order as forward, so both agree.

use candle_core::{Result, Tensor};

use super::affine::{Affine, Finish, Gradients, Rectifier};
use super::statistics::{Running, Statistics};
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::elementwise::cpu::{rectified_gradient, rectify};
use crate::kernels::reduce::channels::Channels;

pub(super) fn forward_train(
    x: &Tensor,
    affine: Affine<'_>,
    finish: Finish<'_>,
    eps: f64,
) -> Result<(Tensor, Statistics)> {
    fn typed<T: Lane>(
        x: &Tensor,
        affine: Affine<'_>,
        finish: Finish<'_>,
        eps: f64,
    ) -> Result<(Tensor, Statistics)> {
        let residual = if let Finish::AddRelu(residual) = &finish { Some(*residual) } else { None };
        let _held = hold([x].into_iter().chain(residual));
        let (elements, layout) = (Elements::<T>::of(x)?, Channels::of(x.dims(), 1));
        let (mean, var) = moments::<T>(&elements, layout);
        let inv_std: Vec<_> = var.iter().map(|&v| inv_std::<T::Acc>(v, eps)).collect();
        let y = normalised::<T>(x.dims(), &elements, &mean, &inv_std, affine, finish)?;
        let mut all = mean;
        all.extend(var.into_iter().map(T::Acc::of));
        all.extend(inv_std);
        Ok((y, Statistics(tensor(all, &[3 * layout.channels]))))
    }
    with_element!(x.dtype(), T => typed::<T>(x, affine, finish, eps))
}

pub(super) fn forward_eval(x: &Tensor, running: Running<'_>, affine: Affine<'_>) -> Result<Tensor> {
    with_element!(x.dtype(), T => {
        let var = vector::<f64>(running.var)?;
        let inv_std: Vec<_> = var.iter().map(|&v| inv_std(v, running.eps)).collect();
        let (mean, elements) = (vector(running.mean)?, Elements::of(x)?);
        normalised::<T>(x.dims(), &elements, &mean, &inv_std, affine, Finish::Plain)
    })
}

pub(super) fn backward_train(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
) -> Result<Gradients> {
    let affine = Affine { weight, bias: None };
    with_element!(x.dtype(), T => through::<T>(x, grad, affine, statistics, None))
}

/// From the gradient of what [`Finish::Rectified`] leaves: it stops where that is 0, or 6 of ReLU6, which is seen from
/// `x` again, so that no gradient in between is written and read twice.
pub(super) fn backward_rectified(
    by: Rectifier,
    x: &Tensor,
    grad: &Tensor,
    affine: Affine<'_>,
    statistics: &Statistics,
) -> Result<Gradients> {
    with_element!(x.dtype(), T => through::<T>(x, grad, affine, statistics, Some(by)))
}

/// Through the rectifier first, if there is one.
fn through<T: Lane>(
    x: &Tensor,
    grad: &Tensor,
    affine: Affine<'_>,
    statistics: &Statistics,
    rectifier: Option<Rectifier>,
) -> Result<Gradients> {
    let layout = Channels::of(x.dims(), 1);
    let _held = hold([x, grad]);
    let (x_data, grad_data) = (Elements::<T>::of(x)?, Elements::<T>::of(grad)?);
    let mean = vector::<T::Acc>(&statistics.mean()?)?;
    // As it was multiplied by in [`normalised`], for the same numbers to be positive.
    let scale = scales::<T::Acc>(affine.weight, &vector(&statistics.inv_std()?)?)?;
    let bias = shift::<T::Acc>(affine.bias, layout)?;
    macro_rules! sums {
        ($flowing:ident) => {
            layout.sums::<T, 2, 3, 2>(
                [&x_data, &grad_data],
                [&mean, &scale, &bias],
                #[inline(always)]
                |[x, g], parameters| {
                    let g = $flowing::<T>(x, g, parameters);
                    [g, g * (x - parameters[0])]
                },
            )
        };
    }
    let sums = match rectifier {
        None => layout.gradient_sums::<T>(&x_data, &grad_data, &mean),
        Some(Rectifier::Relu) => sums!(through_relu),
        Some(Rectifier::Relu6) => sums!(through_relu6),
    };
    // dx = weight * inv_std * (g - average(g) - normalised * average(g * normalised))
    let inv_std = vector::<f64>(&statistics.inv_std()?)?;
    let count = layout.count() as f64;
    let per_channel = |f: &dyn Fn(usize, f64) -> f64| -> Vec<T::Acc> {
        let scale = scale.iter().map(|scale| scale.to_double());
        scale.enumerate().map(|(c, scale)| T::Acc::of(f(c, scale))).collect()
    };
    let deviation_scale = per_channel(&|c, scale| -scale * inv_std[c].powi(2) * sums[c][1] / count);
    let shift = per_channel(&|c, scale| -scale * sums[c][0] / count);
    macro_rules! dx {
        ($flowing:ident) => {
            layout.map::<T, T, 2, 5>(
                [&x_data, &grad_data],
                [&mean, &scale, &bias, &deviation_scale, &shift],
                #[inline(always)]
                |[x, g], [mean, scale, bias, deviation_scale, shift]| {
                    let g = $flowing::<T>(x, g, [mean, scale, bias]);
                    (x - mean) * deviation_scale + (g * scale + shift)
                },
            )
        };
    }
    let dx = match rectifier {
        None => {
            layout.input_gradient(&x_data, &grad_data, [&mean, &scale, &deviation_scale, &shift])
        }
        Some(Rectifier::Relu) => dx!(through_relu),
        Some(Rectifier::Relu6) => dx!(through_relu6),
    };
    let (dweight, dbias) = parameter_gradients::<T>(&sums, &inv_std);
    Ok((tensor(dx, x.dims()), dweight, dbias))
}

/// The gradient, or zero where relu left zero, decided by the rounded result.
#[inline(always)]
fn through_relu<T: Lane>(x: T::Acc, g: T::Acc, [mean, scale, bias]: [T::Acc; 3]) -> T::Acc {
    rectified_gradient(T::narrowed((x - mean) * scale + bias).widened(), g)
}

/// Of relu6: zero where six was left, too.
#[inline(always)]
fn through_relu6<T: Lane>(x: T::Acc, g: T::Acc, [mean, scale, bias]: [T::Acc; 3]) -> T::Acc {
    let y = T::narrowed((x - mean) * scale + bias).widened();
    rectified_gradient(y, if y >= T::Acc::of(6.0) { T::Acc::of(0.0) } else { g })
}

pub(super) fn backward_eval(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    running: Running<'_>,
) -> Result<Gradients> {
    fn typed<T: Lane>(
        x: &Tensor,
        grad: &Tensor,
        mean: &Tensor,
        inv_std: &[f64],
        weight: Option<&Tensor>,
    ) -> Result<Gradients> {
        let layout = Channels::of(x.dims(), 1);
        let _held = hold([x, grad]);
        let (x_data, grad_data) = (Elements::<T>::of(x)?, Elements::<T>::of(grad)?);
        let sums = layout.gradient_sums::<T>(&x_data, &grad_data, &vector(mean)?);
        let scale: Vec<_> = scales(weight, inv_std)?.into_iter().map(T::Acc::of).collect();
        let dx = layout.map::<T, T, 1, 1>(
            [&grad_data],
            [&scale],
            #[inline(always)]
            |[g], [scale]| g * scale,
        );
        let (dweight, dbias) = parameter_gradients::<T>(&sums, inv_std);
        Ok((tensor(dx, x.dims()), dweight, dbias))
    }
    let var = vector::<f64>(running.var)?;
    let inv_std: Vec<f64> = var.iter().map(|&v| inv_std(v, running.eps)).collect();
    with_element!(x.dtype(), T => typed::<T>(x, grad, running.mean, &inv_std, weight))
}

pub(super) fn statistics(x: &Tensor) -> Result<(Tensor, Tensor)> {
    fn typed<T: Lane>(x: &Tensor) -> Result<(Tensor, Tensor)> {
        let layout = Channels::of(x.dims(), 1);
        let (mean, var) = moments::<T>(&Elements::of(x)?, layout);
        let var = var.into_iter().map(T::Acc::of).collect();
        let c = &[layout.channels];
        Ok((tensor(mean, c), tensor::<T::Acc>(var, c)))
    }
    with_element!(x.dtype(), T => typed::<T>(x))
}

pub(super) fn parameter_gradients_of(
    x: &Tensor,
    grad: &Tensor,
    statistics: &Statistics,
) -> Result<(Tensor, Tensor)> {
    with_element!(x.dtype(), T => {
        let _held = hold([x, grad]);
        let (x_data, grad_data) = (Elements::<T>::of(x)?, Elements::<T>::of(grad)?);
        let (layout, mean) = (Channels::of(x.dims(), 1), vector(&statistics.mean()?)?);
        let sums = layout.gradient_sums::<T>(&x_data, &grad_data, &mean);
        Ok(parameter_gradients::<T>(&sums, &vector(&statistics.inv_std()?)?))
    })
}

pub(super) fn backward_part(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
    [dweight, dbias]: [&Tensor; 2],
    count: f64,
) -> Result<Tensor> {
    fn typed<T: Lane>(
        x: &Tensor,
        grad: &Tensor,
        weight: Option<&Tensor>,
        statistics: &Statistics,
        sums: &[[f64; 2]],
        count: f64,
    ) -> Result<Tensor> {
        let layout = Channels::of(x.dims(), 1);
        let _held = hold([x, grad]);
        let (x_data, grad_data) = (Elements::<T>::of(x)?, Elements::<T>::of(grad)?);
        let mean = vector::<T::Acc>(&statistics.mean()?)?;
        let scale = scales::<T::Acc>(weight, &vector(&statistics.inv_std()?)?)?;
        let inv_std = vector::<f64>(&statistics.inv_std()?)?;
        let per_channel = |sum: usize| -> Vec<T::Acc> {
            let all = scale.iter().zip(sums).zip(&inv_std);
            let per = all.map(|((scale, sums), inv_std)| {
                let through = if sum == 1 { sums[1] * inv_std } else { sums[0] };
                T::Acc::of(-scale.to_double() * through / count)
            });
            per.collect()
        };
        let (deviation_scale, shift) = (per_channel(1), per_channel(0));
        let parameters: [&[T::Acc]; 4] = [&mean, &scale, &deviation_scale, &shift];
        let dx = layout.input_gradient::<T, T>(&x_data, &grad_data, parameters);
        Ok(tensor(dx, x.dims()))
    }
    let sums = vector::<f64>(dbias)?.into_iter().zip(vector::<f64>(dweight)?);
    let sums: Vec<[f64; 2]> = sums.map(|(dbias, dweight)| [dbias, dweight]).collect();
    with_element!(x.dtype(), T => typed::<T>(x, grad, weight, statistics, &sums, count))
}

/// The mean and the biased variance of every channel.
///
/// One pass over distances from a shift. With the mean of a sample as the shift, little cancels;
/// a shift that turns out to be far from the mean is replaced by it, for a second pass.
fn moments<T: Lane>(x: &[T], layout: Channels) -> (Vec<T::Acc>, Vec<f64>) {
    const SAMPLE: usize = 64;
    /// Squared distance of shift and mean, in variances, that costs a few bits and no more.
    const FAR: f64 = 16.0;

    let rows = SAMPLE.div_ceil(layout.inner.max(1)).min(layout.outer);
    let sample = Channels { outer: rows, ..layout };
    let (sample_sums, count) =
        (sample.sum(&x[..sample.count() * sample.channels]), sample.count() as f64);
    let mut mean: Vec<_> = sample_sums.iter().map(|sum| T::Acc::of(sum / count)).collect();
    let mut var = Vec::new();
    for _ in 0..2 {
        let sums = layout.deviations(x, &mean);
        let count = layout.count() as f64;
        let errors: Vec<f64> = sums.iter().map(|[sum, _]| sum / count).collect();
        var = sums.iter().zip(&errors).map(|([_, s], e)| positive(s / count - e * e)).collect();
        for (mean, error) in mean.iter_mut().zip(&errors) {
            *mean = T::Acc::of(mean.to_double() + error);
        }
        if !errors.iter().zip(&var).any(|(error, var)| error * error > FAR * var) {
            break;
        }
    }
    (mean, var)
}

/// `value`, or zero where rounding took it below; NaN stays.
fn positive(value: f64) -> f64 {
    if value < 0.0 { 0.0 } else { value }
}

fn normalised<T: Lane>(
    dims: &[usize],
    x: &[T],
    mean: &[T::Acc],
    inv_std: &[T::Acc],
    affine: Affine<'_>,
    finish: Finish<'_>,
) -> Result<Tensor> {
    let layout = Channels::of(dims, 1);
    let scale = scales(affine.weight, inv_std)?;
    let bias = shift(affine.bias, layout)?;
    let parameters = [mean, &scale, &bias];
    let y = match finish {
        Finish::Plain => layout.normalise(x, parameters),
        Finish::Rectified(Rectifier::Relu) => layout.map::<T, T, 1, 3>(
            [x],
            parameters,
            #[inline(always)]
            |[x], [mean, scale, bias]| rectify((x - mean) * scale + bias),
        ),
        Finish::Rectified(Rectifier::Relu6) => layout.map::<T, T, 1, 3>(
            [x],
            parameters,
            #[inline(always)]
            |[x], [mean, scale, bias]| {
                let (y, six) = (rectify((x - mean) * scale + bias), T::Acc::of(6.0));
                if y >= six { six } else { y } // NaN stays
            },
        ),
        Finish::AddRelu(residual) => layout.map::<T, T, 2, 3>(
            [x, &Elements::<T>::of(residual)?],
            parameters,
            #[inline(always)]
            |[x, residual], [mean, scale, bias]| rectify((x - mean) * scale + bias + residual),
        ),
    };
    Ok(tensor(y, dims))
}

fn parameter_gradients<T: Lane>(sums: &[[f64; 2]], inv_std: &[f64]) -> (Tensor, Tensor) {
    let dweight = sums.iter().zip(inv_std).map(|([_, dot], i)| T::Acc::of(dot * i)).collect();
    let dbias = sums.iter().map(|[sum, _]| T::Acc::of(*sum)).collect();
    (tensor::<T::Acc>(dweight, &[sums.len()]), tensor::<T::Acc>(dbias, &[sums.len()]))
}

fn inv_std<A: Real>(var: f64, eps: f64) -> A {
    A::of(1.0 / (var + eps).sqrt())
}

/// `weight * inv_std`, where no weight stands for ones.
fn scales<A: Real>(weight: Option<&Tensor>, inv_std: &[A]) -> Result<Vec<A>> {
    let Some(weight) = weight else { return Ok(inv_std.to_vec()) };
    Ok(vector::<A>(weight)?.iter().zip(inv_std).map(|(&w, &i)| w * i).collect())
}

/// The bias, where none stands for zeros.
fn shift<A: Real>(bias: Option<&Tensor>, layout: Channels) -> Result<Vec<A>> {
    bias.map_or_else(|| Ok(vec![A::of(0.0); layout.channels]), vector)
}

fn vector<A: Real>(parameter: &Tensor) -> Result<Vec<A>> {
    parameter.detach().to_dtype(A::DTYPE)?.to_vec1()
}
