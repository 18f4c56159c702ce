//! NCHW pooling on the CPU, a plane (one channel of one image) at a time.
//!
//! A plane is widened to the arithmetic's type into scratch that stays in the cache, and its result is rounded on the
//! way out. Inside a plane the loops go over the taps of the window, and for each tap over a strip of neighbouring
//! windows. So the inner loop is over contiguous or evenly strided elements and vectorises; a loop over windows with
//! the taps inside would not.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use num_traits::{Float, Zero};

use super::window::{Dims4, Window};
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::{GRAIN, pieces, vectorise_in, with_output};
use crate::kernels::elementwise::cpu::with_slice;
use crate::kernels::reduce::channels::Channels;

/// The most windows looked at together.
const STRIP: usize = 64;
/// Windows compared in one vector operation.
const CHUNK: usize = 8;

pub(super) fn max_forward(x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
    fn typed<T: Lane>(x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
        let (n, c, h, w) = x.dims4()?;
        let (oh, ow) = window.out_size((h, w));
        let data: &[T] = &Elements::of(x)?;
        let mut index = vec![0u32; n * c * oh * ow];
        let line = padded_line(w, window, ow);
        let y = planes(
            &mut index,
            n * c,
            (h * line, oh * ow),
            #[inline(always)]
            |plane, index, wide, out| {
                let rows = data[plane * h * w..][..h * w].chunks_exact(w.max(1));
                for (row, line) in rows.zip(wide.chunks_exact_mut(line)) {
                    let (left, rest) = line.split_at_mut(window.padding.1);
                    let (inside, right) = rest.split_at_mut(w);
                    left.fill(T::Acc::neg_infinity());
                    for (place, x) in inside.iter_mut().zip(row) {
                        *place = x.widened();
                    }
                    right.fill(T::Acc::neg_infinity());
                }
                max_plane(wide, (h, w), window, out, index);
            },
        );
        let shape = [n, c, oh, ow];
        Ok((tensor::<T>(y, &shape), Tensor::from_vec(index, &shape, &Device::Cpu)?))
    }
    with_element!(x.dtype(), T => typed::<T>(x, window))
}

pub(super) fn max_backward(
    grad: &Tensor,
    index: &Tensor,
    (n, c, h, w): Dims4,
    out: DType,
) -> Result<Tensor> {
    fn typed<G: Lane, O: Lane<Acc = G::Acc>>(
        grad: &Tensor,
        index: &[u32],
        (n, c, h, w): Dims4,
    ) -> Result<Tensor> {
        let windows = index.len() / (n * c).max(1);
        let grad: &[G] = &Elements::of(grad)?;
        let dx = planes(
            &mut [(); 0],
            n * c,
            (windows, h * w),
            #[inline(always)]
            |plane, _, wide, out| {
                G::widen(&grad[plane * windows..][..windows], wide);
                out.fill(G::Acc::zero());
                for (&at, &g) in index[plane * windows..][..windows].iter().zip(&*wide) {
                    out[at as usize] += g;
                }
            },
        );
        Ok(tensor::<O>(dx, &[n, c, h, w]))
    }
    let _held = hold([index, grad]);
    with_slice(index, |index: &[u32]| {
        with_element!(grad.dtype(), G => with_output!(G, out, O => {
            typed::<G, O>(grad, index, (n, c, h, w))
        }))
    })
}

pub(super) fn avg_forward(x: &Tensor, window: Window) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, window: Window) -> Result<Tensor> {
        let (n, c, h, w) = x.dims4()?;
        let (oh, ow) = window.out_size((h, w));
        let data: &[T] = &Elements::of(x)?;
        let area = T::Acc::of(window.area() as f64);
        let y = planes(
            &mut [(); 0],
            n * c,
            (h * w, oh * ow),
            #[inline(always)]
            |plane, _, wide, out| {
                T::widen(&data[plane * h * w..][..h * w], wide);
                out.fill(T::Acc::zero());
                let mut buffer = [T::Acc::zero(); STRIP];
                for_each_strip(
                    (h, w),
                    window,
                    #[inline(always)]
                    |windows, first| {
                        let buffer = &mut buffer[..windows.len()];
                        let x = gather(&wide[first..], window.stride.1, buffer);
                        for (sum, &x) in out[windows].iter_mut().zip(x) {
                            *sum += x;
                        }
                    },
                );
                for sum in out {
                    *sum /= area;
                }
            },
        );
        Ok(tensor::<T>(y, &[n, c, oh, ow]))
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
        (n, c, h, w): Dims4,
        window: Window,
    ) -> Result<Tensor> {
        let (oh, ow) = window.out_size((h, w));
        let grad: &[G] = &Elements::of(grad)?;
        let area = G::Acc::of(window.area() as f64);
        let dx = planes(
            &mut [(); 0],
            n * c,
            (oh * ow, h * w),
            #[inline(always)]
            |plane, _, wide, out| {
                G::widen(&grad[plane * oh * ow..][..oh * ow], wide);
                out.fill(G::Acc::zero());
                for grad in &mut *wide {
                    *grad /= area;
                }
                for_each_strip(
                    (h, w),
                    window,
                    #[inline(always)]
                    |windows, first| {
                        let dx = out[first..].chunks_mut(window.stride.1);
                        for (&share, dx) in wide[windows].iter().zip(dx) {
                            dx[0] += share;
                        }
                    },
                );
            },
        );
        Ok(tensor::<O>(dx, &[n, c, h, w]))
    }
    with_element!(grad.dtype(), G => with_output!(G, out, O => typed::<G, O>(grad, dims, window)))
}

