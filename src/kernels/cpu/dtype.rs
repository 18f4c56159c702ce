//! The four number formats, and how a CPU kernel reads and writes them.
//!
//! A kernel is written once, over the arithmetic type. 16-bit formats are storage. They are widened
//! to `f32` on the way in and rounded once, to nearest even, on the way out.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::rc::Rc;

use candle_core::{CpuStorage, DType, Result, Storage, Tensor, WithDType};
use half::slice::HalfFloatSliceExt;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

use super::convert::{bf16_to_f32, f32_to_bf16};
use super::guard::{Guard, guard};
use crate::error::bail;

/// A type the arithmetic of a kernel runs in: `f32`, or `f64` for `f64` tensors.
pub(crate) trait Real: Element<Acc = Self> + num_traits::Float + std::iter::Sum {
    /// `value`, rounded.
    fn of(value: f64) -> Self;
    /// The same value as `f64`.
    fn to_double(self) -> f64;
}

impl Real for f32 {
    fn of(value: f64) -> Self {
        value as f32
    }
    fn to_double(self) -> f64 {
        self.into()
    }
}

impl Real for f64 {
    fn of(value: f64) -> Self {
        value
    }
    fn to_double(self) -> f64 {
        self
    }
}

/// A type tensors are stored in.
pub(crate) trait Element: WithDType + Default {
    /// What its arithmetic runs in.
    type Acc: Real;

    /// Writes `src`, exactly, to `dst` of the same length.
    fn widen(src: &[Self], dst: &mut [Self::Acc]);
    /// Writes `src`, rounded once to nearest even, to `dst` of the same length.
    fn narrow(src: &[Self::Acc], dst: &mut [Self]);
    /// The elements themselves, where they are of the arithmetic's type.
    fn as_wide(data: &[Self]) -> Option<&[Self::Acc]>;
    fn as_wide_mut(data: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<Self::Acc>]>;
    /// `len` zeros, in memory the system hands out zeroed: nothing is written.
    fn zeros(len: usize) -> Vec<Self>;
    /// The elements of a storage of this dtype.
    fn slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]>;
}

macro_rules! element {
    ($ty:ty, $acc:ty, $variant:ident, $own:expr, $widen:expr, $narrow:expr, $zeros:expr) => {
        impl Element for $ty {
            type Acc = $acc;

            #[inline(always)]
            fn widen(src: &[Self], dst: &mut [$acc]) {
                assert_eq!(src.len(), dst.len());
                $widen(src, dst)
            }
            #[inline(always)]
            fn narrow(src: &[$acc], dst: &mut [Self]) {
                assert_eq!(src.len(), dst.len());
                $narrow(src, dst)
            }
            fn as_wide(data: &[Self]) -> Option<&[$acc]> {
                $own(data)
            }
            fn as_wide_mut(data: &mut [MaybeUninit<Self>]) -> Option<&mut [MaybeUninit<$acc>]> {
                $own(data)
            }
            fn zeros(len: usize) -> Vec<Self> {
                $zeros(len)
            }
            fn slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(data) => Ok(data),
                    other => bail!("expected {:?} elements, found {:?}", Self::DTYPE, dtype(other)),
                }
            }
        }
    };
}

fn dtype(storage: &CpuStorage) -> DType {
    candle_core::backend::BackendStorage::dtype(storage)
}

fn copy<T: Copy>(src: &[T], dst: &mut [T]) {
    dst.copy_from_slice(src)
}

element!(f32, f32, F32, Some, copy, copy, |len| vec![0.0; len]);
element!(f64, f64, F64, Some, copy, copy, |len| vec![0.0; len]);
element!(
    f16,
    f32,
    F16,
    |_| None,
    |src: &[f16], dst: &mut [f32]| src.convert_to_f32_slice(dst),
    |src: &[f32], dst: &mut [f16]| dst.convert_from_f32_slice(src),
    // A vector of a struct would be written, one of integers is not.
    |len| vec![0u16; len].reinterpret_into()
);
element!(
    bf16,
    f32,
    BF16,
    |_| None,
    |src: &[bf16], dst: &mut [f32]| {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = bf16_to_f32(*s);
        }
    },
    |src: &[f32], dst: &mut [bf16]| {
        for (d, s) in dst.iter_mut().zip(src) {
            *d = f32_to_bf16(*s);
        }
    },
    |len| vec![0u16; len].reinterpret_into()
);

/// Read access to the elements of a contiguous CPU tensor.
///
/// Several of one storage share a guard. A kernel that reads several tensors [holds](super::guard::hold) them
/// first.
pub(crate) struct Elements<'a, T> {
    data: NonNull<[T]>,
    _guard: Rc<Guard>,
    _tensor: PhantomData<&'a Tensor>,
}

// SAFETY: through a reference, another thread gets the slice alone, of `Sync` elements. It does not reach the
// guard, whose count is not atomic, and which is dropped where it was made: this is not `Send`.
unsafe impl<T: Sync> Sync for Elements<'_, T> {}

