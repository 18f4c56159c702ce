//! Between dtypes: a new tensor, or into one that exists.

use candle_core::{DType, Result, Tensor};
use rayon::prelude::*;

use super::element::{Element, Elements, Real, tensor, with_element};
use super::elementwise::blocks::vectorise;
use super::in_place;

/// Elements converted at a time, through a buffer of the arithmetic type that stays in L1.
const BLOCK: usize = 1024;
/// Elements a task.
const TASK: usize = 1 << 16;

/// `x`, detached and contiguous, in the floating-point `dtype`; rounded once to nearest even.
///
/// Overflow gives an infinity, NaN stays NaN.
pub(crate) fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let x = x.detach();
    if !x.device().is_cpu() || !x.dtype().is_float() {
        return x.to_dtype(dtype);
    }
    let x = x.contiguous()?;
    with_element!(x.dtype(), S => with_element!(dtype, D => {
        let src = Elements::<S>::of(&x)?;
        let mut dst = vec![D::default(); src.len()];
        convert(&src, &mut dst);
        Ok(tensor(dst, x.dims()))
    }))
}

/// Overwrites `dst` with `src` in `dst`'s dtype. Same shape, no shared storage.
pub(crate) fn cast_into(dst: &Tensor, src: &Tensor) -> Result<()> {
    let src = src.detach().contiguous()?;
    if !dst.device().is_cpu() {
        // Flat, because `slice_set` wants a dimension to slice.
        let src = src.to_dtype(dst.dtype())?.flatten_all()?;
        return dst.detach().flatten_all()?.slice_set(&src, 0, 0);
    }
    with_element!(src.dtype(), S => with_element!(dst.dtype(), D => {
        let src = Elements::<S>::of(&src)?;
        in_place::write::<D>(dst, |dst| convert(&src, dst))
    }))
}

/// Converts through `f32`, or through `f64` where both sides are `f64` or one is and must not lose.
fn convert<S: Element, D: Element>(src: &[S], dst: &mut [D]) {
    dst.par_chunks_mut(TASK).zip(src.par_chunks(TASK)).for_each(|(dst, src)| {
        vectorise(
            #[inline(always)]
            || {
                let mut wide = [S::Acc::default(); BLOCK];
                let mut narrow = [D::Acc::default(); BLOCK];
                for (dst, src) in dst.chunks_mut(BLOCK).zip(src.chunks(BLOCK)) {
                    let (wide, narrow) = (&mut wide[..src.len()], &mut narrow[..src.len()]);
                    S::widen(src, wide);
                    for (n, w) in narrow.iter_mut().zip(&*wide) {
                        // From f64 to a half this rounds twice, as `half` does on x86.
                        *n = D::Acc::of(w.to_double());
                    }
                    D::narrow(narrow, dst);
                }
            },
        )
    });
}
