//! Pooling of `(n, h, w, c)` on the CPU: one image at a time, all channels of a pixel together.
//!
//! [`planes`] shares the images among threads. For each it has two buffers in the type of the arithmetic: one for the
//! widened input and one for the result, which it rounds once. Per pixel of a window, a loop goes over the channels.
//! They are contiguous, so it vectorises for any window and stride.
//!
//! The forward pass of max pooling keeps the pixel of each largest element, per channel. The first of equal ones wins,
//! and NaN wins over all. Backward adds each gradient to that pixel's. Average pooling divides by the whole window, so
//! padding counts as zeros.
//!
//! One thread computes all of an image, in one order. So results do not depend on the number of threads.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use num_traits::{Float, Zero};

use super::cpu::{keep_larger, planes};
use super::window::{Dims4, Window};
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::with_output;
use crate::kernels::elementwise::cpu::with_slice;

/// Pixels added up before their sum is.
const RUN: usize = 128;

pub(super) fn max_forward(x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
    fn typed<T: Lane>(x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
        let (n, h, w, c) = x.dims4()?;
        let (oh, ow) = window.out_size((h, w));
        let data: &[T] = &Elements::of(x)?;
        let mut index = vec![0u32; n * oh * ow * c];
        let y = planes(
            &mut index,
            n,
            (h * w * c, oh * ow * c),
            #[inline(always)]
            |image, index, wide, out| {
                T::widen(&data[image * h * w * c..][..h * w * c], wide);
                for (at, rows, columns) in windows((h, w), window) {
                    let best = &mut out[at * c..][..c];
                    let best_at = &mut index[at * c..][..c];
                    best.fill(T::Acc::neg_infinity());
                    best_at.fill((rows.start * w + columns.start) as u32);
                    for pixel in pixels(w, rows, columns) {
                        let x = &wide[pixel * c..][..c];
                        for ((best, at), &x) in best.iter_mut().zip(&mut *best_at).zip(x) {
                            keep_larger(best, at, x, pixel as u32);
                        }
                    }
                }
            },
        );
        let shape = [n, oh, ow, c];
        Ok((tensor::<T>(y, &shape), Tensor::from_vec(index, &shape, &Device::Cpu)?))
    }
    with_element!(x.dtype(), T => typed::<T>(x, window))
}

pub(super) fn max_backward(
    grad: &Tensor,
    index: &Tensor,
    dims: Dims4,
    out: DType,
) -> Result<Tensor> {
    fn typed<G: Lane, O: Lane<Acc = G::Acc>>(
        grad: &Tensor,
        index: &[u32],
        (n, h, w, c): Dims4,
    ) -> Result<Tensor> {
        let results = index.len() / n.max(1);
        let grad: &[G] = &Elements::of(grad)?;
        let dx = planes(
            &mut [(); 0],
            n,
            (results, h * w * c),
            #[inline(always)]
            |image, _, wide, out| {
                G::widen(&grad[image * results..][..results], wide);
                out.fill(G::Acc::zero());
                let places = index[image * results..][..results].iter().zip(&*wide);
                for (i, (&at, &g)) in places.enumerate() {
                    out[at as usize * c + i % c] += g;
                }
            },
        );
        Ok(tensor::<O>(dx, &[n, h, w, c]))
    }
    let _held = hold([index, grad]);
    with_slice(index, |index: &[u32]| {
        with_element!(grad.dtype(), G => with_output!(G, out, O => {
            typed::<G, O>(grad, index, dims)
        }))
    })
}

pub(super) fn avg_forward(x: &Tensor, window: Window) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, window: Window) -> Result<Tensor> {
        let (n, h, w, c) = x.dims4()?;
        let (oh, ow) = window.out_size((h, w));
        let data: &[T] = &Elements::of(x)?;
        let area = T::Acc::of(window.area() as f64);
        let y = planes(
            &mut [(); 0],
            n,
            (h * w * c, oh * ow * c),
            #[inline(always)]
            |image, _, wide, out| {
                T::widen(&data[image * h * w * c..][..h * w * c], wide);
                for (at, rows, columns) in windows((h, w), window) {
                    let sums = &mut out[at * c..][..c];
                    sums.fill(T::Acc::zero());
                    for pixel in pixels(w, rows, columns) {
                        let x = &wide[pixel * c..][..c];
                        sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += x);
                    }
                    sums.iter_mut().for_each(|sum| *sum /= area);
                }
            },
        );
        Ok(tensor::<T>(y, &[n, oh, ow, c]))
    }
    with_element!(x.dtype(), T => typed::<T>(x, window))
}

