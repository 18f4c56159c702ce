//! Softmax and log-softmax along another dimension than the last, on the CPU: many lines side by side.
//!
//! A block of lines is read from memory once: first for each line's largest element, then, from the second-level cache,
//! for its sum and for the result. Loops go along rows, one element of each line.

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};
use num_traits::Float;

use super::exp::Exp;
use crate::kernels::cpu::dtype::{Elements, Real, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::each_lane;
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::reduce::lines::{Lines, PANEL, add_row};

pub(super) fn softmax<T, O>(x: &Tensor, lines: Lines) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let data: &[T] = &Elements::of(x)?;
    let y = lines.map_blocks::<T::Acc, O>(
        #[inline(always)]
        |from, y| {
            let x = Block { data: &data[from..], stride: lines.stride(), width: y[0].len() };
            let largest = x.largest(y.len());
            let exponentials = uninit_vec(
                y.len() * x.width,
                #[inline(always)]
                |rows| {
                    for (i, row) in rows.chunks_mut(x.width).enumerate() {
                        each_lane(
                            row,
                            [x.row(i)],
                            [&largest],
                            #[inline(always)]
                            |[x]: [T; 1], [largest]| (x.widened() - largest).exponential(),
                        );
                    }
                },
            );
            let share = sums(
                y.len(),
                x.width,
                #[inline(always)]
                |i, sums: &mut [T::Acc]| {
                    for (sum, e) in sums.iter_mut().zip(&exponentials[i * x.width..]) {
                        *sum += *e;
                    }
                },
                #[inline(always)]
                |sum| 1.0 / sum,
            );
            for (y, row) in y.iter_mut().zip(exponentials.chunks(x.width)) {
                each_lane(
                    y,
                    [row],
                    [&share],
                    #[inline(always)]
                    |[e]: [T::Acc; 1], [share]| O::narrowed(e * share),
                );
            }
        },
    );
    Ok(tensor(y, x.dims()))
}

pub(super) fn softmax_backward<T: Lane>(y: &Tensor, grad: &Tensor, lines: Lines) -> Result<Tensor> {
    let _held = hold([y, grad]);
    let (data, grad): (&[T], &[T]) = (&Elements::of(y)?, &Elements::of(grad)?);
    let dx = lines.map_blocks::<T::Acc, T>(
        #[inline(always)]
        |from, dx| {
            let [y, g] = Block::both([data, grad], from, lines, dx);
            let dots = sums(
                dx.len(),
                y.width,
                #[inline(always)]
                |i, sums| {
                    add_row(
                        sums,
                        [y.row(i), g.row(i)],
                        [],
                        #[inline(always)]
                        |[y, g], []| y * g,
                    )
                },
                #[inline(always)]
                |dot| dot,
            );
            for (i, dx) in dx.iter_mut().enumerate() {
                each_lane(
                    dx,
                    [y.row(i), g.row(i)],
                    [&dots],
                    #[inline(always)]
                    |[y, g]: [T; 2], [dot]| T::narrowed(y.widened() * (g.widened() - dot)),
                );
            }
        },
    );
    Ok(tensor(dx, y.dims()))
}

pub(super) fn log_softmax<T, O>(x: &Tensor, lines: Lines) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let data: &[T] = &Elements::of(x)?;
    let y = lines.map_blocks::<T::Acc, O>(
        #[inline(always)]
        |from, y| {
            let x = Block { data: &data[from..], stride: lines.stride(), width: y[0].len() };
            let largest = x.largest(y.len());
            let log_sums = sums(
                y.len(),
                x.width,
                #[inline(always)]
                |i, sums| {
                    add_row(
                        sums,
                        [x.row(i)],
                        [&largest],
                        #[inline(always)]
                        |[x], [largest]| (x - largest).exponential(),
                    )
                },
                #[inline(always)]
                |sum| sum.ln(),
            );
            for (i, y) in y.iter_mut().enumerate() {
                each_lane(
                    y,
                    [x.row(i)],
                    [&largest, &log_sums],
                    #[inline(always)]
                    |[x]: [T; 1], [largest, log_sum]| {
                        O::narrowed((x.widened() - largest) - log_sum)
                    },
                );
            }
        },
    );
    Ok(tensor(y, x.dims()))
}

pub(super) fn log_softmax_backward<T, O>(y: &Tensor, grad: &Tensor, lines: Lines) -> Result<Tensor>
where
    T: Lane<Acc: Exp>,
    O: Lane<Acc = T::Acc>,
{
    let _held = hold([y, grad]);
    let (data, grad): (&[T], &[T]) = (&Elements::of(y)?, &Elements::of(grad)?);
    let dx = lines.map_blocks::<T::Acc, O>(
        #[inline(always)]
        |from, dx| {
            let [y, g] = Block::both([data, grad], from, lines, dx);
            let sums = sums(
                dx.len(),
                y.width,
                #[inline(always)]
                |i, sums| {
                    add_row(
                        sums,
                        [g.row(i)],
                        [],
                        #[inline(always)]
                        |[g], []| g,
                    )
                },
                #[inline(always)]
                |sum| sum,
            );
            for (i, dx) in dx.iter_mut().enumerate() {
                each_lane(
                    dx,
                    [y.row(i), g.row(i)],
                    [&sums],
                    #[inline(always)]
                    |[y, g]: [T; 2], [sum]| {
                        O::narrowed(g.widened() - y.widened().exponential() * sum)
                    },
                );
            }
        },
    );
    Ok(tensor(dx, y.dims()))
}

/// Lines side by side: their part of each row.
#[derive(Clone, Copy)]
struct Block<'a, T> {
    /// From the first line's first element on.
    data: &'a [T],
    stride: usize,
    width: usize,
}

impl<'a, T: Lane> Block<'a, T> {
    /// Those of two tensors at `from`, where `out` has the rows of the result.
    #[inline(always)]
    fn both<O>(
        data: [&'a [T]; 2],
        from: usize,
        lines: Lines,
        out: &[&mut [MaybeUninit<O>]],
    ) -> [Self; 2] {
        let [a, b] = data;
        let of = |data: &'a [T]| Self {
            data: &data[from..],
            stride: lines.stride(),
            width: out[0].len(),
        };
        [of(a), of(b)]
    }

    #[inline(always)]
    fn row(self, index: usize) -> &'a [T] {
        &self.data[index * self.stride..][..self.width]
    }

    /// Each line's largest element; NaN is passed over, and reaches the result through the sums.
    #[inline(always)]
    fn largest(self, count: usize) -> Vec<T::Acc> {
        let mut largest = vec![T::Acc::neg_infinity(); self.width];
        for row in 0..count {
            for (largest, x) in largest.iter_mut().zip(self.row(row)) {
                *largest = if x.widened() > *largest { x.widened() } else { *largest };
            }
        }
        largest
    }
}

/// `of` each line's sum, where `add` adds row after row to sums: of so many lines side by side.
#[inline(always)]
fn sums<A: Real>(
    count: usize,
    width: usize,
    add: impl Fn(usize, &mut [A]),
    of: impl Fn(f64) -> f64,
) -> Vec<A> {
    let (mut sums, mut panel) = (vec![0.0; width], vec![A::zero(); width]);
    for start in (0..count).step_by(PANEL) {
        panel.fill(A::zero());
        for row in start..count.min(start + PANEL) {
            add(row, &mut panel);
        }
        for (sum, partial) in sums.iter_mut().zip(&panel) {
            *sum += partial.to_double();
        }
    }
    sums.into_iter().map(of).map(A::of).collect()
}