impl<'a, T: Element> Elements<'a, T> {
    /// Borrows the elements of `tensor`, which is on the CPU, contiguous and of dtype `T`.
    pub(crate) fn of(tensor: &'a Tensor) -> Result<Self> {
        let guard = guard(tensor);
        let data = NonNull::from(contiguous::<T>(guard.storage(), tensor)?);
        Ok(Self { data, _guard: guard, _tensor: PhantomData })
    }

    /// Borrows the storage of `tensor`, which is on the CPU and of dtype `T`, from its first element on: its strides
    /// count from there.
    pub(crate) fn strided(tensor: &'a Tensor) -> Result<Self> {
        let guard = guard(tensor);
        let Storage::Cpu(cpu) = guard.storage() else {
            bail!("a CPU kernel was given a tensor on {:?}", tensor.device().location())
        };
        let all = T::cpu_storage_as_slice(cpu)?;
        let data = NonNull::from(&all[tensor.layout().start_offset()..]);
        Ok(Self { data, _guard: guard, _tensor: PhantomData })
    }
}

impl<T: Element> std::ops::Deref for Elements<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: a slice of the storage, which the guard keeps alive and from being written.
        unsafe { self.data.as_ref() }
    }
}

/// The elements in `storage` of `tensor`, which is on the CPU, contiguous and of dtype `T`.
pub(in crate::kernels) fn contiguous<'s, T: WithDType>(
    storage: &'s Storage,
    tensor: &Tensor,
) -> Result<&'s [T]> {
    let Some((start, end)) = tensor.layout().contiguous_offsets() else {
        bail!("a kernel was given a strided tensor, {:?}", tensor.layout())
    };
    // A part of nothing may start beyond the end of its storage.
    let range = if start == end { 0..0 } else { start..end };
    match storage {
        Storage::Cpu(cpu) => Ok(&T::cpu_storage_as_slice(cpu)?[range]),
        _ => bail!("a CPU kernel was given a tensor on {:?}", tensor.device().location()),
    }
}

/// A contiguous CPU tensor that owns `data`.
pub(crate) fn tensor<T: Element>(data: Vec<T>, shape: &[usize]) -> Tensor {
    debug_assert_eq!(data.len(), shape.iter().product::<usize>());
    let storage = Storage::Cpu(T::to_cpu_storage_owned(data));
    Tensor::from_storage(storage, shape, candle_core::op::BackpropOp::none(), false)
}

/// Runs `$body` with `$T` bound to the Rust type of the floating-point `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            other => {
                crate::error::bail!("expected a tensor of F16, BF16, F32 or F64, got {other:?}")
            }
        }
    };
}
pub(crate) use with_element;

/// Whether kernels of operands in `operand` write `out` themselves: it is the same, or F32. Other pairs are rare, and not
/// worth a compiled kernel each.
pub(in crate::kernels) const fn is_near(operand: DType, out: DType) -> bool {
    matches!(
        (operand, out),
        (_, DType::F32) | (DType::BF16, DType::BF16) | (DType::F16, DType::F16)
    )
}

/// Runs `$body` with `$T` bound to the Rust type of `$dtype`, of those with F32 arithmetic.
macro_rules! with_single {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            other => crate::error::bail!("expected a tensor of F16, BF16 or F32, got {other:?}"),
        }
    };
}
pub(crate) use with_single;

/// [`with_single`], of dtypes that [are near](is_near) to the dtype of `$O`.
macro_rules! with_near {
    ($dtype:expr, $O:ident, $T:ident => $body:expr) => {
        $crate::kernels::cpu::dtype::with_single!($dtype, $T => {
            const DTYPE: candle_core::DType = <$T as candle_core::WithDType>::DTYPE;
            if const { $crate::kernels::cpu::dtype::is_near(DTYPE, <$O>::DTYPE) } {
                $body
            } else {
                crate::error::bail!("{:?} of {DTYPE:?} is not written by this kernel", <$O>::DTYPE)
            }
        })
    };
}
pub(in crate::kernels) use with_near;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_widening_and_narrowing() {
        let bits: Vec<u16> = (0..=u16::MAX).collect();
        let f16s: Vec<f16> = bits.iter().map(|&b| f16::from_bits(b)).collect();
        let bf16s: Vec<bf16> = bits.iter().map(|&b| bf16::from_bits(b)).collect();
        let mut wide = vec![0f32; bits.len()];
        let mut f16_back = vec![f16::ZERO; bits.len()];
        let mut bf16_back = vec![bf16::ZERO; bits.len()];
        f16::widen(&f16s, &mut wide);
        f16::narrow(&wide, &mut f16_back);
        bf16::widen(&bf16s, &mut wide);
        bf16::narrow(&wide, &mut bf16_back);
        for i in 0..bits.len() {
            assert!(
                f16s[i].is_nan() && f16_back[i].is_nan()
                    || f16s[i].to_bits() == f16_back[i].to_bits()
            );
            assert!(
                bf16s[i].is_nan() && bf16_back[i].is_nan()
                    || bf16s[i].to_bits() == bf16_back[i].to_bits()
            );
        }
    }
}
