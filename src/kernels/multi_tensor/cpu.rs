//! Checks, measures, scales and clips gradients on the CPU, many tensors in one parallel loop.
//!
//! Gradients and arithmetic are F32 or F64; squares are summed in F64. Tensors are cut into chunks of [`TASK`]
//! elements, and small neighbours are one task together, so many small tensors cost few tasks. Results are kept by
//! chunk and added up in that order: the norm has the same bits on any number of threads.
//!
//! [`check`] and [`squares`] read each gradient once and write nothing. They multiply it by its factors, of the loss
//! scale and of clipping, in registers; the optimizer will do the same. Only where a sum of squares is not finite,
//! a second pass looks for what is not. Memory limits both, so [`fold`] reads four places side by side and prefetches
//! each. [`apply_scale`] and [`clip_value`] read and write once, in place; [`apply_scale`] leaves out gradients whose
//! factors are 1.

use candle_core::{DType, Result, Tensor};

use super::multiplier::ScaledGradient;
use crate::error::bail;
use crate::kernels::cpu::dtype::{Element, Real};
use crate::kernels::cpu::in_place::{Access, Locked, lock_sets};
use crate::kernels::cpu::parallel::{TASK, map_sized};
use crate::kernels::cpu::prefetch::prefetch;
use crate::kernels::cpu::simd::vectorise_in;

/// At most [`TASK`] elements of a gradient.
enum Typed<A, B> {
    F32(A),
    F64(B),
}

type GradientChunk<'a> = Typed<&'a [f32], &'a [f64]>;
type GradientChunkMut<'a> = Typed<&'a mut [f32], &'a mut [f64]>;

impl<A: AsRef<[f32]>, B: AsRef<[f64]>> Typed<A, B> {
    fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.as_ref().len(),
            Self::F64(x) => x.as_ref().len(),
        }
    }
}

/// Runs `$body`, vectorised for this processor, with `$x` bound to the elements of a part.
macro_rules! with_part {
    ($part:expr, $x:ident: $T:ident => $body:expr) => {{
        let mut result = None;
        match $part {
            Typed::F32($x) => {
                type $T = f32;
                vectorise_in::<$T>(
                    #[inline(always)]
                    || result = Some($body),
                );
            }
            Typed::F64($x) => {
                type $T = f64;
                vectorise_in::<$T>(
                    #[inline(always)]
                    || result = Some($body),
                );
            }
        }
        result
    }};
}

/// What `f` returns for the parts of each gradient, in their order: the same on any number of threads.
fn of_parts<R: Send>(
    gradients: &[ScaledGradient<'_>],
    f: impl Fn(GradientChunk<'_>, [f64; 2]) -> Option<R> + Sync,
) -> Result<Vec<Vec<R>>> {
    let factors: Vec<_> = gradients.iter().map(|(_, by)| by.on_host()).collect::<Result<_>>()?;
    let set = gradients.iter().map(|(gradient, _)| Access::Read(gradient)).collect();
    let locked = lock_sets(&[set])?;
    let mut parts = Vec::new();
    for (number, tensor) in locked.iter().flatten().enumerate() {
        let (gradient, factors) = (gradients[number].0, factors[number]);
        if gradient.dtype() == DType::F64 {
            let cut = tensor.slice::<f64>()?.chunks(TASK);
            parts.extend(cut.map(|part| (number, Typed::F64(part), factors)));
        } else {
            let cut = tensor.slice::<f32>()?.chunks(TASK);
            parts.extend(cut.map(|part| (number, Typed::F32(part), factors)));
        }
    }
    let run = |(number, part, factors)| Some((number, f(part, factors)?));
    let mut all: Vec<Vec<R>> = gradients.iter().map(|_| Vec::new()).collect();
    for (number, result) in map_sized(parts, |(_, part, _)| part.len(), run).into_iter().flatten() {
        all[number].push(result);
    }
    Ok(all)
}

/// Calls `f` with the parts of each tensor, and its number.
fn each_part(tensors: &[&Tensor], f: impl Fn(usize, GradientChunkMut<'_>) + Sync) -> Result<()> {
    fn cut<'a, T: Element>(x: &'a mut Locked<'_>) -> Result<impl Iterator<Item = &'a mut [T]>> {
        Ok(x.elements_mut::<T>()?.chunks_mut(TASK))
    }
    let sets: Vec<_> = tensors.iter().map(|&tensor| vec![Access::Write(tensor)]).collect();
    let mut done = 0;
    while done < tensors.len() {
        let mut locked = lock_sets(&sets[done..])?;
        if locked.is_empty() {
            bail!("no tensor could be locked");
        }
        let mut parts = Vec::new();
        for (number, tensor) in locked.iter_mut().flatten().enumerate() {
            let number = done + number;
            if tensors[number].dtype() == DType::F64 {
                parts.extend(cut(tensor)?.map(|part| (number, Typed::F64(part))));
            } else {
                parts.extend(cut(tensor)?.map(|part| (number, Typed::F32(part))));
            }
        }
        map_sized(parts, |(_, part)| part.len(), |(number, part)| f(number, part));
        done += locked.len();
    }
    Ok(())
}

pub(super) fn check(gradients: &[ScaledGradient<'_>]) -> Result<Vec<bool>> {
    // Every part, as a step without an overflow does: no other is worth an early end.
    let parts =
        of_parts(gradients, |part, by| with_part!(part, x: T => check_part(x, by.map(T::of))))?;
    Ok(parts.into_iter().map(|found| found.contains(&true)).collect())
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
pub(super) fn squares(gradients: &[ScaledGradient<'_>]) -> Result<Vec<(f64, bool)>> {
    let parts = of_parts(
        gradients,
        |part, by| with_part!(part, x: T => squares_of_part(x, by.map(T::of))),
    )?;
    let each = parts.into_iter().zip(gradients).map(|(parts, due)| {
        // In the order of the parts: the same sum on any number of threads.
        let sum: f64 = parts.iter().sum();
        // A sum is finite if its terms are, but for squares of F64 that are not.
        Ok((sum, !sum.is_finite() && check(&[*due])?.contains(&true)))
    });
    each.collect()
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

pub(super) fn apply_scale(gradients: &[ScaledGradient<'_>]) -> Result<()> {
    let factors: Vec<_> = gradients.iter().map(|(_, by)| by.on_host()).collect::<Result<_>>()?;
    let due = gradients.iter().zip(&factors).filter(|(_, factors)| **factors != [1.0; 2]);
    let due = due.map(|((gradient, _), factors)| (*gradient, *factors));
    let (tensors, factors): (Vec<&Tensor>, Vec<[f64; 2]>) = due.unzip();
    each_part(&tensors, |number, part| {
        with_part!(part, x: T => {
            let [inverse, clip] = factors[number].map(T::of);
            x.iter_mut().for_each(|x| *x = *x * inverse * clip);
        });
    })
}

pub(super) fn clip_value(gradients: &[&Tensor], limit: f64) -> Result<()> {
    each_part(gradients, |_, part| {
        with_part!(part, x: T => {
            let limit = T::of(limit);
            for x in x.iter_mut() {
                // Comparisons, not `min` and `max`: those turn NaN into a number.
                *x = if *x > limit { limit } else if *x < -limit { -limit } else { *x };
            }
        });
    })
}
