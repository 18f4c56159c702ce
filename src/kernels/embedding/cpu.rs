//! Embedding lookup and its gradient on the CPU.
//!
//! The gradient adds the rows of `grad` to the rows of the table that they were read from. Threads that took rows of `grad`
//! would write the same rows. So the ids are first sorted by row with a counting sort. Then each thread takes some rows of
//! the table and adds what belongs to them, in the order of the batch. That needs no locks, and gives the same sum on any
//! number of threads.

use candle_core::{DType, Result, Tensor};
use num_traits::Zero;

use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::{GRAIN, for_each_chunk, with_output};
use crate::kernels::cpu::uninit::{uninit_vec, zeroed};
use crate::kernels::elementwise::cpu::with_slice;

/// Rows added up in the arithmetic type before their sum moves on to `f64`.
const PANEL: usize = 64;

pub(super) fn gather(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    fn typed<T: Lane>(ids: &[u32], table: &Tensor) -> Result<Tensor> {
        let (data, (_, d)) = (Elements::<T>::of(table)?, table.dims2()?);
        let per_task = GRAIN.div_ceil(d.max(1));
        let y = uninit_vec(ids.len() * d, |y| {
            parallel::for_each_chunk(y, (per_task * d).max(1), |task, y| {
                for (y, &id) in y.chunks_exact_mut(d).zip(&ids[task * per_task..]) {
                    y.write_copy_of_slice(&data[id as usize * d..][..d]);
                }
            });
        });
        Ok(tensor(y, &[ids.len(), d]))
    }
    let _held = hold([ids, table]);
    with_slice(ids, |ids: &[u32]| with_element!(table.dtype(), T => typed::<T>(ids, table)))
}

pub(super) fn scatter_add(ids: &Tensor, grad: &Tensor, rows: usize, out: DType) -> Result<Tensor> {
    fn typed<T: Lane, O: Lane<Acc = T::Acc>>(
        ids: &[u32],
        grad: &Tensor,
        rows: usize,
    ) -> Result<Tensor> {
        let (data, (_, d)) = (Elements::<T>::of(grad)?, grad.dims2()?);
        let (starts, places) = by_row(ids, rows);
        let per_task = GRAIN.div_ceil(d.max(1));
        let sums = uninit_vec(rows * d, |sums| {
            for_each_chunk::<T::Acc, _>(
                sums,
                (per_task * d).max(1),
                #[inline(always)]
                |task, sums| {
                    let sums = zeroed(sums);
                    let first = task * per_task;
                    let last = rows.min(first + per_task);
                    if starts[first] == starts[last] {
                        return; // None of these rows is named.
                    }
                    let (mut panel, mut total) = (vec![T::Acc::zero(); d], vec![0.0; d]);
                    for (row, sums) in (first..last).zip(sums.chunks_exact_mut(d)) {
                        let places = &places[starts[row]..starts[row + 1]];
                        total.fill(0.0);
                        for places in places.chunks(PANEL) {
                            panel.fill(T::Acc::zero());
                            for &place in places {
                                let grad = &data[place as usize * d..][..d];
                                for (sum, grad) in panel.iter_mut().zip(grad) {
                                    *sum += grad.widened();
                                }
                            }
                            for (total, sum) in total.iter_mut().zip(&panel) {
                                *total += sum.to_double();
                            }
                        }
                        if !places.is_empty() {
                            for (sum, total) in sums.iter_mut().zip(&total) {
                                *sum = O::narrowed(T::Acc::of(*total));
                            }
                        }
                    }
                },
            );
        });
        Ok(tensor(sums, &[rows, d]))
    }
    let _held = hold([ids, grad]);
    with_slice(
        ids,
        |ids: &[u32]| with_element!(grad.dtype(), T => with_output!(T, out, O => typed::<T, O>(ids, grad, rows))),
    )
}

/// The places of each row's number, in order: where those of each row start, and all of them.
fn by_row(ids: &[u32], rows: usize) -> (Vec<usize>, Vec<u32>) {
    let mut starts = vec![0; rows + 1];
    for &id in ids {
        starts[id as usize + 1] += 1;
    }
    for row in 0..rows {
        starts[row + 1] += starts[row];
    }
    let (mut next, mut places) = (starts.clone(), vec![0; ids.len()]);
    for (place, &id) in ids.iter().enumerate() {
        places[next[id as usize]] = place as u32;
        next[id as usize] += 1;
    }
    (starts, places)
}
