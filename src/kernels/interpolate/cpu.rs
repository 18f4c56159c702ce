//! NCHW interpolation on the CPU, a plane (one channel of one image) at a time.
//!
//! Where each output row and column reads, and with which weights, is computed once for all planes. A plane is widened
//! into scratch that stays in the cache. Backward scatters: each output gradient is added to the one or four inputs
//! that it was made of. One thread has a whole plane, so it needs no locks and has one order of additions.

use candle_core::{DType, Result, Tensor};
use num_traits::Zero;

use super::sampling_grid::{Between, Dims4, SamplingGrid};
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::with_output;
use crate::kernels::pool::cpu::planes;

pub(super) fn forward(x: &Tensor, grid: &SamplingGrid) -> Result<Tensor> {
    fn typed<T: Lane>(x: &Tensor, grid: &SamplingGrid) -> Result<Tensor> {
        let (n, c, h, w) = x.dims4()?;
        let (oh, ow) = grid.size();
        let data: &[T] = &Elements::of(x)?;
        let weights = Weights::of(grid);
        let (down_kept, across_kept) = (h == oh, w == ow);
        let y = planes(
            &mut [(); 0],
            n * c,
            (h * w, oh * ow),
            #[inline(always)]
            |plane, _, wide, out| {
                T::widen(&data[plane * h * w..][..h * w], wide);
                match grid {
                    SamplingGrid::Nearest { rows, columns, .. } => {
                        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(ow)) {
                            let row = &wide[row * w..][..w];
                            for (out, &column) in out.iter_mut().zip(columns) {
                                *out = row[column];
                            }
                        }
                    }
                    SamplingGrid::Linear { rows, columns, .. } => {
                        let rows = rows.iter().zip(&weights.rows);
                        for ((row, down), out) in rows.zip(out.chunks_exact_mut(ow)) {
                            let (top, bottom) = (&wide[row.low * w..], &wide[row.high * w..]);
                            let columns = columns.iter().zip(&weights.columns);
                            for (out, (column, across)) in out.iter_mut().zip(columns) {
                                let mix = |row: &[T::Acc]| {
                                    across.mix(row[column.low], row[column.high], across_kept)
                                };
                                *out = down.mix(mix(top), mix(bottom), down_kept);
                            }
                        }
                    }
                }
            },
        );
        Ok(tensor::<T>(y, &[n, c, oh, ow]))
    }
    with_element!(x.dtype(), T => typed::<T>(x, grid))
}

pub(super) fn backward(
    grad: &Tensor,
    dims: Dims4,
    grid: &SamplingGrid,
    out: DType,
) -> Result<Tensor> {
    fn typed<G: Lane, O: Lane<Acc = G::Acc>>(
        grad: &Tensor,
        (n, c, h, w): Dims4,
        grid: &SamplingGrid,
    ) -> Result<Tensor> {
        let (oh, ow) = grid.size();
        let grad: &[G] = &Elements::of(grad)?;
        let weights = Weights::of(grid);
        let (down_kept, across_kept) = (h == oh, w == ow);
        let dx = planes(
            &mut [(); 0],
            n * c,
            (oh * ow, h * w),
            #[inline(always)]
            |plane, _, wide, out| {
                G::widen(&grad[plane * oh * ow..][..oh * ow], wide);
                out.fill(G::Acc::zero());
                match grid {
                    SamplingGrid::Nearest { rows, columns, .. } => {
                        for (&row, grad) in rows.iter().zip(wide.chunks_exact(ow)) {
                            let row = &mut out[row * w..][..w];
                            for (&grad, &column) in grad.iter().zip(columns) {
                                row[column] += grad;
                            }
                        }
                    }
                    SamplingGrid::Linear { rows, columns, .. } => {
                        let rows = rows.iter().zip(&weights.rows);
                        for ((row, down), grad) in rows.zip(wide.chunks_exact(ow)) {
                            let sides = [(row.low, down.low), (row.high, down.high)];
                            for (row, down) in &sides[..if down_kept { 1 } else { 2 }] {
                                let row = &mut out[row * w..][..w];
                                let columns = columns.iter().zip(&weights.columns);
                                for (&grad, (column, across)) in grad.iter().zip(columns) {
                                    row[column.low] += grad * *down * across.low;
                                    if !across_kept {
                                        row[column.high] += grad * *down * across.high;
                                    }
                                }
                            }
                        }
                    }
                }
            },
        );
        Ok(tensor::<O>(dx, &[n, c, h, w]))
    }
    with_element!(grad.dtype(), G => with_output!(G, out, O => typed::<G, O>(grad, dims, grid)))
}

/// What the two neighbours of a place count, in the type of the arithmetic.
#[derive(Clone, Copy)]
struct Weight<A> {
    low: A,
    high: A,
}

impl<A: Real> Weight<A> {
    /// The average of two neighbours; the first, where an axis is `kept`: not even an infinity times 0 is added to it.
    #[inline(always)]
    fn mix(self, low: A, high: A, kept: bool) -> A {
        if kept { low } else { low * self.low + high * self.high }
    }
}

/// Those of every row and column; none where the grid has none.
struct Weights<A> {
    rows: Vec<Weight<A>>,
    columns: Vec<Weight<A>>,
}

impl<A: Real> Weights<A> {
    fn of(grid: &SamplingGrid) -> Self {
        let weights = |places: &[Between]| {
            let weight = |b: &Between| Weight { low: A::of(1.0 - b.weight), high: A::of(b.weight) };
            places.iter().map(weight).collect()
        };
        match grid {
            SamplingGrid::Nearest { .. } => Self { rows: Vec::new(), columns: Vec::new() },
            SamplingGrid::Linear { rows, columns, .. } => {
                Self { rows: weights(rows), columns: weights(columns) }
            }
        }
    }
}