pub(super) fn avg_backward(
    grad: &Tensor,
    dims: Dims4,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    fn typed<G: Lane, O: Lane<Acc = G::Acc>>(
        grad: &Tensor,
        (n, h, w, c): Dims4,
        window: Window,
    ) -> Result<Tensor> {
        let (oh, ow) = window.out_size((h, w));
        let grad: &[G] = &Elements::of(grad)?;
        let area = G::Acc::of(window.area() as f64);
        let dx = planes(
            &mut [(); 0],
            n,
            (oh * ow * c, h * w * c),
            #[inline(always)]
            |image, _, wide, out| {
                G::widen(&grad[image * oh * ow * c..][..oh * ow * c], wide);
                wide.iter_mut().for_each(|share| *share /= area);
                out.fill(G::Acc::zero());
                for (at, rows, columns) in windows((h, w), window) {
                    let shares = &wide[at * c..][..c];
                    for pixel in pixels(w, rows, columns) {
                        let dx = &mut out[pixel * c..][..c];
                        dx.iter_mut().zip(shares).for_each(|(dx, &share)| *dx += share);
                    }
                }
            },
        );
        Ok(tensor::<O>(dx, &[n, h, w, c]))
    }
    with_element!(grad.dtype(), G => with_output!(G, out, O => typed::<G, O>(grad, dims, window)))
}

pub(super) fn global_avg_forward(x: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor) -> Result<Tensor> {
        let (n, h, w, c) = x.dims4()?;
        let data: &[T] = &Elements::of(x)?;
        let area = T::Acc::of((h * w) as f64);
        let y = planes(
            &mut [(); 0],
            n,
            (h * w * c, c),
            #[inline(always)]
            |image, _, wide, out| {
                T::widen(&data[image * h * w * c..][..h * w * c], wide);
                out.fill(T::Acc::zero());
                // Sums of sums: the error of one grows with the terms added one after the other.
                for block in wide.chunks_mut(RUN * c) {
                    let (sums, rest) = block.split_at_mut(c);
                    for x in rest.chunks_exact(c) {
                        sums.iter_mut().zip(x).for_each(|(sum, &x)| *sum += x);
                    }
                    out.iter_mut().zip(sums).for_each(|(total, &mut sum)| *total += sum);
                }
                out.iter_mut().for_each(|sum| *sum /= area);
            },
        );
        Ok(tensor::<T>(y, &[n, c]))
    }
    with_element!(x.dtype(), T => typed::<T>(x))
}

pub(super) fn global_avg_backward(
    grad: &Tensor,
    (n, h, w, c): Dims4,
    out: DType,
) -> Result<Tensor> {
    fn typed<G: Lane, O: Lane<Acc = G::Acc>>(grad: &Tensor, (n, h, w, c): Dims4) -> Result<Tensor> {
        let grad: &[G] = &Elements::of(grad)?;
        let area = G::Acc::of((h * w) as f64);
        let dx = planes(
            &mut [(); 0],
            n,
            (c, h * w * c),
            #[inline(always)]
            |image, _, share, out| {
                G::widen(&grad[image * c..][..c], share);
                share.iter_mut().for_each(|share| *share /= area);
                out.chunks_exact_mut(c).for_each(|pixel| pixel.copy_from_slice(share));
            },
        );
        Ok(tensor::<O>(dx, &[n, h, w, c]))
    }
    with_element!(grad.dtype(), G => with_output!(G, out, O => typed::<G, O>(grad, (n, h, w, c))))
}

/// Every window: its number, and the rows and columns of it that are in the image.
#[inline(always)]
fn windows(
    (h, w): (usize, usize),
    window: Window,
) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
    let (oh, ow) = window.out_size((h, w));
    let inside = |o: usize, size: usize, (kernel, stride, padding): (usize, usize, usize)| {
        (o * stride).saturating_sub(padding)
            ..size.min((o * stride + kernel).saturating_sub(padding))
    };
    let Window { kernel, stride, padding, .. } = window;
    (0..oh * ow).map(move |at| {
        let rows = inside(at / ow, h, (kernel.0, stride.0, padding.0));
        (at, rows, inside(at % ow, w, (kernel.1, stride.1, padding.1)))
    })
}

/// The numbers of some pixels of an image of width `w`, a row after the other.
#[inline(always)]
fn pixels(w: usize, rows: Range<usize>, columns: Range<usize>) -> impl Iterator<Item = usize> {
    rows.flat_map(move |row| columns.clone().map(move |column| row * w + column))
}
