use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use num_traits::Zero;
use pulp::Arch;
use rayon::prelude::*;

use super::Window;
use crate::kernels::element::{Element, Elements, Real, tensor, with_element};
use crate::kernels::elementwise::blocks::{GRAIN, with_output};
use crate::kernels::elementwise::cpu::with_slice;
use crate::kernels::reduce::channels::Channels;

type Dims = (usize, usize, usize, usize);

pub(super) fn max_forward(x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
    fn typed<T: Element>(x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
        let (n, c, h, w) = x.dims4()?;
        let (oh, ow) = window.out_size((h, w));
        let data: &[T] = &Elements::of(x)?;
        let mut index = vec![0u32; n * c * oh * ow];
        let y = planes(&mut index, n * c, (h * w, oh * ow), |plane, index, wide, out| {
            T::widen(&data[plane * h * w..][..h * w], wide);
            max_plane(wide, (h, w), window, out, index);
        });
        let shape = [n, c, oh, ow];
        Ok((tensor::<T>(y, &shape), Tensor::from_vec(index, &shape, &Device::Cpu)?))
    }
    with_element!(x.dtype(), T => typed::<T>(x, window))
}

pub(super) fn max_backward(
    grad: &Tensor,
    index: &Tensor,
    (n, c, h, w): Dims,
    out: DType,
) -> Result<Tensor> {
    fn typed<G: Element, O: Element<Acc = G::Acc>>(
        grad: &Tensor,
        index: &[u32],
        (n, c, h, w): Dims,
    ) -> Result<Tensor> {
        let windows = index.len() / (n * c).max(1);
        let grad: &[G] = &Elements::of(grad)?;
        let dx = planes(&mut [(); 0], n * c, (windows, h * w), |plane, _, wide, out| {
            G::widen(&grad[plane * windows..][..windows], wide);
            out.fill(G::Acc::zero());
            for (&at, &g) in index[plane * windows..][..windows].iter().zip(&*wide) {
                out[at as usize] += g;
            }
        });
        Ok(tensor::<O>(dx, &[n, c, h, w]))
    }
    with_slice(index, |index: &[u32]| {
        with_element!(grad.dtype(), G => with_output!(G, out, O => {
            typed::<G, O>(grad, index, (n, c, h, w))
        }))
    })
}

pub(super) fn avg_forward(x: &Tensor, window: Window) -> Result<Tensor> {
    fn typed<T: Element>(x: &Tensor, window: Window) -> Result<Tensor> {
        let (n, c, h, w) = x.dims4()?;
        let (oh, ow) = window.out_size((h, w));
        let data: &[T] = &Elements::of(x)?;
        let area = T::Acc::of(window.area() as f64);
        let y = planes(&mut [(); 0], n * c, (h * w, oh * ow), |plane, _, wide, out| {
            T::widen(&data[plane * h * w..][..h * w], wide);
            out.fill(T::Acc::zero());
            for_each_strip((h, w), window, |windows, first| {
                let x = wide[first..].iter().step_by(window.stride.1);
                for (sum, &x) in out[windows].iter_mut().zip(x) {
                    *sum += x;
                }
            });
            for sum in out {
                *sum /= area;
            }
        });
        Ok(tensor::<T>(y, &[n, c, oh, ow]))
    }
    with_element!(x.dtype(), T => typed::<T>(x, window))
}

pub(super) fn avg_backward(
    grad: &Tensor,
    dims: Dims,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    fn typed<G: Element, O: Element<Acc = G::Acc>>(
        grad: &Tensor,
        (n, c, h, w): Dims,
        window: Window,
    ) -> Result<Tensor> {
        let (oh, ow) = window.out_size((h, w));
        let grad: &[G] = &Elements::of(grad)?;
        let area = G::Acc::of(window.area() as f64);
        let dx = planes(&mut [(); 0], n * c, (oh * ow, h * w), |plane, _, wide, out| {
            G::widen(&grad[plane * oh * ow..][..oh * ow], wide);
            out.fill(G::Acc::zero());
            for grad in &mut *wide {
                *grad /= area;
            }
            for_each_strip((h, w), window, |windows, first| {
                let dx = out[first..].iter_mut().step_by(window.stride.1);
                for (&share, dx) in wide[windows].iter().zip(dx) {
                    *dx += share;
                }
            });
        });
        Ok(tensor::<O>(dx, &[n, c, h, w]))
    }
    with_element!(grad.dtype(), G => with_output!(G, out, O => typed::<G, O>(grad, dims, window)))
}