pub(super) fn global_avg_forward(x: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor) -> Result<Tensor> {
        let (n, c, h, w) = x.dims4()?;
        let sums = Channels::rows(n * c, h * w).sum::<T>(&Elements::of(x)?);
        let area = (h * w) as f64;
        let average: Vec<_> = sums.iter().map(|sum| T::Acc::of(sum / area)).collect();
        let mut y = vec![T::default(); n * c];
        T::narrow(&average, &mut y);
        Ok(tensor(y, &[n, c]))
    }
    with_element!(x.dtype(), T => typed::<T>(x))
}

pub(super) fn global_avg_backward(
    grad: &Tensor,
    (n, c, h, w): Dims4,
    out: DType,
) -> Result<Tensor> {
    fn typed<G: Lane, O: Lane<Acc = G::Acc>>(grad: &Tensor, (n, c, h, w): Dims4) -> Result<Tensor> {
        let mut share = vec![G::Acc::zero(); n * c];
        G::widen(&Elements::<G>::of(grad)?, &mut share);
        let area = G::Acc::of((h * w) as f64);
        for share in &mut share {
            *share /= area;
        }
        let dx = Channels::rows(n * c, h * w).map::<G, O, 0, 1>(
            [],
            [&share],
            #[inline(always)]
            |[], [share]| share,
        );
        Ok(tensor(dx, &[n, c, h, w]))
    }
    with_element!(grad.dtype(), G => with_output!(G, out, O => typed::<G, O>(grad, (n, c, h, w))))
}

/// The result, plane by plane: `f` is given a plane's number, its part of `side`, and buffers of
/// the lengths `(input, output)` of one plane, and leaves the plane's result in the second buffer.
#[inline(always)]
pub(crate) fn planes<A: Real, O: Lane<Acc = A>, S: Send>(
    side: &mut [S],
    count: usize,
    lengths: (usize, usize),
    f: impl Fn(usize, &mut [S], &mut [A], &mut [A]) + Sync,
) -> Vec<O> {
    run_planes(side, count, lengths, &|number, side, wide, out, result: &mut [O]| {
        vectorise_in::<A>(
            #[inline(always)]
            || {
                f(number, side, wide, out);
                O::narrow(out, result);
            },
        )
    })
}

/// What [`planes`] does to one plane: number, side, both buffers, result.
type Plane<'a, A, O, S> = dyn Fn(usize, &mut [S], &mut [A], &mut [A], &mut [O]) + Sync + 'a;

fn run_planes<A: Real, O: Lane<Acc = A>, S: Send>(
    side: &mut [S],
    count: usize,
    (input, output): (usize, usize),
    f: &Plane<A, O, S>,
) -> Vec<O> {
    let mut result = vec![O::default(); count * output];
    // Few tasks per thread, as each has buffers of its own.
    let few = count.div_ceil(4 * parallel::threads());
    let per_task = GRAIN.div_ceil(input.max(output).max(1)).max(few);
    let task = per_task * output.max(1);
    let sides = pieces(side, task, result.len().div_ceil(task));
    let tasks = result.chunks_mut(task).zip(sides).enumerate();
    parallel::for_each_item(tasks, |(task, (results, mut sides))| {
        let (mut wide, mut out) = (vec![A::zero(); input], vec![A::zero(); output]);
        for (plane, result) in results.chunks_mut(output.max(1)).enumerate() {
            let len = result.len().min(sides.len());
            let side = sides.split_off_mut(..len).unwrap_or_default();
            f(task * per_task + plane, side, &mut wide, &mut out, result);
        }
    });
    result
}

