//! Parts that norms share: sums about a mean for each channel, and linear maps. They are compiled once for each dtype,
//! and not in every kernel.

use candle_core::{Result, Tensor};

use super::channels::Channels;
use crate::kernels::cpu::dtype::Real;
use crate::kernels::cpu::lane::Lane;

/// A parameter of `len` elements in the type of the arithmetic; `default` where there is none.
pub(crate) fn parameter<A: Real>(
    parameter: Option<&Tensor>,
    len: usize,
    default: f64,
) -> Result<Vec<A>> {
    match parameter {
        Some(parameter) => parameter.detach().to_dtype(A::DTYPE)?.to_vec1(),
        None => Ok(vec![A::of(default); len]),
    }
}

impl Channels {
    /// For every channel, the sums of the distances from `mean`, and of their squares.
    pub(crate) fn deviations<T: Lane>(self, x: &[T], mean: &[T::Acc]) -> Vec<[f64; 2]> {
        self.sums::<T, 1, 1, 2>(
            [x],
            [mean],
            #[inline(always)]
            |[x], [mean]| [x - mean, (x - mean) * (x - mean)],
        )
    }

    /// For every channel, the sums of `grad` and of `grad * (x - mean)`.
    pub(crate) fn gradient_sums<T: Lane>(
        self,
        x: &[T],
        grad: &[T],
        mean: &[T::Acc],
    ) -> Vec<[f64; 2]> {
        self.sums::<T, 2, 1, 2>(
            [x, grad],
            [mean],
            #[inline(always)]
            |[x, g], [mean]| [g, g * (x - mean)],
        )
    }

    /// `(x - mean) * scale + shift`. The mean is taken off first: folded into the shift, it would cancel where it is
    /// large.
    pub(crate) fn normalise<T: Lane>(self, x: &[T], parameters: [&[T::Acc]; 3]) -> Vec<T> {
        self.map::<T, T, 1, 3>(
            [x],
            parameters,
            #[inline(always)]
            |[x], [mean, scale, shift]| (x - mean) * scale + shift,
        )
    }

    /// The gradient of [`Self::normalise`], where mean and scale depend on `x`:
    /// `(x - mean) * deviation_scale + (grad * scale + shift)`, of parameters in that order.
    pub(crate) fn input_gradient<T: Lane, O: Lane<Acc = T::Acc>>(
        self,
        x: &[T],
        grad: &[T],
        parameters: [&[T::Acc]; 4],
    ) -> Vec<O> {
        self.map::<T, O, 2, 4>(
            [x, grad],
            parameters,
            #[inline(always)]
            |[x, g], [mean, scale, deviation_scale, shift]| {
                (x - mean) * deviation_scale + (g * scale + shift)
            },
        )
    }
}
