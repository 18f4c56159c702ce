//! Reading `(b, h, n, d)` through strides, a head's rows at a time.
//!
//! Queries, keys and values are mostly views, of `(b, n, h, d)` or of all three in one tensor: what
//! is widened on the way needs no contiguous copy first.

use std::marker::PhantomData;
use std::ops::Range;
use std::rc::Rc;

use candle_core::{Layout, Result, Storage, Tensor, WithDType};

use crate::error::bail;
use crate::kernels::cpu::guard::{Guard, guard};
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::vectorise_in;

/// A CPU tensor of rank 4, of any strides.
pub(in crate::kernels) struct View<'a> {
    guard: Rc<Guard>,
    start: usize,
    strides: [usize; 4],
    _tensor: PhantomData<&'a Tensor>,
}

impl<'a> View<'a> {
    pub(in crate::kernels) fn of(tensor: &'a Tensor) -> Result<Self> {
        fn strides(layout: &Layout) -> Result<[usize; 4]> {
            match *layout.stride() {
                [a, b, c, d] => Ok([a, b, c, d]),
                ref other => bail!("a kernel over heads was given a tensor of strides {other:?}"),
            }
        }
        let layout = tensor.layout();
        let (start, strides) = (layout.start_offset(), strides(layout)?);
        Ok(Self { guard: guard(tensor), start, strides, _tensor: PhantomData })
    }

    pub(in crate::kernels) fn heads<T: WithDType>(&self) -> Result<Heads<'_, T>> {
        match self.guard.storage() {
            Storage::Cpu(cpu) => {
                // A part of nothing may start beyond the end of its storage.
                let data = T::cpu_storage_as_slice(cpu)?.get(self.start..).unwrap_or_default();
                Ok(Heads { data, strides: self.strides })
            }
            _ => bail!("a CPU kernel was given a tensor on another device"),
        }
    }
}

/// The elements of a [`View`].
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Heads<'a, T> {
    data: &'a [T],
    strides: [usize; 4],
}

impl<'a, T: Copy> Heads<'a, T> {
    /// A row's elements, from its first to the end of the data, and the stride between them.
    #[inline(always)]
    pub(in crate::kernels) fn row(
        &self,
        batch: usize,
        head: usize,
        row: usize,
    ) -> (&'a [T], usize) {
        let [b, h, n, d] = self.strides;
        (&self.data[batch * b + head * h + row * n..], d)
    }

    /// Writes some rows of a head, widened, one after the other; each has `width` elements.
    pub(in crate::kernels) fn read(
        &self,
        [batch, head]: [usize; 2],
        rows: Range<usize>,
        width: usize,
        dst: &mut [T::Acc],
    ) where
        T: Lane,
    {
        vectorise_in::<T::Acc>(
            #[inline(always)]
            || {
                for (row, dst) in rows.clone().zip(dst.chunks_exact_mut(width.max(1))) {
                    match self.row(batch, head, row) {
                        (src, 1) => {
                            for (d, s) in dst.iter_mut().zip(src) {
                                *d = s.widened();
                            }
                        }
                        (src, stride) => {
                            for (i, d) in dst.iter_mut().enumerate() {
                                *d = src[i * stride].widened();
                            }
                        }
                    }
                }
            },
        );
    }
}