/// Goes over the elements of all windows in strips: up to [`STRIP`] windows side by side, and one
/// element of the kernel. `f` is given the windows that have it outside the padding, and where the
/// first of them has it in the plane. Each next window has it a horizontal stride further.
#[inline(always)]
fn for_each_strip((h, w): (usize, usize), window: Window, mut f: impl FnMut(Range<usize>, usize)) {
    let (oh, ow) = window.out_size((h, w));
    let Window { kernel, stride, padding, .. } = window;
    // Of every horizontal element of the kernel, the windows that have it inside.
    let inside = |kx: usize| {
        let from = padding.1.saturating_sub(kx).div_ceil(stride.1);
        from..(w + padding.1).saturating_sub(kx).div_ceil(stride.1).min(ow)
    };
    // Those that any window has inside: a kernel may be much wider than the plane.
    let first = padding.1.saturating_sub(ow.saturating_sub(1) * stride.1);
    let last = kernel.1.min(w + padding.1);
    let inside: Vec<Range<usize>> = (first..last).map(inside).collect();
    for oy in 0..oh {
        let top = oy * stride.0;
        for row in top.saturating_sub(padding.0)..h.min(top + kernel.0 - padding.0) {
            for (kx, inside) in (first..).zip(&inside) {
                for from in inside.clone().step_by(STRIP) {
                    let to = inside.end.min(from + STRIP);
                    let column = from * stride.1 + kx - padding.1;
                    f(oy * ow + from..oy * ow + to, row * w + column);
                }
            }
        }
    }
}

/// The length of a row of [`max_plane`], with its padding and what [`every`] reads of whole chunks of windows.
fn padded_line(w: usize, window: Window, ow: usize) -> usize {
    let Window { kernel, stride, padding, .. } = window;
    let read = ow.next_multiple_of(CHUNK) * stride.1 + kernel.1;
    (w + 2 * padding.1).max(if stride.1 <= 2 { read } else { 0 })
}

/// Rows of `x` have their padding on the left, and as much on the right as makes them [`padded_line`]s: of `-∞`, which
/// no element loses to. Windows beyond the last of a row are computed and dropped, as whole chunks are vectorised.
#[inline(always)]
fn max_plane<A: Real>(
    x: &[A],
    (h, w): (usize, usize),
    window: Window,
    y: &mut [A],
    index: &mut [u32],
) {
    let (_, ow) = window.out_size((h, w));
    let Window { kernel, stride, padding, .. } = window;
    let line = padded_line(w, window, ow);
    let rows = y.chunks_exact_mut(ow).zip(index.chunks_exact_mut(ow));
    for (oy, (y, index)) in rows.enumerate() {
        let top = oy * stride.0;
        let rows = top.saturating_sub(padding.0)..h.min(top + kernel.0 - padding.0);
        let chunks = y.chunks_mut(CHUNK).zip(index.chunks_mut(CHUNK));
        for (chunk, (y, index)) in chunks.enumerate() {
            let (first, last) = (chunk * CHUNK * stride.1, (chunk * CHUNK + CHUNK - 1) * stride.1);
            // Elements of the kernel that any of these windows has in the plane.
            let taps = padding.1.saturating_sub(last)..kernel.1.min(w + padding.1 - first);
            let mut best = [A::neg_infinity(); CHUNK];
            let mut best_at = [0u32; CHUNK];
            for (lane, at) in best_at.iter_mut().enumerate() {
                let column = (first + lane * stride.1).saturating_sub(padding.1);
                *at = (rows.start * w + column) as u32;
            }
            for row in rows.clone() {
                for tap in taps.clone() {
                    let x = every::<A, CHUNK>(&x[row * line + first + tap..], stride.1);
                    // Of the padding it wraps around, and is not taken.
                    let at = (row * w + first + tap).wrapping_sub(padding.1);
                    for lane in 0..CHUNK {
                        let at = at.wrapping_add(lane * stride.1) as u32;
                        keep_larger(&mut best[lane], &mut best_at[lane], x[lane], at);
                    }
                }
            }
            y.copy_from_slice(&best[..y.len()]);
            index.copy_from_slice(&best_at[..index.len()]);
        }
    }
}

/// The first `N` of every `stride`th element: at least `N * stride`, if the stride is 1 or 2, else as many as there are.
#[inline(always)]
fn every<A: Real, const N: usize>(x: &[A], stride: usize) -> [A; N] {
    let mut out = [A::zero(); N];
    match stride {
        1 => out.copy_from_slice(&x[..N]),
        2 => out.iter_mut().zip(x[..2 * N].as_chunks::<2>().0).for_each(
            #[inline(always)]
            |(out, x)| *out = x[0],
        ),
        _ => out.iter_mut().zip(x.iter().step_by(stride)).for_each(
            #[inline(always)]
            |(out, x)| *out = *x,
        ),
    }
    out
}

#[inline(always)]
pub(super) fn keep_larger<A: Real>(best: &mut A, best_at: &mut u32, x: A, at: u32) {
    let wins = x > *best || x.is_nan();
    *best = if wins { x } else { *best };
    *best_at = if wins { at } else { *best_at };
}

/// Fills `out` with every `stride`-th element of `x`.
#[inline(always)]
fn gather<'a, A: Copy>(x: &[A], stride: usize, out: &'a mut [A]) -> &'a [A] {
    match stride {
        1 => out.copy_from_slice(&x[..out.len()]),
        2 => out.iter_mut().zip(x.chunks(2)).for_each(|(out, x)| *out = x[0]),
        _ => out.iter_mut().zip(x.chunks(stride)).for_each(|(out, x)| *out = x[0]),
    }
    out
}
