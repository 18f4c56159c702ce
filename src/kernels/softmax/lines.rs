//! Softmax and log-softmax along another dimension than the last, on the CPU: many lines side by side.
//!
//! A block of lines is read from memory once: first for each line's largest element, then, from the second-level cache,
//! for its sum and for the result. Loops go along rows, one element of each line.

use std::mem::MaybeUninit;

use candle_core::{Result, Tensor};

use super::exp::Exp;
use crate::kernels::cpu::array::from_fn;
use crate::kernels::cpu::dtype::{Elements, Real, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{each_lane, vectorise_in};
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::reduce::lines::{Lines, OutputRows, PANEL, add_row};

pub(super) fn softmax<T: Lane<Acc: Exp>, O: Lane<Acc = T::Acc>>(
    x: &Tensor,
    lines: Lines,
) -> Result<Tensor> {
    fn kernel<A: Exp>([x]: [LineBlock<'_, A>; 1], y: &mut [&mut [MaybeUninit<A>]]) {
        vectorise_in::<A>(
            #[inline(always)]
            || {
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
                                |[x]: [A; 1], [largest]| (x - largest).exponential(),
                            );
                        }
                    },
                );
                let share = sums(
                    y.len(),
                    x.width,
                    #[inline(always)]
                    |i, sums: &mut [A]| {
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
                        |[e], [share]| e * share,
                    );
                }
            },
        );
    }
    each_block::<T, O, 1>([x], lines, kernel)
}

pub(super) fn softmax_backward<T: Lane<Acc: Exp>>(
    y: &Tensor,
    grad: &Tensor,
    lines: Lines,
) -> Result<Tensor> {
    fn kernel<A: Exp>([y, g]: [LineBlock<'_, A>; 2], dx: &mut [&mut [MaybeUninit<A>]]) {
        vectorise_in::<A>(
            #[inline(always)]
            || {
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
                        |[y, g], [dot]| y * (g - dot),
                    );
                }
            },
        );
    }
    each_block::<T, T, 2>([y, grad], lines, kernel)
}

pub(super) fn log_softmax<T: Lane<Acc: Exp>, O: Lane<Acc = T::Acc>>(
    x: &Tensor,
    lines: Lines,
) -> Result<Tensor> {
    fn kernel<A: Exp>([x]: [LineBlock<'_, A>; 1], y: &mut [&mut [MaybeUninit<A>]]) {
        vectorise_in::<A>(
            #[inline(always)]
            || {
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
                        |[x], [largest, log_sum]| (x - largest) - log_sum,
                    );
                }
            },
        );
    }
    each_block::<T, O, 1>([x], lines, kernel)
}

pub(super) fn log_softmax_backward<T: Lane<Acc: Exp>, O: Lane<Acc = T::Acc>>(
    y: &Tensor,
    grad: &Tensor,
    lines: Lines,
) -> Result<Tensor> {
    fn kernel<A: Exp>([y, g]: [LineBlock<'_, A>; 2], dx: &mut [&mut [MaybeUninit<A>]]) {
        vectorise_in::<A>(
            #[inline(always)]
            || {
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
                        |[y, g]: [A; 2], [sum]| g - y.exponential() * sum,
                    );
                }
            },
        );
    }
    each_block::<T, O, 2>([y, grad], lines, kernel)
}

/// Reads a block of each tensor, and writes one of results.
type Kernel<A, const M: usize> = fn([LineBlock<'_, A>; M], OutputRows<'_, '_, A>);

/// What `kernel` makes of the elements of `tensors`, block by block. It is compiled for the types of the arithmetic alone: a
/// block of 16-bit elements is widened before, and the result is rounded after, in the second-level cache.
fn each_block<T: Lane, O: Lane<Acc = T::Acc>, const M: usize>(
    tensors: [&Tensor; M],
    lines: Lines,
    kernel: Kernel<T::Acc, M>,
) -> Result<Tensor> {
    let _held = hold(tensors);
    let elements = tensors.into_iter().map(Elements::of).collect::<Result<Vec<_>>>()?;
    let y = lines.map_blocks(&|from, y: &mut [&mut [MaybeUninit<O>]]| {
        let (count, width) = (y.len(), y[0].len());
        let wide: Vec<_> = elements
            .iter()
            .map(|x| widened::<T>(&x[from..], lines.stride(), [count, width]))
            .collect();
        let blocks = from_fn(|m| match T::as_wide(&elements[m][from..]) {
            Some(data) => LineBlock { data, stride: lines.stride(), width },
            None => LineBlock { data: &wide[m], stride: width, width },
        });
        let mut own: Vec<_> = y.iter_mut().filter_map(|row| O::as_wide_mut(row)).collect();
        if !own.is_empty() {
            return kernel(blocks, &mut own);
        }
        drop(own);
        let result = uninit_vec(count * width, |rows| {
            kernel(blocks, &mut rows.chunks_mut(width).collect::<Vec<_>>());
        });
        vectorise_in::<O::Acc>(
            #[inline(always)]
            || {
                for (y, row) in y.iter_mut().zip(result.chunks_exact(width)) {
                    for (y, x) in y.iter_mut().zip(row) {
                        y.write(O::narrowed(*x));
                    }
                }
            },
        );
    });
    Ok(tensor(y, tensors[0].dims()))
}

/// The first `width` elements of `count` rows, widened; nothing of elements that are wide.
fn widened<T: Lane>(x: &[T], stride: usize, [count, width]: [usize; 2]) -> Vec<T::Acc> {
    if T::as_wide(x).is_some() {
        return Vec::new();
    }
    uninit_vec(count * width, |rows| {
        vectorise_in::<T::Acc>(
            #[inline(always)]
            || {
                for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                    for (wide, x) in row.iter_mut().zip(&x[i * stride..]) {
                        wide.write(x.widened());
                    }
                }
            },
        );
    })
}

/// Lines side by side: their part of each row.
#[derive(Clone, Copy)]
struct LineBlock<'a, A> {
    /// From the first line's first element on.
    data: &'a [A],
    stride: usize,
    width: usize,
}

impl<'a, A: Real> LineBlock<'a, A> {
    #[inline(always)]
    fn row(self, index: usize) -> &'a [A] {
        &self.data[index * self.stride..][..self.width]
    }

    /// Each line's largest element; NaN is passed over, and reaches the result through the sums.
    #[inline(always)]
    fn largest(self, count: usize) -> Vec<A> {
        let mut largest = vec![A::neg_infinity(); self.width];
        for row in 0..count {
            for (largest, x) in largest.iter_mut().zip(self.row(row)) {
                *largest = if *x > *largest { *x } else { *largest };
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
