//! Where tensors keep their elements.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Result, Storage, Tensor};

use crate::error::bail;
use crate::error::lock::lock;
use crate::kernels::cuda;
pub(super) use crate::kernels::place;

/// The bytes of a tensor's storage, which may hold more than the tensor.
pub(super) fn bytes(tensor: &Tensor) -> usize {
    let (storage, layout) = tensor.storage_and_layout();
    let elements = match &*storage {
        Storage::Cpu(cpu) => cpu_len(cpu),
        Storage::Cuda(gpu) => cuda::len(gpu),
        Storage::Metal(_) => layout.shape().elem_count(),
    };
    elements * tensor.dtype().size_in_bytes()
}

/// Whether two tensors are views of one storage.
pub(crate) fn share_storage(a: &Tensor, b: &Tensor) -> bool {
    // One guard after the other: a second one on a storage waits for a writer, and the writer for the first.
    place(a) == place(b)
}

/// Moves the storage out of a tensor that owns it.
pub(super) fn into_storage(tensor: Tensor) -> Result<Storage> {
    struct Take(Mutex<Option<Storage>>);
    impl InplaceOp1 for Take {
        fn name(&self) -> &'static str {
            "take"
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> Result<()> {
            let taken = std::mem::replace(storage, CpuStorage::U8(Vec::new()));
            *lock(&self.0) = Some(Storage::Cpu(taken));
            Ok(())
        }
        fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> Result<()> {
            *lock(&self.0) = Some(Storage::Cuda(cuda::take(storage)?));
            Ok(())
        }
    }
    let whole = {
        let (storage, layout) = tensor.storage_and_layout();
        match &*storage {
            // candle takes strides of 0, which dimensions before an empty one have, for repeats,
            // and does not write to those.
            storage if layout.shape().elem_count() == 0 => return storage.try_clone(layout),
            Storage::Cpu(cpu) => {
                layout.is_contiguous() && cpu_len(cpu) == layout.shape().elem_count()
            }
            Storage::Cuda(gpu) => {
                layout.is_contiguous() && cuda::len(gpu) == layout.shape().elem_count()
            }
            Storage::Metal(_) => layout.is_contiguous() && layout.start_offset() == 0,
        }
    };
    // Not `copy`, which keeps the strides, and all of a storage that is viewed in part.
    let tensor = if whole { tensor } else { tensor.force_contiguous()? };
    if tensor.device().is_metal() {
        let (storage, layout) = tensor.storage_and_layout();
        return storage.try_clone(layout);
    }
    let take = Take(Mutex::new(None));
    tensor.inplace_op1(&take)?;
    match take.0.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(storage) => Ok(storage),
        None => bail!("candle did not run an in-place operator"),
    }
}

fn cpu_len(storage: &CpuStorage) -> usize {
    match storage {
        CpuStorage::U8(v) => v.len(),
        CpuStorage::U32(v) => v.len(),
        CpuStorage::I16(v) => v.len(),
        CpuStorage::I32(v) => v.len(),
        CpuStorage::I64(v) => v.len(),
        CpuStorage::BF16(v) => v.len(),
        CpuStorage::F16(v) => v.len(),
        CpuStorage::F32(v) => v.len(),
        CpuStorage::F64(v) => v.len(),
        _ => usize::MAX,
    }
}
