//! Cumulative sums on the CPU, in one pass: each element is read once, and each sum is written once.
//!
//! Threads share the dimensions before `dim`, and no line is cut. So each sum has one order, from the line's start or
//! from its end, on any number of threads. If `dim` is the first dimension, one thread does all the work.
//!
//! Lines that lie side by side advance together: a vector has the F64 sum of each, and the loop goes along a row of
//! memory, one element of each line. A sum is rounded to F32 (not in F64) and then to the result's dtype. Nothing is
//! subtracted, so an infinity or NaN reaches only the sums after it.

use std::mem::MaybeUninit;

use candle_core::{DType, Result, Tensor};

use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::{GRAIN, with_output};
use crate::kernels::cpu::uninit::uninit_vec;
use crate::kernels::reduce::channels::Channels;

pub(super) fn cumsum(x: &Tensor, dim: usize, from_end: bool, out: DType) -> Result<Tensor> {
    fn typed<T: Lane, O: Lane<Acc = T::Acc>>(
        x: &Tensor,
        dim: usize,
        from_end: bool,
    ) -> Result<Tensor> {
        let data = Elements::<T>::of(x)?;
        let Channels { channels: count, inner, .. } = Channels::of(x.dims(), dim);
        let block = count * inner;
        let per_task = GRAIN.div_ceil(block) * block;
        let y = uninit_vec(data.len(), |y| {
            parallel::for_each_chunk(y, per_task, |task, y| {
                let x = data[task * per_task..].chunks_exact(block);
                for (x, y) in x.zip(y.chunks_exact_mut(block)) {
                    let steps = x.chunks_exact(inner).zip(y.chunks_exact_mut(inner));
                    match from_end {
                        false => running::<T, O>(steps, inner),
                        true => running::<T, O>(steps.rev(), inner),
                    }
                }
            });
        });
        Ok(tensor(y, x.dims()))
    }
    let _held = hold([x]);
    with_element!(x.dtype(), T => with_output!(T, out, O => typed::<T, O>(x, dim, from_end)))
}

/// Writes the sums up to each of `steps`, of `inner` lines side by side.
fn running<'a, T: Lane, O: Lane<Acc = T::Acc>>(
    steps: impl Iterator<Item = (&'a [T], &'a mut [MaybeUninit<O>])>,
    inner: usize,
) {
    let mut sums = vec![0.0; inner];
    for (x, y) in steps {
        for ((sum, x), y) in sums.iter_mut().zip(x).zip(y) {
            *sum += x.widened().to_double();
            y.write(O::narrowed(T::Acc::of(*sum)));
        }
    }
}
