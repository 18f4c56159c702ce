//! Softmax and log-softmax on the CPU: a pass for each row's largest element and sum, and a pass for the result.
//!
//! The largest element is subtracted before the exponential, so that nothing overflows. Exponentials are computed into
//! a block of memory first and summed after, because a loop with both does not vectorise. Sums of blocks are in F64.
//! log-softmax subtracts the largest element and the logarithm of the sum one after the other: their sum, rounded,
//! would lose the digits of small differences between large logits.
//!
//! Backward needs only the output: a sum over each row, then one pass.

use candle_core::{DType, Result, Tensor};
use num_traits::{Float, Zero};

pub(crate) use super::exp::Exp;
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{BLOCK, GRAIN, for_each_chunk, with_output};
use crate::kernels::reduce::channels::{Channels, block_sums};
use crate::kernels::reduce::lines::Lines;

/// Runs `$body` with `$layout` bound to the lines of a contiguous tensor of `$dims` along `$dim`.
macro_rules! with_layout {
    ($dims:expr, $dim:expr, $layout:ident => $body:expr) => {
        match Lines::of($dims, $dim) {
            Some($layout) => $body,
            None => {
                let $layout = Channels::rows($dims[..$dim].iter().product(), $dims[$dim]);
                $body
            }
        }
    };
}

/// `exp(x) / sum(exp(x))` along `dim`.
pub(super) fn softmax(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    fn typed<T, O>(x: &Tensor, layout: impl Layout) -> Result<Tensor>
    where
        T: Lane<Acc: Exp>,
        O: Lane<Acc = T::Acc>,
    {
        let data = Elements::<T>::of(x)?;
        let (max, sum) = layout.maxima_and_sums::<T>(&data);
        let share: Vec<_> = sum.into_iter().map(|sum| T::Acc::of(1.0 / sum)).collect();
        let y = layout.each::<T, O, 1, 2>(
            [&data],
            [&max, &share],
            #[inline(always)]
            |[x], [max, share]| (x - max).exponential() * share,
        );
        Ok(tensor(y, x.dims()))
    }
    with_layout!(x.dims(), dim, layout => {
        with_element!(x.dtype(), T => with_output!(T, out, O => typed::<T, O>(x, layout)))
    })
}

pub(super) fn softmax_backward(y: &Tensor, grad: &Tensor, dim: usize) -> Result<Tensor> {
    fn typed<T: Lane>(y: &Tensor, grad: &Tensor, layout: impl Layout) -> Result<Tensor> {
        let _held = hold([y, grad]);
        let (data, grad) = (Elements::<T>::of(y)?, Elements::<T>::of(grad)?);
        let dots = layout.total::<T, 2>(
            [&data, &grad],
            #[inline(always)]
            |[y, g]| y * g,
        );
        let dots: Vec<_> = dots.into_iter().map(T::Acc::of).collect();
        let dx = layout.each::<T, T, 2, 1>(
            [&data, &grad],
            [&dots],
            #[inline(always)]
            |[y, g], [dot]| y * (g - dot),
        );
        Ok(tensor(dx, y.dims()))
    }
    with_layout!(y.dims(), dim, layout => {
        with_element!(y.dtype(), T => typed::<T>(y, grad, layout))
    })
}

pub(super) fn log_softmax(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    fn typed<T, O>(x: &Tensor, layout: impl Layout) -> Result<Tensor>
    where
        T: Lane<Acc: Exp>,
        O: Lane<Acc = T::Acc>,
    {
        let data = Elements::<T>::of(x)?;
        let (max, sum) = layout.maxima_and_sums::<T>(&data);
        let log_sum: Vec<_> = sum.into_iter().map(|sum| T::Acc::of(sum.ln())).collect();
        let y = layout.each::<T, O, 1, 2>(
            [&data],
            [&max, &log_sum],
            #[inline(always)]
            |[x], [max, log_sum]| (x - max) - log_sum,
        );
        Ok(tensor(y, x.dims()))
    }
    with_layout!(x.dims(), dim, layout => {
        with_element!(x.dtype(), T => with_output!(T, out, O => typed::<T, O>(x, layout)))
    })
}

pub(super) fn log_softmax_backward(
    y: &Tensor,
    grad: &Tensor,
    dim: usize,
    out: DType,
) -> Result<Tensor> {
    fn typed<T, O>(y: &Tensor, grad: &Tensor, layout: impl Layout) -> Result<Tensor>
    where
        T: Lane<Acc: Exp>,
        O: Lane<Acc = T::Acc>,
    {
        let _held = hold([y, grad]);
        let (data, grad) = (Elements::<T>::of(y)?, Elements::<T>::of(grad)?);
        let sums = layout.total::<T, 1>(
            [&grad],
            #[inline(always)]
            |[g]| g,
        );
        let sums: Vec<_> = sums.into_iter().map(T::Acc::of).collect();
        let dx = layout.each::<T, O, 2, 1>(
            [&data, &grad],
            [&sums],
            #[inline(always)]
            |[y, g], [sum]| g - y.exponential() * sum,
        );
        Ok(tensor(dx, y.dims()))
    }
    with_layout!(y.dims(), dim, layout => {
        with_element!(y.dtype(), T => with_output!(T, out, O => typed::<T, O>(y, grad, layout)))
    })
}

