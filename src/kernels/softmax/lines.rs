//! Softmax and log-softmax along another dimension than the last, on the CPU: many lines side by side.
//!
//! Each line's largest element and sum come first, then the result, in the order of the tensor.

use candle_core::{Result, Tensor};

use super::exp::Exp;
use crate::kernels::cpu::dtype::{Elements, Real, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::reduce::lines::Lines;

pub(super) fn softmax<T, O>(x: &Tensor, lines: Lines) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let data = Elements::<T>::of(x)?;
    let (max, sum) = maxima_and_sums::<T>(&data, lines);
    let share: Vec<_> = sum.into_iter().map(|sum| T::Acc::of(1.0 / sum)).collect();
    let y = lines.map::<T, O, 1, 2>(
        [&data],
        [&max, &share],
        #[inline(always)]
        |[x], [max, share]| (x - max).exponential() * share,
    );
    Ok(tensor(y, x.dims()))
}

pub(super) fn softmax_backward<T: Lane>(y: &Tensor, grad: &Tensor, lines: Lines) -> Result<Tensor> {
    let _held = hold([y, grad]);
    let (data, grad) = (Elements::<T>::of(y)?, Elements::<T>::of(grad)?);
    let dots = lines.sums::<T, 2, 0>(
        [&data, &grad],
        [],
        #[inline(always)]
        |[y, g], []| y * g,
    );
    let dots: Vec<_> = dots.into_iter().map(T::Acc::of).collect();
    let dx = lines.map::<T, T, 2, 1>(
        [&data, &grad],
        [&dots],
        #[inline(always)]
        |[y, g], [dot]| y * (g - dot),
    );
    Ok(tensor(dx, y.dims()))
}

pub(super) fn log_softmax<T, O>(x: &Tensor, lines: Lines) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let data = Elements::<T>::of(x)?;
    let (max, sum) = maxima_and_sums::<T>(&data, lines);
    let log_sum: Vec<_> = sum.into_iter().map(|sum| T::Acc::of(sum.ln())).collect();
    let y = lines.map::<T, O, 1, 2>(
        [&data],
        [&max, &log_sum],
        #[inline(always)]
        |[x], [max, log_sum]| (x - max) - log_sum,
    );
    Ok(tensor(y, x.dims()))
}

pub(super) fn log_softmax_backward<T, O>(y: &Tensor, grad: &Tensor, lines: Lines) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let _held = hold([y, grad]);
    let (data, grad) = (Elements::<T>::of(y)?, Elements::<T>::of(grad)?);
    let sums = lines.sums::<T, 1, 0>(
        [&grad],
        [],
        #[inline(always)]
        |[g], []| g,
    );
    let sums: Vec<_> = sums.into_iter().map(T::Acc::of).collect();
    let dx = lines.map::<T, O, 2, 1>(
        [&data, &grad],
        [&sums],
        #[inline(always)]
        |[y, g], [sum]| g - y.exponential() * sum,
    );
    Ok(tensor(dx, y.dims()))
}

/// Every line's largest element, and the sum of `exp(x - largest)`.
fn maxima_and_sums<T: Lane<Acc: Exp>>(x: &[T], lines: Lines) -> (Vec<T::Acc>, Vec<f64>) {
    let maxima = lines.maxima(x);
    let sums = lines.sums::<T, 1, 1>(
        [x],
        [&maxima],
        #[inline(always)]
        |[x], [max]| (x - max).exponential(),
    );
    (maxima, sums)
}
