//! Softmax and log-softmax along the last dimension on the CPU, a row at a time. A row is read from memory once, and stays
//! in the cache until its result is written.
//!
//! The largest element is subtracted before the exponential, so that nothing overflows. Exponentials are computed into
//! memory of the first-level cache and summed after, because a loop with both does not vectorise. Sums of blocks are in F64.
//! Log-softmax subtracts the largest element and the logarithm of the sum one after the other. Their sum, rounded, would
//! lose the digits of small differences between large logits.
//!
//! Backward needs only the output: a sum over each row, then one pass.

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};
use num_traits::{Float, Zero};

pub(crate) use super::exp::Exp;
use crate::kernels::cpu::dtype::{Elements, Real, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{BLOCK, GRAIN, LANES, each_lane, for_each_chunk};
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::reduce::channels::{Channels, block_sums};

pub(super) fn softmax<T, O>(x: &Tensor) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let data: &[T] = &Elements::of(x)?;
    let y = each_row::<T, O>(
        x,
        #[inline(always)]
        |row, wide, y| {
            let x = &data[row..][..y.len()];
            let (_, sum) = max_and_exponentials(x, wide);
            let share = T::Acc::of(1.0 / sum);
            each_lane::<_, _, T::Acc, 1, 0>(
                y,
                [wide],
                [],
                #[inline(always)]
                |[e]: [T::Acc; 1], []| O::narrowed(e * share),
            );
        },
    );
    Ok(tensor(y, x.dims()))
}

pub(super) fn softmax_backward<T: Lane>(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let _held = hold([y, grad]);
    let (data, grad): (&[T], &[T]) = (&Elements::of(y)?, &Elements::of(grad)?);
    let dx = each_row::<T, T>(
        y,
        #[inline(always)]
        |row, _, dx| {
            let inputs = [&data[row..][..dx.len()], &grad[row..][..dx.len()]];
            let mut dot = 0.0;
            for (y, g) in inputs[0].chunks(BLOCK).zip(inputs[1].chunks(BLOCK)) {
                dot += block_sums(
                    [y, g],
                    #[inline(always)]
                    |[y, g]| [y * g],
                )[0];
            }
            let dot = T::Acc::of(dot);
            each_lane::<_, _, T::Acc, 2, 0>(
                dx,
                inputs,
                [],
                #[inline(always)]
                |[y, g]: [T; 2], []| T::narrowed(y.widened() * (g.widened() - dot)),
            );
        },
    );
    Ok(tensor(dx, y.dims()))
}

pub(super) fn log_softmax<T, O>(x: &Tensor) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let data: &[T] = &Elements::of(x)?;
    let y = each_row::<T, O>(
        x,
        #[inline(always)]
        |row, wide, y| {
            let x = &data[row..][..y.len()];
            let (max, sum) = max_and_exponentials(x, wide);
            let log_sum = T::Acc::of(sum.ln());
            each_lane::<_, _, T::Acc, 1, 0>(
                y,
                [x],
                [],
                #[inline(always)]
                |[x]: [T; 1], []| O::narrowed((x.widened() - max) - log_sum),
            );
        },
    );
    Ok(tensor(y, x.dims()))
}

pub(super) fn log_softmax_backward<T, O>(y: &Tensor, grad: &Tensor) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let _held = hold([y, grad]);
    let (data, grad): (&[T], &[T]) = (&Elements::of(y)?, &Elements::of(grad)?);
    let dx = each_row::<T, O>(
        y,
        #[inline(always)]
        |row, _, dx| {
            let inputs = [&data[row..][..dx.len()], &grad[row..][..dx.len()]];
            let mut sum = 0.0;
            for g in inputs[1].chunks(BLOCK) {
                sum += block_sums(
                    [g],
                    #[inline(always)]
                    |[g]| [g],
                )[0];
            }
            let sum = T::Acc::of(sum);
            each_lane::<_, _, T::Acc, 2, 0>(
                dx,
                inputs,
                [],
                #[inline(always)]
                |[y, g]: [T; 2], []| O::narrowed(g.widened() - y.widened().exponential() * sum),
            );
        },
    );
    Ok(tensor(dx, y.dims()))
}

/// What `f` writes for each row of `x`: it is given where the row begins, memory for as many elements, and the result's row.
#[inline(always)]
fn each_row<T: Lane, O: Lane<Acc = T::Acc>>(
    x: &Tensor,
    f: impl Fn(usize, &mut [T::Acc], &mut [MaybeUninit<O>]) + Sync,
) -> Vec<O> {
    let columns = x.dims().last().copied().unwrap_or(1);
    let per_task = GRAIN.div_ceil(columns.max(1));
    uninit_vec(x.elem_count(), |y| {
        for_each_chunk::<T::Acc, _>(
            y,
            (per_task * columns).max(1),
            #[inline(always)]
            |task, y| {
                let mut wide = vec![T::Acc::zero(); columns];
                for (i, y) in y.chunks_exact_mut(columns).enumerate() {
                    f((task * per_task + i) * columns, &mut wide, y);
                }
            },
        );
    })
}

/// The largest of `x`, and the sum of `exp(x - largest)`, which it writes to `wide`.
#[inline(always)]
fn max_and_exponentials<T: Lane<Acc: Exp>>(x: &[T], wide: &mut [T::Acc]) -> (T::Acc, f64) {
    let (largest, mut sum) = (largest(x), 0.0);
    for (x, wide) in x.chunks(BLOCK).zip(wide.chunks_mut(BLOCK)) {
        // In a loop of its own, the exponential is vectorised.
        for (wide, x) in wide.iter_mut().zip(x) {
            *wide = (x.widened() - largest).exponential();
        }
        sum += block_sums([wide], |x| x)[0];
    }
    (largest, sum)
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
            let mut wide = vec![T::Acc::zero(); columns];
            for (i, max_and_sum) in rows.iter_mut().enumerate() {
                let row = &x[(task * per_task + i) * columns..][..columns];
                *max_and_sum = max_and_exponentials(row, &mut wide);
            }
        },
    );
    rows.into_iter().unzip()
}

/// The largest of `x`; NaN is passed over, and reaches the result through the sums.
#[inline(always)]
pub(crate) fn largest<T: Lane>(x: &[T]) -> T::Acc {
    let mut lanes = [T::Acc::neg_infinity(); LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for x in chunks {
        // A copy: read one by one behind a reference, elements of 16 bits would stay scalar.
        let x: [T; LANES] = *x;
        let mut wide = [T::Acc::zero(); LANES];
        for lane in 0..LANES {
            wide[lane] = x[lane].widened();
        }
        for lane in 0..LANES {
            lanes[lane] = if wide[lane] > lanes[lane] { wide[lane] } else { lanes[lane] };
        }
    }
    // A copy again: lanes whose address is taken would be stored to memory in every turn of the loop.
    let mut largest = largest_of(&mut { lanes });
    for x in rest {
        largest = if x.widened() > largest { x.widened() } else { largest };
    }
    largest
}

/// The larger of two halves, down to one, as one comparison waits for the one before.
///
/// Not inlined: the compiler would arrange the lanes for this, and leave the loop that fills them scalar.
#[inline(never)]
fn largest_of<A: Real>(lanes: &mut [A; LANES]) -> A {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            let (a, b) = (lanes[lane], lanes[lane + half]);
            lanes[lane] = if b > a { b } else { a };
        }
        half /= 2;
    }
    lanes[0]
}
