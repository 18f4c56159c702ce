//! Layer norm and RMS norm on the CPU.
//!
//! A row stays in the first-level cache, so that reading it several times costs little. Forward takes the mean first
//! and then the squares about it, as the sum of squares alone loses all digits where the mean is large. The mean is
//! saved as two numbers, because rounded to one it is off by up to half its last place.
//!
//! Backward gets, for each row, `dx = (g - mean(g) - normal · mean(g · normal)) / std` with `g = grad · weight`. RMS
//! norm has no `mean(g)`. A first pass over the row makes these means, and a second one `dx`, from `x` and `grad` again:
//! that takes less than storing and loading what the first computed. The gradients of weight and bias are sums over
//! rows: blocks of rows have sums of their own, which are added in F64 in a fixed order. So a result does not depend on
//! the number of threads.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use candle_core::{D, DType, Result, Tensor, WithDType};
use num_traits::Zero;

use crate::kernels::cast;
use crate::kernels::cpu::array::from_fn;
use crate::kernels::cpu::dtype::{Element, Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{
    BLOCK, GRAIN, LANES, each_lane, for_each_chunk, for_each_task, pieces, vectorise_in,
};
use crate::kernels::cpu::uninit::{as_uninit, uninit_vec};
use crate::kernels::reduce::channels::{block_sums, total};
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

    /// The terms of an element: `g = grad * weight`, `g` times the normalised `x`, and those of the gradients of weight and
    /// bias.
    #[inline(always)]
    fn terms<T: Lane<Acc = A>>(self, x: T, grad: T, weight: A) -> [A; 4] {
        let (normal, grad) = (self.normalise(x.widened()), grad.widened());
        let gradient = grad * weight;
        [gradient, gradient * normal, grad * normal, grad]
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

/// What the gradient of a row depends on.
#[derive(Clone, Copy)]
struct RowGradient<A> {
    row: RowStatistics<A>,
    /// The mean of the gradient with respect to the normalised `x`.
    average: A,
    /// The mean of its product with that.
    along: A,
}

impl<A: Real> RowGradient<A> {
    #[inline(always)]
    fn of<T: Lane<Acc = A>>(self, x: T, grad: T, weight: A) -> A {
        let normal = self.row.normalise(x.widened());
        (grad.widened() * weight - self.average - normal * self.along) * self.row.inv_std
    }
}

struct RowsBackward<'a, T: Lane<Acc: Lane>> {
    x: &'a [T],
    grad: &'a [T],
    weight: Vec<T::Acc>,
    /// Three numbers per row.
    statistics: &'a [T::Acc],
    centred: bool,
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

    /// Writes the gradient of `x` to `dx`, and returns the gradients of weight and bias, one after the other: wanted or not,
    /// they take little beside the rest. Adds
    /// the pending gradient `pending`, unless it is empty. An empty `dx` is not wanted.
    fn run<O: Lane<Acc = T::Acc>>(&self, dx: &mut [MaybeUninit<O>], pending: &[O]) -> Vec<f64> {
        let columns = self.weight.len();
        let rows = self.x.len() / columns.max(1);
        // Rows whose sums are kept apart: enough for the sums to be small beside them, and few
        // enough for several threads to have some.
        let block = GRAIN.div_ceil(columns.max(1)).clamp(8, 64);
        let blocks = rows.div_ceil(block);
        let width = padded(columns);
        let mut sums = vec![T::Acc::zero(); blocks * 2 * width];
        let tasks = pieces(dx, block * columns, blocks).into_iter();
        let tasks = tasks.zip(pieces(&mut sums, 2 * width, blocks)).enumerate().collect();
        for_each_task(tasks, |(number, (dx, sums))| {
            let rows = number * block..rows.min((number + 1) * block);
            vectorise_in::<T::Acc>(
                #[inline(always)]
                || self.block(rows.clone(), dx, pending, sums),
            );
        });
        let mut totals = vec![0.0; 2 * width];
        for_each_chunk::<T::Acc, _>(
            &mut totals,
            BLOCK,
            #[inline(always)]
            |chunk, totals| {
                for sums in sums.chunks_exact(2 * width) {
                    for (total, sum) in totals.iter_mut().zip(&sums[chunk * BLOCK..]) {
                        *total += sum.to_double();
                    }
                }
            },
        );
        let places = (0..2).flat_map(|k| (0..columns).map(move |i| k * width + place(i, columns)));
        places.map(|place| totals[place]).collect()
    }

    #[inline(always)]
    fn block<O: Lane<Acc = T::Acc>>(
        &self,
        rows: std::ops::Range<usize>,
        dx: &mut [MaybeUninit<O>],
        pending: &[O],
        sums: &mut [T::Acc],
    ) {
        let columns = self.weight.len();
        let mut wide = vec![T::Acc::zero(); if pending.is_empty() { 0 } else { columns }];
        for (at, row) in rows.enumerate() {
            let first = row * columns;
            let inputs = [&self.x[first..][..columns], &self.grad[first..][..columns]];
            let [mean, rest, inv_std] = self.statistics.as_chunks().0[row];
            let row = RowStatistics { mean, rest, inv_std };
            let [average, along] = self.row_sums(inputs, row, sums);
            if dx.is_empty() {
                continue;
            }
            let average = if self.centred { average / columns as f64 } else { 0.0 };
            let (average, along) = (T::Acc::of(average), T::Acc::of(along / columns as f64));
            let gradient = RowGradient { row, average, along };
            let dx = &mut dx[at * columns..][..columns];
            let Some(pending) = pending.get(first..first + columns) else {
                each_lane(
                    dx,
                    inputs,
                    [&self.weight],
                    #[inline(always)]
                    |[x, grad]: [T; 2], [weight]| O::narrowed(gradient.of(x, grad, weight)),
                );
                continue;
            };
            // SAFETY: only elements are written.
            each_lane(
                unsafe { as_uninit(&mut wide) },
                inputs,
                [&self.weight],
                #[inline(always)]
                |[x, grad]: [T; 2], [weight]| gradient.of(x, grad, weight),
            );
            each_lane(
                dx,
                [pending],
                [&wide],
                #[inline(always)]
                |[pending]: [O; 1], [dx]| O::narrowed(dx + pending.widened()),
            );
        }
    }

    /// The sums over a row of the gradient with respect to the normalised `x`, and of its product with that. Adds to the sums of
    /// the parameters' gradients.
    #[inline(always)]
    fn row_sums(
        &self,
        inputs: [&[T]; 2],
        row: RowStatistics<T::Acc>,
        parameters: &mut [T::Acc],
    ) -> [f64; 2] {
        let columns = self.weight.len();
        let (dweight, dbias) = parameters.split_at_mut(padded(columns));
        let mut totals = [0.0; 2];
        for start in (0..columns).step_by(BLOCK) {
            let end = columns.min(start + BLOCK);
            let mut lanes = [[T::Acc::zero(); LANES]; 2];
            for at in (start..end - end % LANES).step_by(LANES) {
                let parameters = [&mut dweight[at..], &mut dbias[at..]];
                lanes = self.add_terms(lanes, inputs, row, parameters, at, 0);
            }
            // A copy: the lanes above are in registers.
            let (mut sums, rest) = (lanes, end % LANES);
            if columns < LANES {
                for i in 0..columns {
                    let terms = row.terms(inputs[0][i], inputs[1][i], self.weight[i]);
                    sums[0][i] += terms[0];
                    sums[1][i] += terms[1];
                    dweight[i] += terms[2];
                    dbias[i] += terms[3];
                }
            } else if rest > 0 {
                let at = end - rest;
                let parameters = [&mut dweight[at..], &mut dbias[at..]];
                let (at, counted) = (columns - LANES, LANES - rest);
                sums = self.add_terms(sums, inputs, row, parameters, at, counted);
            }
            totals = from_fn(|k| totals[k] + total(&sums[k]));
        }
        totals
    }

    /// Adds the [terms](RowStatistics::terms) of the columns `at..at + 32`. The row's sums skip the first `counted`, which they
    /// have already. Those of the parameters, at the start of their slices, take all 32.
    #[inline(always)]
    fn add_terms(
        &self,
        lanes: [[T::Acc; LANES]; 2],
        inputs: [&[T]; 2],
        row: RowStatistics<T::Acc>,
        [dweight, dbias]: [&mut [T::Acc]; 2],
        at: usize,
        counted: usize,
    ) -> [[T::Acc; LANES]; 2] {
        let [x, grad]: [[T; LANES]; 2] = from_fn(|m| inputs[m][at..at + LANES].as_chunks().0[0]);
        let weight: [T::Acc; LANES] = self.weight[at..at + LANES].as_chunks().0[0];
        let dweight = &mut dweight[..LANES].as_chunks_mut().0[0];
        let dbias = &mut dbias[..LANES].as_chunks_mut().0[0];
        // Copies: behind references, nothing would be vectorised.
        let mut sums: [[T::Acc; LANES]; 4] = [lanes[0], lanes[1], *dweight, *dbias];
        let mut terms = [[T::Acc::zero(); LANES]; 4];
        for lane in 0..LANES {
            let of_lane = row.terms(x[lane], grad[lane], weight[lane]);
            for k in 0..4 {
                let is_new = k >= 2 || lane >= counted;
                terms[k][lane] = if is_new { of_lane[k] } else { T::Acc::zero() };
            }
        }
        for k in 0..4 {
            for lane in 0..LANES {
                sums[k][lane] += terms[k][lane];
            }
        }
        *dweight = sums[2];
        *dbias = sums[3];
        [sums[0], sums[1]]
    }
}

/// The length of sums of so many columns: whole blocks of 32.
fn padded(columns: usize) -> usize {
    columns.next_multiple_of(LANES)
}

/// Where a column's sum is. The last block has the last 32 columns, so some columns are added up in two blocks; they are read
/// from the last. So every block is stored whole, and the next row's load does not wait for parts of it.
fn place(column: usize, columns: usize) -> usize {
    let last = padded(columns) - LANES;
    if column < last || columns < LANES { column } else { column + padded(columns) - columns }
}
