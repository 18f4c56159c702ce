//! Between dtypes: a new tensor, or into one that exists.

mod cuda;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use super::contiguous;
use super::cuda::Gpu;
use crate::error::bail;
use crate::kernels::cpu::dtype::{Elements, Real, tensor, with_element};
use crate::kernels::cpu::in_place::{self, Access};
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::simd::{GRAIN, for_each_chunk, generate};

/// What arithmetic on tensors of `dtype` runs in, and what masters and states of such variables are: F64 for F64, else
/// F32.
pub(crate) fn accumulator(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// `x`, detached and contiguous, in the floating-point `dtype`; rounded to nearest even, once, but from F64 to 16 bits
/// twice, through F32.
///
/// Overflow gives an infinity, NaN stays NaN.
pub(crate) fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let x = x.detach();
    if let Some(gpu) = Gpu::of(x.device()).filter(|_| x.dtype().is_float()) {
        return cuda::cast(gpu, &x, dtype);
    }
    if !x.device().is_cpu() || !x.dtype().is_float() {
        return x.to_dtype(dtype);
    }
    let dense = contiguous(&x)?;
    if !x.is_contiguous() && dense.dtype() == dtype {
        return Ok(dense);
    }
    let x = dense;
    with_element!(x.dtype(), S => with_element!(dtype, D => {
        let src = Elements::<S>::of(&x)?;
        let src: &[S] = &src;
        let dst = generate::<D>(
            src.len(),
            #[inline(always)]
            |start, dst| convert(&src[start..start + dst.len()], dst),
        );
        Ok(tensor(dst, x.dims()))
    }))
}

/// `x`, detached, in `dtype`: as it is, strides and all, where it has that.
pub(crate) fn in_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype { Ok(x.detach()) } else { cast(x, dtype) }
}

/// Overwrites `dst` with `src` in `dst`'s dtype. Same shape, no shared storage.
pub(crate) fn cast_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    if let Some(gpu) = Gpu::of(dst.device()) {
        return cuda::cast_into(gpu, dst, &src.detach());
    }
    let src = contiguous(src)?;
    if !dst.device().is_cpu() {
        // Flat, because `slice_set` wants a dimension to slice.
        let src = src.to_dtype(dst.dtype())?.flatten_all()?;
        return dst.detach().flatten_all()?.slice_set(&src, 0, 0);
    }
    with_element!(src.dtype(), S => with_element!(dst.dtype(), D => {
        let mut locked = in_place::lock_sets(&[vec![Access::Write(dst), Access::Read(&src)]])?;
        let Some([dst, src]) = locked.first_mut().map(Vec::as_mut_slice) else {
            bail!("two tensors are locked")
        };
        let (src, dst) = (src.slice::<S>()?, dst.elements_mut::<D>()?);
        for_each_chunk::<f32, _>(
            dst,
            GRAIN,
            #[inline(always)]
            |chunk, dst| convert(&src[chunk * GRAIN..][..dst.len()], dst),
        );
        Ok(())
    }))
}

/// [`cast_into`] for many pairs; on CUDA, those that are contiguous in one launch.
pub(crate) fn cast_all(pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    let together = pairs.first().and_then(|(dst, _)| Gpu::of(dst.device())).filter(|_| {
        let place = pairs[0].0.device().location();
        let mut all = pairs.iter().flat_map(|(dst, src)| [dst, src]);
        all.all(|t| t.device().location() == place && t.is_contiguous())
    });
    match together {
        Some(gpu) => cuda::cast_all(gpu, pairs),
        None => pairs.iter().try_for_each(|(dst, src)| cast_into(dst, src)),
    }
}

/// Converts through `f32`, or through `f64` where both sides are `f64` or one is and must not lose.
#[inline(always)]
fn convert<S: Lane, D: Lane>(src: &[S], dst: &mut [D]) {
    for (dst, src) in dst.iter_mut().zip(src) {
        // Of two `f32`, the way there and back is nothing. From `f64` to a 16-bit number this rounds twice, as the
        // `half` crate does on x86.
        *dst = D::narrowed(D::Acc::of(src.widened().to_double()));
    }
}
