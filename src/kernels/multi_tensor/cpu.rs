//! The CPU side: one pass over memory each, on all cores.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::Due;
use crate::kernels::cpu::dtype::{Elements, Real};
use crate::kernels::cpu::in_place;
use crate::kernels::cpu::parallel::{By, TASK, share};
use crate::kernels::cpu::prefetch::prefetch;
use crate::kernels::cpu::simd::vectorise;

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

/// Calls `f` on parts of `x`, vectorised for this processor.
fn each<T: Real>(x: &Tensor, by: By, f: impl Fn(&mut [T]) + Sync) -> Result<()> {
    let on_part = |part: &mut [T]| {
        vectorise(
            #[inline(always)]
            || f(part),
        )
    };
    in_place::write::<T>(x, |x| match by {
        By::All => x.par_chunks_mut(TASK).for_each(on_part),
        By::One => x.chunks_mut(TASK).for_each(on_part),
    })
}

/// `f` of every part of `x`, vectorised for this processor.
fn of_parts<T: Real, R: Send>(x: &[T], by: By, f: impl Fn(&[T]) -> R + Sync) -> Vec<R> {
    let of_part = |part: &[T]| {
        let mut result = None;
        vectorise(
            #[inline(always)]
            || result = Some(f(part)),
        );
        result
    };
    match by {
        By::All => x.par_chunks(TASK).filter_map(of_part).collect(),
        By::One => x.chunks(TASK).filter_map(of_part).collect(),
    }
}

pub(super) fn check(gradients: &[Due<'_>]) -> Result<Vec<bool>> {
    share(gradients, elements, |due, by| check_one(*due, by))
}

fn elements((gradient, _): &Due<'_>) -> usize {
    gradient.elem_count()
}

fn check_one((gradient, factors): Due<'_>, by: By) -> Result<bool> {
    Ok(with_real!(gradient.dtype(), T => {
        let (gradient, factors) = (Elements::<T>::of(gradient)?, factors.on_host()?.map(T::of));
        // Every part, as a step without an overflow does: no other is worth an early end.
        let parts = of_parts(
            &gradient,
            by,
            #[inline(always)]
            |part| check_part(part, factors),
        );
        parts.into_iter().any(|found| found)
    }))
}

/// Places of a part that are read side by side: a processor asks memory ahead along each, and along
/// one alone gets less than there is.
const STREAMS: usize = 4;
/// How far ahead of itself each is asked for, in [`LANES`].
const AHEAD: usize = 8;
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
        prefetch(part, (number + AHEAD) * LANES, LANES);
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

/// The sums of squares, and what [`check`] finds.
pub(super) fn squares(gradients: &[Due<'_>]) -> Result<Vec<(f64, bool)>> {
    share(gradients, elements, |due, by| squares_of_one(*due, by))
}

fn squares_of_one((gradient, multiplier): Due<'_>, by: By) -> Result<(f64, bool)> {
    let sum: f64 = with_real!(gradient.dtype(), T => {
        let (gradient, factors) = (Elements::<T>::of(gradient)?, multiplier.on_host()?.map(T::of));
        let parts = of_parts(
            &gradient,
            by,
            #[inline(always)]
            |part| squares_of_part(part, factors),
        );
        // In the order of the parts: the same sum on any number of threads.
        parts.iter().sum()
    });
    // A sum is finite if its terms are, but for squares of F64 that are not.
    Ok((sum, !sum.is_finite() && check_one((gradient, multiplier), by)?))
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

pub(super) fn settle(gradients: &[Due<'_>]) -> Result<()> {
    share(gradients, elements, |due, by| settle_one(*due, by)).map(|_| ())
}

fn settle_one((gradient, multiplier): Due<'_>, by: By) -> Result<()> {
    with_real!(gradient.dtype(), T => {
        let factors = multiplier.on_host()?;
        if factors == [1.0; 2] {
            return Ok(());
        }
        let [inverse, clip] = factors.map(T::of);
        each::<T>(gradient, by, #[inline(always)] |part| {
            part.iter_mut().for_each(|x| *x = *x * inverse * clip)
        })
    })
}

pub(super) fn clip_value(gradients: &[&Tensor], limit: f64) -> Result<()> {
    let clip = |gradient: &&Tensor, by: By| {
        with_real!(gradient.dtype(), T => {
            let limit = T::of(limit);
            each::<T>(gradient, by, #[inline(always)] |part| {
                for x in part {
                    // Comparisons, not `min` and `max`: those turn NaN into a number.
                    *x = if *x > limit { limit } else if *x < -limit { -limit } else { *x };
                }
            })
        })
    };
    share(gradients, |gradient| gradient.elem_count(), clip).map(|_| ())
}
