//! Writing into a tensor that exists: the one door to candle's mutable storage.

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Result, Tensor, bail};
use half::{bf16, f16};

use crate::kernels::cpu::dtype::Element;

struct Write<F>(F);

impl<F: Fn(&mut CpuStorage, &Layout) -> Result<()>> InplaceOp1 for Write<F> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        (self.0)(storage, layout)
    }
}

/// Calls `f` with the elements of `dst`, a contiguous CPU tensor of dtype `T`.
///
/// The storage is locked meanwhile: `f` must not read it through another tensor.
pub(crate) fn write<T: Element>(dst: &Tensor, f: impl FnOnce(&mut [T])) -> Result<()> {
    with_storage(dst, |storage, start, end| {
        f(&mut T::slice_mut(storage)?[start..end]);
        Ok(())
    })
}

/// The elements of a tensor that an optimizer writes; nothing by default.
#[derive(Debug, Default)]
pub(crate) enum SliceMut<'a> {
    #[default]
    None,
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
    F32(&'a mut [f32]),
    F64(&'a mut [f64]),
    I16(&'a mut [i16]),
}

/// Calls `f` with the elements of all of `tensors`, up to `N` contiguous CPU tensors with a storage
/// each.
///
/// The storages are locked meanwhile, as in [`write`].
pub(crate) fn write_all<const N: usize>(
    tensors: &[&Tensor],
    f: &mut dyn FnMut([SliceMut<'_>; N]),
) -> Result<()> {
    fn lock<const N: usize>(
        tensors: &[&Tensor],
        at: usize,
        held: [SliceMut<'_>; N],
        f: &mut dyn FnMut([SliceMut<'_>; N]),
    ) -> Result<()> {
        let Some(tensor) = tensors.get(at) else {
            f(held);
            return Ok(());
        };
        with_storage(tensor, |storage, start, end| {
            let mut held = held;
            let Some(place) = held.get_mut(at) else { bail!("more than {N} tensors to write") };
            *place = match storage {
                CpuStorage::F16(x) => SliceMut::F16(&mut x[start..end]),
                CpuStorage::BF16(x) => SliceMut::BF16(&mut x[start..end]),
                CpuStorage::F32(x) => SliceMut::F32(&mut x[start..end]),
                CpuStorage::F64(x) => SliceMut::F64(&mut x[start..end]),
                CpuStorage::I16(x) => SliceMut::I16(&mut x[start..end]),
                _ => bail!("expected floats or I16 to write to, found {:?}", tensor.dtype()),
            };
            lock(tensors, at + 1, held, f)
        })
    }
    lock(tensors, 0, std::array::from_fn(|_| SliceMut::None), f)
}

/// Calls `f` with the storage of `dst`, and where in it `dst` starts and ends.
fn with_storage(
    dst: &Tensor,
    f: impl FnOnce(&mut CpuStorage, usize, usize) -> Result<()>,
) -> Result<()> {
    if dst.elem_count() == 0 {
        // candle takes strides of 0, which dimensions before an empty one have, for repeats.
        let mut nothing = match dst.dtype() {
            DType::F16 => CpuStorage::F16(Vec::new()),
            DType::BF16 => CpuStorage::BF16(Vec::new()),
            DType::F32 => CpuStorage::F32(Vec::new()),
            DType::F64 => CpuStorage::F64(Vec::new()),
            DType::I16 => CpuStorage::I16(Vec::new()),
            other => bail!("expected floats or I16 to write to, found {other:?}"),
        };
        return f(&mut nothing, 0, 0);
    }
    let f = std::cell::Cell::new(Some(f));
    dst.inplace_op1(&Write(|storage: &mut CpuStorage, layout: &Layout| {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("expected a contiguous tensor to write to, found {layout:?}")
        };
        f.take().map_or(Ok(()), |f| f(storage, start, end))
    }))
}
