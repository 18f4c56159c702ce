//! The CPU side: one pass over memory each, on all cores.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

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

pub(super) fn unscale(gradient: &Tensor, inverse: f32) -> Result<bool> {
    let overflow = AtomicBool::new(false);
    with_real!(gradient.dtype(), T => {
        let inverse = T::of(inverse.into());
        each::<T>(gradient, #[inline(always)] |part| {
            if unscale_part(part, inverse) {
                overflow.store(true, Ordering::Relaxed);
            }
        })?
    });
    Ok(overflow.into_inner())
}

#[inline(always)]
fn unscale_part<T: Real>(part: &mut [T], inverse: T) -> bool {
    let mut overflow = false;
    for block in part.chunks_mut(1024) {
        // x * 0 is zero for a finite x and NaN for the rest; NaN sticks to the sum.
        let mut canary = [T::zero(); 16];
        let mut lanes = block.chunks_exact_mut(16);
        for lane in &mut lanes {
            for (c, x) in canary.iter_mut().zip(lane) {
                *x *= inverse;
                *c += *x * T::zero();
            }
        }
        for (c, x) in canary.iter_mut().zip(lanes.into_remainder()) {
            *x *= inverse;
            *c += *x * T::zero();
        }
        overflow |= canary.iter().any(|c| c.is_nan());
    }
    overflow
}

pub(super) fn sum_of_squares(gradient: &Tensor) -> Result<f64> {
    Ok(with_real!(gradient.dtype(), T => {
        let gradient = Elements::<T>::of(gradient)?;
        let parts: Vec<f64> = gradient
            .par_chunks(TASK)
            .map(|part| {
                let mut sum = 0.0;
                vectorise(
                    #[inline(always)]
                    || sum = squares_of_part(part),
                );
                sum
            })
            .collect();
        // In the order of the parts: the same sum on any number of threads.
        parts.iter().sum()
    }))
}

#[inline(always)]
fn squares_of_part<T: Real>(part: &[T]) -> f64 {
    let mut sums = [0f64; 16];
    let mut lanes = part.chunks_exact(16);
    for lane in &mut lanes {
        for (sum, x) in sums.iter_mut().zip(lane) {
            let x = x.to_double();
            *sum += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(lanes.remainder()) {
        let x = x.to_double();
        *sum += x * x;
    }
    sums.iter().sum()
}

pub(super) fn multiply(gradient: &Tensor, factor: f64) -> Result<()> {
    with_real!(gradient.dtype(), T => {
        let factor = T::of(factor);
        each::<T>(gradient, #[inline(always)] |part| part.iter_mut().for_each(|x| *x *= factor))
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
