//! The CPU side: one pass over memory each, on all cores.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::Due;
use crate::kernels::element::{Elements, Real};
use crate::kernels::elementwise::blocks::vectorise;
use crate::kernels::in_place;

/// Elements a task.
const TASK: usize = 1 << 16;

macro_rules! with_real {
    ($dtype:expr, $T:ident => $body:expr) => {
        if $dtype == DType::F64 {
            type $T = f64;
            $body
        } else {
            type $T = f32;
            $body
        }
    };
}

/// Calls `f` on parts of `x`, in parallel, vectorised for this processor.
fn each<T: Real>(x: &Tensor, f: impl Fn(&mut [T]) + Sync) -> Result<()> {
    in_place::write::<T>(x, |x| {
        x.par_chunks_mut(TASK).for_each(|part| {
            vectorise(
                #[inline(always)]
                || f(part),
            )
        });
    })
}

pub(super) fn check((gradient, by): Due<'_>) -> Result<bool> {
    Ok(with_real!(gradient.dtype(), T => {
        let (gradient, factors) = (Elements::<T>::of(gradient)?, by.on_host()?.map(T::of));
        let parts = gradient.par_chunks(TASK).map(|part| {
            let mut found = false;
            vectorise(
                #[inline(always)]
                || found = check_part(part, factors),
            );
            found
        });
        // Every part, as a step without an overflow does: no other is worth an early end.
        parts.reduce(|| false, |a, b| a | b)
    }))
}

/// Places of a part that are read side by side: a processor asks memory ahead along each, and along
/// one alone gets less than there is.
const STREAMS: usize = 4;
/// Elements at a time. With fewer, the compiler unrolls the loop over them and then sees no vectors.
const LANES: usize = 128;

/// Folds every element of a part into one of [`LANES`] values.
#[inline(always)]
fn fold<T: Real, A: Copy>(part: &[T], start: A, f: impl Fn(A, T) -> A) -> [A; LANES] {
    let mut all = [start; LANES];
    let (lanes, rest) = part.as_chunks::<LANES>();
    let stream = lanes.len() / STREAMS;
    let side_by_side = (0..stream).flat_map(|at| (0..STREAMS).map(move |i| i * stream + at));
    for number in side_by_side.chain(STREAMS * stream..lanes.len()) {
        for i in 0..LANES {
            all[i] = f(all[i], lanes[number][i]);
        }
    }
    for (value, x) in all.iter_mut().zip(rest) {
        *value = f(*value, *x);
    }
    all
}

#[inline(always)]
fn check_part<T: Real>(part: &[T], [inverse, clip]: [T; 2]) -> bool {
    // x * 0 is zero for a finite x and NaN for the rest; NaN sticks to the sum.
    let canaries = fold(
        part,
        T::zero(),
        #[inline(always)]
        |canary, x| canary + x * inverse * clip * T::zero(),
    );
    canaries.iter().any(|canary| canary.is_nan())
}

/// The sum of squares, and what [`check`] finds.
pub(super) fn squares((gradient, by): Due<'_>) -> Result<(f64, bool)> {
    let sum: f64 = with_real!(gradient.dtype(), T => {
        let (gradient, factors) = (Elements::<T>::of(gradient)?, by.on_host()?.map(T::of));
        let parts: Vec<f64> = gradient
            .par_chunks(TASK)
            .map(|part| {
                let mut sum = 0.0;
                vectorise(
                    #[inline(always)]
                    || sum = squares_of_part(part, factors),
                );
                sum
            })
            .collect();
        // In the order of the parts: the same sum on any number of threads.
        parts.iter().sum()
    });
    // A sum is finite if its terms are, but for squares of F64 that are not.
    Ok((sum, !sum.is_finite() && check((gradient, by))?))
}

#[inline(always)]
fn squares_of_part<T: Real>(part: &[T], [inverse, clip]: [T; 2]) -> f64 {
    let sums = fold(
        part,
        0f64,
        #[inline(always)]
        |sum, x| {
            let x = (x * inverse * clip).to_double();
            sum + x * x
        },
    );
    sums.iter().sum()
}

pub(super) fn settle((gradient, by): Due<'_>) -> Result<()> {
    with_real!(gradient.dtype(), T => {
        let by = by.on_host()?;
        if by == [1.0; 2] {
            return Ok(());
        }
        let [inverse, clip] = by.map(T::of);
        each::<T>(gradient, #[inline(always)] |part| {
            part.iter_mut().for_each(|x| *x = *x * inverse * clip)
        })
    })
}

pub(super) fn clip_value(gradient: &Tensor, limit: f64) -> Result<()> {
    with_real!(gradient.dtype(), T => {
        let limit = T::of(limit);
        each::<T>(gradient, #[inline(always)] |part| {
            for x in part {
                // Comparisons, not `min` and `max`: those turn NaN into a number.
                *x = if *x > limit { limit } else if *x < -limit { -limit } else { *x };
            }
        })
    })
}
