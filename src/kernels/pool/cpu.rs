use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor};
use num_traits::Zero;
use pulp::Arch;
use rayon::prelude::*;

use super::Window;
use crate::kernels::element::{Element, Elements, Real, tensor, with_element};
use crate::kernels::elementwise::blocks::{GRAIN, narrow};
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
    fn typed<G: Element, O: Element>(
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
        with_element!(grad.dtype(), G => with_element!(out, O => {
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
            for_each_window((h, w), window, |i, rows, columns| {
                let mut sum = T::Acc::zero();
                for row in rows {
                    for &x in &wide[row * w..][columns.clone()] {
                        sum += x;
                    }
                }
                out[i] = sum / area;
            });
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
    fn typed<G: Element, O: Element>(
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
            for_each_window((h, w), window, |i, rows, columns| {
                for row in rows {
                    for x in &mut out[row * w..][columns.clone()] {
                        *x += wide[i] / area;
                    }
                }
            });
        });
        Ok(tensor::<O>(dx, &[n, c, h, w]))
    }
    with_element!(grad.dtype(), G => with_element!(out, O => typed::<G, O>(grad, dims, window)))
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
    fn typed<G: Element, O: Element>(grad: &Tensor, (n, c, h, w): Dims) -> Result<Tensor> {
        let mut share = vec![G::Acc::zero(); n * c];
        G::widen(&Elements::<G>::of(grad)?, &mut share);
        let area = G::Acc::of((h * w) as f64);
        for share in &mut share {
            *share = *share / area;
        }
        let dx = Channels::rows(n * c, h * w).map::<G, O, 0, 1>(
            [],
            [&share],
            #[inline(always)]
            |[], [share]| share,
        );
        Ok(tensor(dx, &[n, c, h, w]))
    }
    with_element!(grad.dtype(), G => with_element!(out, O => typed::<G, O>(grad, (n, c, h, w))))
}

/// The result, plane by plane: `f` is given a plane's number, its part of `side`, and buffers of
/// the lengths `(input, output)` of one plane, and leaves the plane's result in the second buffer.
fn planes<A: Real, O: Element, S: Send>(
    side: &mut [S],
    count: usize,
    (input, output): (usize, usize),
    f: impl Fn(usize, &mut [S], &mut [A], &mut [A]) + Sync,
) -> Vec<O> {
    let mut result = vec![O::default(); count * output];
    let buffers = || (vec![A::zero(); input], vec![A::zero(); output]);
    let plane = |(wide, out): &mut (Vec<A>, Vec<A>), number, result: &mut [O], side: &mut [S]| {
        Arch::new().dispatch(
            #[inline(always)]
            || {
                f(number, side, wide, out);
                narrow(out, result);
            },
        );
    };
    let per_task = GRAIN.div_ceil(input.max(output).max(1));
    let chunks = result.par_chunks_mut(output.max(1)).with_min_len(per_task).enumerate();
    if side.is_empty() {
        chunks.for_each_init(buffers, |buffers, (number, result)| {
            plane(buffers, number, result, &mut []);
        });
    } else {
        let chunks = chunks.zip(side.par_chunks_mut(output.max(1)));
        chunks.for_each_init(buffers, |buffers, ((number, result), side)| {
            plane(buffers, number, result, side);
        });
    }
    result
}

/// Calls `f` with the number of every window and its rows and columns, padding cut off.
#[inline(always)]
fn for_each_window(
    (h, w): (usize, usize),
    window: Window,
    mut f: impl FnMut(usize, Range<usize>, Range<usize>),
) {
    let (oh, ow) = window.out_size((h, w));
    let range = |o: usize, stride: usize, kernel: usize, padding: usize, size: usize| {
        let start = o * stride;
        start.saturating_sub(padding)..size.min(start + kernel - padding)
    };
    for oy in 0..oh {
        let rows = range(oy, window.stride.0, window.kernel.0, window.padding.0, h);
        for ox in 0..ow {
            let columns = range(ox, window.stride.1, window.kernel.1, window.padding.1, w);
            f(oy * ow + ox, rows.clone(), columns);
        }
    }
}

#[inline(always)]
fn max_plane<A: Real>(
    x: &[A],
    (h, w): (usize, usize),
    window: Window,
    y: &mut [A],
    index: &mut [u32],
) {
    for_each_window((h, w), window, |i, rows, columns| {
        let mut at = rows.start * w + columns.start;
        let mut best = x[at];
        for row in rows {
            for column in columns.clone() {
                let value = x[row * w + column];
                if value > best || value.is_nan() {
                    (best, at) = (value, row * w + column);
                }
            }
        }
        (y[i], index[i]) = (best, at as u32);
    });
}
