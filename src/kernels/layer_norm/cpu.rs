//! Layer norm and RMS norm on the CPU.
//!
//! A row stays in the first-level cache, so that reading it several times costs little. Forward takes the mean first
//! and then the squares about it, as the sum of squares alone loses all digits where the mean is large. The mean is
//! saved as two numbers, because rounded to one it is off by up to half its last place.
//!
//! Backward gets, for each row, `dx = (g - mean(g) - normal · mean(g · normal)) / std` with `g = grad · weight`. RMS
//! norm has no `mean(g)`. The gradients of weight and bias are sums over rows: blocks of rows have sums of their own,
//! which are added in F64 in a fixed order. So a result does not depend on the number of threads.

use std::mem::MaybeUninit;

use candle_core::{D, DType, Result, Tensor, WithDType};
use num_traits::Zero;

use crate::kernels::cast;
use crate::kernels::cpu::array::from_fn;
use crate::kernels::cpu::dtype::{Element, Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{
    BLOCK, GRAIN, each_lane, for_each_chunk, for_each_task, pieces, vectorise_in,
};
use crate::kernels::cpu::uninit::{uninit_vec, zeroed};
use crate::kernels::reduce::channels::block_sums;
use crate::kernels::reduce::norm::parameter;

/// What a row is normalised by.
#[derive(Clone, Copy)]
struct RowStatistics<A> {
    mean: A,
    /// What rounding took from the mean: the exact one is about `mean + rest`.
    rest: A,
    inv_std: A,
}

impl<A: Real> RowStatistics<A> {
    #[inline(always)]
    fn normalise(self, x: A) -> A {
        ((x - self.mean) - self.rest) * self.inv_std
    }

    /// Two passes: the mean, then the squares about it.
    #[inline(always)]
    fn of<T: Lane<Acc = A>>(x: &[T], eps: f64, centred: bool) -> Self {
        let count = x.len() as f64;
        let mean = if centred { A::of(totals(x, |x| [x])[0] / count) } else { A::zero() };
        let [sum, squares] = totals(
            x,
            #[inline(always)]
            |x| [x - mean, (x - mean) * (x - mean)],
        );
        let rest = if centred { sum / count } else { 0.0 };
        let var = squares / count - rest * rest;
        let var = if var < 0.0 { 0.0 } else { var };
        Self { mean, rest: A::of(rest), inv_std: A::of(1.0 / (var + eps).sqrt()) }
    }
}

/// Sums of the values of `term` over a row.
#[inline(always)]
fn totals<T: Lane, const K: usize>(x: &[T], term: impl Fn(T::Acc) -> [T::Acc; K]) -> [f64; K] {
    let mut totals = [0.0; K];
    for x in x.chunks(BLOCK) {
        let sums = block_sums(
            [x],
            #[inline(always)]
            |[x]| term(x),
        );
        totals = from_fn(|k| totals[k] + sums[k]);
    }
    totals
}

pub(super) fn forward(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    centred: bool,
) -> Result<(Tensor, Tensor)> {
    fn typed<T: Lane>(
        x: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
        centred: bool,
    ) -> Result<(Tensor, Tensor)> {
        let (data, columns) = (Elements::<T>::of(x)?, x.dim(D::Minus1)?);
        let rows = data.len() / columns.max(1);
        let weight = parameter::<T::Acc>(weight, columns, 1.0)?;
        let bias = parameter::<T::Acc>(bias, columns, 0.0)?;
        let mut statistics = vec![T::Acc::zero(); rows * 3];
        let per_task = GRAIN.div_ceil(columns.max(1));
        let y = uninit_vec(data.len(), |y| {
            let tasks: Vec<_> = y
                .chunks_mut((per_task * columns).max(1))
                .zip(data.chunks((per_task * columns).max(1)))
                .zip(statistics.chunks_mut(per_task * 3))
                .collect();
            for_each_task(tasks, |((y, x), statistics)| {
                vectorise_in::<T::Acc>(
                    #[inline(always)]
                    || {
                        let rows = y.chunks_exact_mut(columns).zip(x.chunks_exact(columns));
                        for ((y, x), statistics) in rows.zip(statistics.chunks_exact_mut(3)) {
                            let row = RowStatistics::of(x, eps, centred);
                            statistics.copy_from_slice(&[row.mean, row.rest, row.inv_std]);
                            each_lane(
                                y,
                                [x],
                                [&weight, &bias],
                                #[inline(always)]
                                |[x]: [T; 1], [w, b]| {
                                    T::narrowed(row.normalise(x.widened()) * w + b)
                                },
                            );
                        }
                    },
                );
            });
        });
        Ok((tensor(y, x.dims()), tensor(statistics, &[rows, 3])))
    }
    with_element!(x.dtype(), T => typed::<T>(x, weight, bias, eps, centred))
}

pub(super) fn backward(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Tensor,
    centred: bool,
    wants: [Option<DType>; 3],
    pending: Option<&Tensor>,
) -> Result<[Option<Tensor>; 3]> {
    let _held = hold([x, grad, statistics]);
    let (dx, sums) = with_element!(x.dtype(), T => {
        let backward = RowsBackward::<T> {
            x: &Elements::of(x)?,
            grad: &Elements::of(grad)?,
            weight: parameter(weight, x.dim(D::Minus1)?, 1.0)?,
            statistics: &Elements::of(statistics)?,
            centred,
            affine: wants[1].or(wants[2]).is_some(),
        };
        match wants[0] {
            None => (None, backward.run::<T>(&mut [], &[])),
            Some(T::DTYPE) => backward.with_input::<T>(x.dims(), pending)?,
            Some(_) => backward.with_input::<<T as Element>::Acc>(x.dims(), pending)?,
        }
    });
    let columns = sums.len() / 2;
    let sum = |sums: &[f64], want: Option<DType>| {
        want.map(|dtype| cast(&tensor(sums.to_vec(), &[columns]), dtype)).transpose()
    };
    let (dweight, dbias) = sums.split_at(columns);
    let dx = dx.zip(wants[0]).map(|(dx, dtype)| dx.to_dtype(dtype)).transpose()?;
    Ok([dx, sum(dweight, wants[1])?, sum(dbias, wants[2])?])
}

struct RowsBackward<'a, T: Lane<Acc: Lane>> {
    x: &'a [T],
    grad: &'a [T],
    weight: Vec<T::Acc>,
    /// Three numbers per row.
    statistics: &'a [T::Acc],
    centred: bool,
    /// Whether the gradients of weight and bias are wanted.
    affine: bool,
}