pub(super) fn global_avg_forward(x: &Tensor) -> Result<Tensor> {
    fn typed<T: Element>(x: &Tensor) -> Result<Tensor> {
        let (n, c, h, w) = x.dims4()?;
        let sums = Channels::rows(n * c, h * w).sums::<T, 1, 0, 1>(
            [&Elements::of(x)?],
            [],
            #[inline(always)]
            |x, []| x,
        );
        let area = (h * w) as f64;
        let average: Vec<_> = sums.iter().map(|[sum]| T::Acc::of(sum / area)).collect();
        let mut y = vec![T::default(); n * c];
        T::narrow(&average, &mut y);
        Ok(tensor(y, &[n, c]))
    }
    with_element!(x.dtype(), T => typed::<T>(x))
}

pub(super) fn global_avg_backward(grad: &Tensor, (n, c, h, w): Dims, out: DType) -> Result<Tensor> {
    fn typed<G: Element, O: Element<Acc = G::Acc>>(
        grad: &Tensor,
        (n, c, h, w): Dims,
    ) -> Result<Tensor> {
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
fn planes<A: Real, O: Element<Acc = A>, S: Send>(
    side: &mut [S],
    count: usize,
    lengths: (usize, usize),
    f: impl Fn(usize, &mut [S], &mut [A], &mut [A]) + Sync,
) -> Vec<O> {
    run_planes(side, count, lengths, &|number, side, wide, out, result: &mut [O]| {
        Arch::new().dispatch(
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

fn run_planes<A: Real, O: Element<Acc = A>, S: Send>(
    side: &mut [S],
    count: usize,
    (input, output): (usize, usize),
    f: &Plane<A, O, S>,
) -> Vec<O> {
    let mut result = vec![O::default(); count * output];
    let buffers = || (vec![A::zero(); input], vec![A::zero(); output]);
    let per_task = GRAIN.div_ceil(input.max(output).max(1));
    let chunks = result.par_chunks_mut(output.max(1)).with_min_len(per_task).enumerate();
    if side.is_empty() {
        chunks.for_each_init(buffers, |(wide, out), (number, result)| {
            f(number, &mut [], wide, out, result);
        });
    } else {
        let chunks = chunks.zip(side.par_chunks_mut(output.max(1)));
        chunks.for_each_init(buffers, |(wide, out), ((number, result), side)| {
            f(number, side, wide, out, result);
        });
    }
    result
}

/// Goes over the elements of all windows in strips: for one row of windows, one element of the
/// kernel. `f` is given the windows that have it outside the padding, and where the first of them
/// has it in the plane; each next window has it a horizontal stride further.
#[inline(always)]
fn for_each_strip((h, w): (usize, usize), window: Window, mut f: impl FnMut(Range<usize>, usize)) {
    let (oh, ow) = window.out_size((h, w));
    for oy in 0..oh {
        let top = oy * window.stride.0;
        let rows =
            top.saturating_sub(window.padding.0)..h.min(top + window.kernel.0 - window.padding.0);
        for row in rows {
            for kx in 0..window.kernel.1 {
                let from = window.padding.1.saturating_sub(kx).div_ceil(window.stride.1);
                let to = (w + window.padding.1).saturating_sub(kx).div_ceil(window.stride.1);
                if from < to.min(ow) {
                    let column = from * window.stride.1 + kx - window.padding.1;
                    f(oy * ow + from..oy * ow + to.min(ow), row * w + column);
                }
            }
        }
    }
}

#[inline(always)]
fn max_plane<A: Real>(
    x: &[A],
    size: (usize, usize),
    window: Window,
    y: &mut [A],
    index: &mut [u32],
) {
    let (_, ow) = window.out_size(size);
    let first = |o: usize, stride: usize, padding: usize| (o * stride).saturating_sub(padding);
    for (i, (y, index)) in y.iter_mut().zip(&mut *index).enumerate() {
        let row = first(i / ow, window.stride.0, window.padding.0);
        let column = first(i % ow, window.stride.1, window.padding.1);
        *index = (row * size.1 + column) as u32;
        *y = A::neg_infinity();
    }
    for_each_strip(size, window, |windows, first| {
        let x = x[first..].iter().step_by(window.stride.1);
        let best = y[windows.clone()].iter_mut().zip(&mut index[windows]);
        for (i, ((y, index), &x)) in best.zip(x).enumerate() {
            let wins = x > *y || x.is_nan();
            *y = if wins { x } else { *y };
            *index = if wins { (first + i * window.stride.1) as u32 } else { *index };
        }
    });
}
