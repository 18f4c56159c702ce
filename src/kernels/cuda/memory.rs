//! Memory of a device: without events, and kept for what comes next.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, Result};
use cudarc::driver::sys::{self, CUmemPool_attribute as Attribute};
use cudarc::driver::{CudaContext, CudaStream, DeviceRepr};

use super::{is_of_each_thread, wait_for_other_threads};

/// That stream in contexts of this crate's own, by ordinal.
static STREAMS: LazyLock<Mutex<HashMap<usize, Arc<CudaStream>>>> = LazyLock::new(Mutex::default);

/// Memory for the caller's kernel to write.
#[allow(unsafe_code)]
pub(super) fn alloc<T: DeviceRepr + CudaDType>(
    device: &CudaDevice,
    len: usize,
) -> Result<CudaStorage> {
    wait_for_other_threads(&device.cuda_stream())?;
    let stream = without_events(device.cuda_stream())?;
    // SAFETY: nobody reads the elements before the kernel that the memory is for has written them, on
    // the same stream; and any bits are a number. One element at least, as a driver refuses to allocate
    // nothing.
    let slice = unsafe { stream.alloc::<T>(len.max(1)) }.w()?;
    Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
}

/// The same stream, in a context whose allocations come without events, where there is no other stream that
/// events could order it with: two calls of the driver to make them, and two to destroy them, each time.
#[allow(unsafe_code)]
fn without_events(stream: Arc<CudaStream>) -> Result<Arc<CudaStream>> {
    let context = stream.context();
    if !is_of_each_thread(&stream) || !context.is_event_tracking() {
        return Ok(stream);
    }
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(own) = streams.get(&context.ordinal()) {
        return Ok(own.clone());
    }
    let own = CudaContext::new(context.ordinal()).w()?;
    // SAFETY: nobody else has this object, and nothing is done with it but to allocate. What is allocated
    // is used on the device's one stream, in order, as all that this crate launches.
    unsafe { own.disable_event_tracking() };
    let own = own.per_thread_stream();
    streams.insert(context.ordinal(), own.clone());
    Ok(own)
}

/// Forgets the errors of calls that could not return them, such as a free in a capture that has failed: the next call
/// would.
pub(super) fn forget_errors(stream: &CudaStream) {
    let _ = stream.context().check_err();
    let streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(own) = streams.get(&stream.context().ordinal()) {
        let _ = own.context().check_err();
    }
}

/// An `F32` that nobody reads, on the device of `storage`.
pub(crate) fn of_one(storage: &CudaStorage) -> Result<CudaStorage> {
    alloc::<f32>(&storage.device, 1)
}

/// Takes the memory out of a tensor's storage, and leaves a byte there: nobody may look at it again.
pub(crate) fn take(storage: &mut CudaStorage) -> Result<CudaStorage> {
    let rest = alloc::<u8>(&storage.device.clone(), 1)?;
    Ok(std::mem::replace(storage, rest))
}

/// Has the driver keep what is freed on the device, instead of giving it back at the next wait.
#[allow(unsafe_code)]
pub(crate) fn keep(device: &CudaDevice) -> Result<()> {
    let (mut pool, mut all) = (std::ptr::null_mut(), u64::MAX);
    let of = device.cuda_stream().context().cu_device();
    // SAFETY: the device is there, and `pool` is there to be written.
    unsafe { sys::cuDeviceGetMemPool(&raw mut pool, of) }.result().w()?;
    let (attribute, all) =
        (Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut all).cast::<c_void>());
    // SAFETY: the pool is the device's own, and this attribute is 64 bits.
    unsafe { sys::cuMemPoolSetAttribute(pool, attribute, all) }.result().w()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;
    use crate::kernels::cuda::Gpu;
    use crate::kernels::devices::gpus;

    #[test]
    fn memory_comes_without_events_where_a_device_has_one_stream() -> Result<()> {
        for device in gpus() {
            let Device::Cuda(device) = device else { continue };
            let (given, used) = (device.cuda_stream(), without_events(device.cuda_stream())?);
            assert_eq!(used.cu_stream(), given.cu_stream());
            assert_eq!(used.context(), given.context());
            assert!(given.context().is_event_tracking() && !used.context().is_event_tracking());

            let several = Device::new_cuda_with_stream(0)?;
            let Device::Cuda(several) = several else { continue };
            let (given, used) = (several.cuda_stream(), without_events(several.cuda_stream())?);
            assert!(Arc::ptr_eq(&used, &given) && used.context().is_event_tracking());
        }
        Ok(())
    }

    #[test]
    #[allow(unsafe_code)]
    fn memory_is_kept_from_then_on() -> Result<()> {
        for device in gpus() {
            let Device::Cuda(device) = &device else { continue };
            keep(device)?;
            let (mut pool, mut threshold) = (std::ptr::null_mut(), 0u64);
            let of = device.cuda_stream().context().cu_device();
            let attribute = Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            // SAFETY: as in `keep`.
            unsafe {
                sys::cuDeviceGetMemPool(&raw mut pool, of).result().w()?;
                let into = (&raw mut threshold).cast::<c_void>();
                sys::cuMemPoolGetAttribute(pool, attribute, into).result().w()?;
            }
            assert_eq!(threshold, u64::MAX);
            Gpu::of(&Device::Cuda(device.clone()))
                .map(|gpu| gpu.empty(3, DType::F32))
                .transpose()?;
        }
        Ok(())
    }
}