/// Where the lines are that a softmax is taken over: rows of the last dimension, or [`Lines`] side by side.
trait Layout: Copy {
    /// Every line's largest element, and the sum of `exp(x - largest)`.
    fn maxima_and_sums<T: Lane<Acc: Exp>>(self, x: &[T]) -> (Vec<T::Acc>, Vec<f64>);
    /// Every line's sum of the values of `term`.
    fn total<T: Lane, const M: usize>(
        self,
        inputs: [&[T]; M],
        term: impl Fn([T::Acc; M]) -> T::Acc + Sync,
    ) -> Vec<f64>;
    /// `f` of the element of each input and the parameters of its line, at every position.
    fn each<T: Lane, O: Lane<Acc = T::Acc>, const M: usize, const P: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        f: impl Fn([T::Acc; M], [T::Acc; P]) -> T::Acc + Sync,
    ) -> Vec<O>;
}

impl Layout for Channels {
    fn maxima_and_sums<T: Lane<Acc: Exp>>(self, x: &[T]) -> (Vec<T::Acc>, Vec<f64>) {
        maxima_and_sums(x, self)
    }
    #[inline(always)]
    fn total<T: Lane, const M: usize>(
        self,
        inputs: [&[T]; M],
        term: impl Fn([T::Acc; M]) -> T::Acc + Sync,
    ) -> Vec<f64> {
        let sums = self.sums::<T, M, 0, 1>(
            inputs,
            [],
            #[inline(always)]
            |x, []| [term(x)],
        );
        sums.into_iter().map(|[sum]| sum).collect()
    }
    #[inline(always)]
    fn each<T: Lane, O: Lane<Acc = T::Acc>, const M: usize, const P: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        f: impl Fn([T::Acc; M], [T::Acc; P]) -> T::Acc + Sync,
    ) -> Vec<O> {
        self.map(inputs, parameters, f)
    }
}

impl Layout for Lines {
    fn maxima_and_sums<T: Lane<Acc: Exp>>(self, x: &[T]) -> (Vec<T::Acc>, Vec<f64>) {
        let maxima = self.maxima(x);
        let sums = self.sums::<T, 1, 1>(
            [x],
            [&maxima],
            #[inline(always)]
            |[x], [max]| (x - max).exponential(),
        );
        (maxima, sums)
    }
    #[inline(always)]
    fn total<T: Lane, const M: usize>(
        self,
        inputs: [&[T]; M],
        term: impl Fn([T::Acc; M]) -> T::Acc + Sync,
    ) -> Vec<f64> {
        self.sums::<T, M, 0>(
            inputs,
            [],
            #[inline(always)]
            |x, []| term(x),
        )
    }
    #[inline(always)]
    fn each<T: Lane, O: Lane<Acc = T::Acc>, const M: usize, const P: usize>(
        self,
        inputs: [&[T]; M],
        parameters: [&[T::Acc]; P],
        f: impl Fn([T::Acc; M], [T::Acc; P]) -> T::Acc + Sync,
    ) -> Vec<O> {
        self.map(inputs, parameters, f)
    }
}

/// Every row's largest element, and the sum of `exp(x - largest)`.
pub(crate) fn maxima_and_sums<T: Lane<Acc: Exp>>(
    x: &[T],
    layout: Channels,
) -> (Vec<T::Acc>, Vec<f64>) {
    let columns = layout.count();
    let mut rows = vec![(T::Acc::zero(), 0.0); layout.channels];
    let per_task = GRAIN.div_ceil(columns.max(1));
    for_each_chunk::<T::Acc, _>(
        &mut rows,
        per_task,
        #[inline(always)]
        |task, rows| {
            let mut wide = [T::Acc::zero(); BLOCK];
            for (i, (max, sum)) in rows.iter_mut().enumerate() {
                let row = &x[(task * per_task + i) * columns..][..columns];
                let largest = largest(row);
                *max = largest;
                for x in row.chunks(BLOCK) {
                    // In a loop of its own, the exponential is vectorised.
                    for (wide, x) in wide.iter_mut().zip(x) {
                        *wide = (x.widened() - largest).exponential();
                    }
                    *sum += block_sums([&wide[..x.len()]], |x| x)[0];
                }
            }
        },
    );
    rows.into_iter().unzip()
}

/// The largest of `x`; NaN is passed over, and reaches the result through the sums.
#[inline(always)]
pub(crate) fn largest<T: Lane>(x: &[T]) -> T::Acc {
    const LANES: usize = 32;
    let mut lanes = [T::Acc::neg_infinity(); LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for x in chunks {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane = if x.widened() > *lane { x.widened() } else { *lane };
        }
    }
    let rest = rest.iter().map(|x| x.widened());
    lanes.into_iter().chain(rest).fold(T::Acc::neg_infinity(), |a, b| if b > a { b } else { a })
}
