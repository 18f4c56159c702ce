//! Where the elements of CUDA tensors are.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::{CudaDevice, CudaStorage, Device, InplaceOp1, Layout, Result, Storage, Tensor};
use cudarc::driver::{CudaSlice, DevicePtr};

use super::streams::{is_of_each_thread, wait_for_other_threads};
use crate::error::bail;

/// Elements of a storage, and more than any tensor has of what no kernel reads.
pub(crate) fn len(storage: &CudaStorage) -> usize {
    macro_rules! len {
        ($($kind:ident),*) => {
            match &storage.slice {
                $(CudaStorageSlice::$kind(slice) => slice.len(),)*
                _ => usize::MAX,
            }
        };
    }
    len!(U8, U32, I16, I32, I64, F16, BF16, F32, F64)
}

/// Where the elements of a contiguous CUDA tensor are.
///
/// The address stays good while the tensor lives: candle frees storage in stream order.
pub(crate) fn address(tensor: &Tensor) -> Result<u64> {
    wait(tensor)?;
    unwaited(tensor)
}

/// Where the first element of a CUDA tensor is, of any strides.
pub(crate) fn start(tensor: &Tensor) -> Result<u64> {
    wait(tensor)?;
    start_unwaited(tensor)
}

/// Waits for other threads' launches, without the tensor's lock: one of them may capture a step that wants to write to it.
fn wait(tensor: &Tensor) -> Result<()> {
    match tensor.device() {
        Device::Cuda(device) => wait_for_other_threads(&device.cuda_stream()),
        other => bail!("expected a CUDA tensor, found one on {:?}", other.location()),
    }
}

/// [`address`], for who uses it after having waited for other threads.
pub(super) fn unwaited(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    first(on_gpu(&storage)?, layout)
}

/// [`start`] likewise.
pub(super) fn start_unwaited(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    at(on_gpu(&storage)?, layout.start_offset())
}

/// Whether 16 bytes may be read from the first element of a contiguous CUDA tensor on.
pub(crate) fn is_aligned(tensor: &Tensor) -> Result<bool> {
    Ok(unwaited(tensor)?.is_multiple_of(16))
}

fn on_gpu(storage: &Storage) -> Result<&CudaStorage> {
    match storage {
        Storage::Cuda(storage) => Ok(storage),
        _ => bail!("expected a CUDA tensor, found one on {:?}", storage.device().location()),
    }
}

/// [`address`], of a tensor that the kernel writes.
///
/// Through candle's lock for writers, so that a tensor somebody holds for reading is not taken. The
/// lock is gone at the launch: what orders writers and readers on a device is its stream.
pub(crate) fn address_mut(tensor: &Tensor) -> Result<u64> {
    struct Locate(AtomicU64);
    impl InplaceOp1 for Locate {
        fn name(&self) -> &'static str {
            "locate"
        }

        fn cpu_fwd(&self, _: &mut candle_core::CpuStorage, _: &Layout) -> Result<()> {
            bail!("expected a CUDA tensor, found one on the CPU")
        }

        fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> Result<()> {
            self.0.store(first(storage, layout)?, Ordering::Relaxed);
            Ok(())
        }
    }
    wait(tensor)?;
    let locate = Locate(AtomicU64::new(0));
    tensor.inplace_op1(&locate)?;
    Ok(locate.0.into_inner())
}

fn base<T>(slice: &CudaSlice<T>, device: &CudaDevice) -> u64 {
    match is_of_each_thread(slice.stream()) {
        // The device's own would have to be cloned.
        true => slice.device_ptr(slice.stream()).0,
        false => slice.device_ptr(&device.cuda_stream()).0,
    }
}

fn first(storage: &CudaStorage, layout: &Layout) -> Result<u64> {
    let Some((start, _)) = layout.contiguous_offsets() else {
        bail!("expected a contiguous tensor, found {layout:?}")
    };
    at(storage, start)
}

fn at(storage: &CudaStorage, start: usize) -> Result<u64> {
    macro_rules! pointer {
        ($($kind:ident),*) => {
            match &storage.slice {
                $(CudaStorageSlice::$kind(slice) => base(slice, &storage.device),)*
                _ => bail!("no kernel reads {:?}", storage.slice),
            }
        };
    }
    let base = pointer!(U8, U32, I16, I32, I64, F16, BF16, F32, F64);
    Ok(base + (start * candle_core::backend::BackendStorage::dtype(storage).size_in_bytes()) as u64)
}
