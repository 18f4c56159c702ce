//! Tensors of any storage format, read in the format of the arithmetic.

use std::cell::RefCell;
use std::ops::Range;

use candle_core::{DType, Result, Tensor, WithDType};
use half::{bf16, f16};

use crate::error::bail;
use crate::kernels::cpu::dtype::{Element, Elements, Real};
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::vectorise;

/// The elements of a contiguous CPU tensor, as `A`.
pub(in crate::kernels) trait ElementsAs<A>: Sync {
    /// All elements, where they are stored as `A`.
    fn borrowed(&self) -> Option<&[A]>;
    /// Writes the elements from `start` on to `dst`, exactly.
    fn widen(&self, start: usize, dst: &mut [A]);
}

impl<'a, A: Arithmetic> dyn ElementsAs<A> + 'a {
    /// The elements of `range`: borrowed, or else widened into `scratch`, of the same length.
    pub(in crate::kernels) fn read<'s>(
        &'s self,
        range: Range<usize>,
        scratch: &'s mut [A],
    ) -> &'s [A] {
        match self.borrowed() {
            Some(data) => &data[range],
            None => {
                self.widen(range.start, scratch);
                scratch
            }
        }
    }

    /// All elements, like [`Self::read`], by all threads.
    pub(in crate::kernels) fn read_all<'s>(&'s self, scratch: &'s mut [A]) -> &'s [A] {
        match self.borrowed() {
            Some(data) => data,
            None => {
                parallel::for_each_chunk(scratch, BLOCK, |index, chunk| {
                    self.widen(index * BLOCK, chunk);
                });
                scratch
            }
        }
    }
}

/// Elements a thread widens or narrows at a time: some tens of microseconds.
pub(in crate::kernels) const BLOCK: usize = 1 << 16;

/// Writes `src`, rounded once, to `dst` of the same length, vectorised.
pub(in crate::kernels) fn narrow<O: Element>(src: &[O::Acc], dst: &mut [O]) {
    vectorise(
        #[inline(always)]
        || O::narrow(src, dst),
    );
}

macro_rules! stored_narrow {
    ($ty:ty) => {
        impl ElementsAs<f32> for Elements<'_, $ty> {
            fn borrowed(&self) -> Option<&[f32]> {
                None
            }
            fn widen(&self, start: usize, dst: &mut [f32]) {
                let src = &self[start..start + dst.len()];
                vectorise(
                    #[inline(always)]
                    || <$ty>::widen(src, dst),
                );
            }
        }
    };
}
stored_narrow!(f16);
stored_narrow!(bf16);

impl<A: Real> ElementsAs<A> for Elements<'_, A> {
    fn borrowed(&self) -> Option<&[A]> {
        Some(self)
    }
    fn widen(&self, start: usize, dst: &mut [A]) {
        dst.copy_from_slice(&self[start..start + dst.len()]);
    }
}

/// An arithmetic type with its storage formats and its scratch memory.
pub(in crate::kernels) trait Arithmetic: Real {
    /// Opens a contiguous CPU tensor: F16, BF16 or F32 for `f32`, F64 for `f64`.
    fn open(tensor: &Tensor) -> Result<Box<dyn ElementsAs<Self> + '_>>;

    /// Calls `f` with `len` elements of unspecified value, from memory the thread keeps: fresh
    /// memory costs page faults, which can take longer than the arithmetic.
    fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [Self]) -> R) -> R;

    /// These elements, if this is F32.
    fn singles(data: &[Self]) -> Option<&[f32]>;
}

/// The largest scratch, in elements, a thread keeps.
const KEPT: usize = 1 << 24;

macro_rules! arithmetic {
    ($ty:ty, |$data:ident| $singles:expr, $($dtype:ident: $stored:ty),*) => {
        impl Arithmetic for $ty {
            fn singles($data: &[Self]) -> Option<&[f32]> {
                $singles
            }

            fn open(tensor: &Tensor) -> Result<Box<dyn ElementsAs<Self> + '_>> {
                Ok(match tensor.dtype() {
                    $(DType::$dtype => Box::new(Elements::<$stored>::of(tensor)?),)*
                    other => bail!("{other:?} elements are not read as {:?}", Self::DTYPE),
                })
            }

            fn with_scratch<R>(len: usize, f: impl FnOnce(&mut [Self]) -> R) -> R {
                // A stack of buffers, as calls nest: `f` may come here again.
                thread_local!(static KEEP: RefCell<Vec<Vec<$ty>>> = const {
                    RefCell::new(Vec::new())
                });
                // Without `f` in their types, these are compiled once.
                fn take(len: usize) -> Vec<$ty> {
                    let buffer = KEEP.with_borrow_mut(Vec::pop).unwrap_or_default();
                    if buffer.len() < len { vec![0.; len] } else { buffer }
                }
                fn give_back(buffer: Vec<$ty>) {
                    if buffer.len() <= KEPT {
                        KEEP.with_borrow_mut(|kept| kept.push(buffer));
                    }
                }
                let mut buffer = take(len);
                let result = f(&mut buffer[..len]);
                give_back(buffer);
                result
            }
        }
    };
}
arithmetic!(f32, |data| Some(data), F16: f16, BF16: bf16, F32: f32);
arithmetic!(f64, |_data| None, F64: f64);

/// What a product of these tensors is computed in: F64 where one of them is F64, else F32.
pub(in crate::kernels) fn arithmetic<const N: usize>(operands: [Option<&Tensor>; N]) -> DType {
    let double = operands.iter().flatten().any(|operand| operand.dtype() == DType::F64);
    if double { DType::F64 } else { DType::F32 }
}