impl<T: Lane<Acc: Lane>> RowsBackward<'_, T> {
    fn with_input<O: Lane<Acc = T::Acc>>(
        &self,
        dims: &[usize],
        pending: Option<&Tensor>,
    ) -> Result<(Option<Tensor>, Vec<f64>)> {
        let pending = pending.map(Elements::<O>::of).transpose()?;
        let mut sums = Vec::new();
        let dx = uninit_vec(self.x.len(), |dx| {
            sums = self.run(dx, pending.as_deref().unwrap_or(&[]));
        });
        Ok((Some(tensor(dx, dims)), sums))
    }

    /// Writes the gradient of `x` to `dx`, and returns the gradients of weight and bias, one after the other. Adds
    /// the pending gradient `pending`, unless it is empty. An empty `dx` is not wanted.
    fn run<O: Lane<Acc = T::Acc>>(&self, dx: &mut [MaybeUninit<O>], pending: &[O]) -> Vec<f64> {
        let columns = self.weight.len();
        let rows = self.x.len() / columns.max(1);
        // Rows whose sums are kept apart: enough for the sums to be small beside them, and few
        // enough for several threads to have some.
        let block = GRAIN.div_ceil(columns.max(1)).clamp(8, 64);
        let blocks = rows.div_ceil(block);
        let width = if self.affine { 2 * columns } else { 0 };
        let mut sums = vec![T::Acc::zero(); blocks * width];
        let tasks = pieces(dx, block * columns, blocks).into_iter();
        let tasks = tasks.zip(pieces(&mut sums, width, blocks)).enumerate().collect();
        for_each_task(tasks, |(number, (dx, sums))| {
            let rows = number * block..rows.min((number + 1) * block);
            let (dx, mut scratch) = (zeroed(dx), vec![T::Acc::zero(); 2 * columns]);
            vectorise_in::<T::Acc>(
                #[inline(always)]
                || self.block(rows.clone(), dx, pending, sums, &mut scratch),
            );
        });
        let mut totals = vec![0.0; 2 * columns];
        if self.affine {
            for_each_chunk::<T::Acc, _>(
                &mut totals,
                BLOCK,
                #[inline(always)]
                |chunk, totals| {
                    for sums in sums.chunks_exact(2 * columns) {
                        for (total, sum) in totals.iter_mut().zip(&sums[chunk * BLOCK..]) {
                            *total += sum.to_double();
                        }
                    }
                },
            );
        }
        totals
    }

    #[inline(always)]
    fn block<O: Lane<Acc = T::Acc>>(
        &self,
        rows: std::ops::Range<usize>,
        dx: &mut [O],
        pending: &[O],
        sums: &mut [T::Acc],
        scratch: &mut [T::Acc],
    ) {
        let columns = self.weight.len();
        let (normal, gradient) = scratch.split_at_mut(columns);
        let weight = &self.weight[..columns];
        for (at, row) in rows.enumerate() {
            let first = row * columns;
            let x = &self.x[first..][..columns];
            let grad = &self.grad[first..][..columns];
            let &[mean, rest, inv_std] = &self.statistics[row * 3..][..3] else { return };
            let row = RowStatistics { mean, rest, inv_std };
            for i in 0..columns {
                normal[i] = row.normalise(x[i].widened());
                gradient[i] = grad[i].widened() * weight[i];
            }
            if !sums.is_empty() {
                let (dweight, dbias) = sums.split_at_mut(columns);
                for i in 0..columns {
                    dweight[i] += grad[i].widened() * normal[i];
                    dbias[i] += grad[i].widened();
                }
            }
            if dx.is_empty() {
                continue;
            }
            // `gradient` is the gradient with respect to `normal`, and
            // dx = (gradient - average(gradient) - normal * average(gradient * normal)) / std
            let (mut average, mut along) = (0.0, 0.0);
            for (gradient, normal) in gradient.chunks(BLOCK).zip(normal.chunks(BLOCK)) {
                let [sum, dot] = block_sums(
                    [gradient, normal],
                    #[inline(always)]
                    |[gradient, normal]| [gradient, gradient * normal],
                );
                (average, along) = (average + sum, along + dot);
            }
            let average = if self.centred { average / columns as f64 } else { 0.0 };
            let (average, along) = (T::Acc::of(average), T::Acc::of(along / columns as f64));
            let dx_wide = &mut *gradient; // in the same scratch
            for (dx, normal) in dx_wide.iter_mut().zip(&*normal) {
                *dx = (*dx - average - *normal * along) * inv_std;
            }
            if let Some(pending) = pending.get(first..first + columns) {
                for (dx, pending) in dx_wide.iter_mut().zip(pending) {
                    *dx += pending.widened();
                }
            }
            for (dx, wide) in dx[at * columns..][..columns].iter_mut().zip(&*dx_wide) {
                *dx = O::narrowed(*wide);
            }
        }
    }
}
