//! Allocates GPU memory without events, caches what tensors free, and counts both.
//!
//! Allocations come from the driver's memory pool. By default the driver takes freed memory back whenever the host
//! synchronises. [`keep`] leaves it in the pool for later tensors, as PyTorch's caching allocator does. If memory runs
//! out, [`alloc`] gives back what the pool caches and asks once more, because the cached pieces may be too small. A
//! capture cannot do that, because it synchronises.
//!
//! cudarc creates two events for each allocation, to order streams by. Where candle uses one stream per thread, it
//! orders none of them, so the events serve nothing. [`alloc`] then takes memory through a second context object of the
//! same device, which creates none: four driver calls fewer per allocation.
//!
//! Captured CUDA graphs have memory of their own, outside the pool. Statistics add it, and [`trim`] gives it back too.

use std::sync::{Arc, OnceLock};

use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, Error, Result};
use cudarc::driver::sys::{
    self, CUgraphMem_attribute as GraphAttribute, CUmemPool_attribute as Attribute, CUmemoryPool,
    CUresult,
};
use cudarc::driver::{CudaContext, CudaStream, DeviceRepr, DriverError};

use super::streams::{is_of_each_thread, synchronise, wait_for_other_threads};
use super::threads::DEVICES;
use crate::kernels::capture;

/// That stream in contexts of this crate's own, by ordinal: each allocation asks for it.
static STREAMS: [OnceLock<Arc<CudaStream>>; DEVICES] = [const { OnceLock::new() }; DEVICES];

/// Memory for the caller's kernel to write.
#[allow(unsafe_code)]
pub(super) fn alloc<T: DeviceRepr + CudaDType>(
    device: &CudaDevice,
    len: usize,
) -> Result<CudaStorage> {
    let stream = device.cuda_stream();
    wait_for_other_threads(&stream)?;
    let stream = without_events(&stream)?;
    // SAFETY: nobody reads the elements before the kernel that the memory is for has written them, on
    // the same stream; and any bits are a number. One element at least, as a driver refuses to allocate
    // nothing.
    let alloc = || unsafe { stream.alloc::<T>(len.max(1)) };
    let slice = match alloc() {
        // What the pool keeps may be in pieces that are too small, or of another stream. A capture must not wait.
        Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) if !capture::is_active() => {
            trim(device)?;
            alloc().w()?
        }
        slice => slice.w()?,
    };
    Ok(CudaStorage::wrap_cuda_slice(slice, device.clone()))
}

/// The same stream, in a context whose allocations come without events, where there is no other stream that
/// events could order it with. Events cost two calls of the driver to make them, and two to destroy them,
/// each time.
#[allow(unsafe_code)]
fn without_events(stream: &Arc<CudaStream>) -> Result<&Arc<CudaStream>> {
    let context = stream.context();
    if !is_of_each_thread(stream) || !context.is_event_tracking() {
        return Ok(stream);
    }
    let Some(known) = STREAMS.get(context.ordinal()) else { return Ok(stream) };
    if let Some(own) = known.get() {
        return Ok(own);
    }
    let own = CudaContext::new(context.ordinal()).w()?;
    // SAFETY: nobody else has this object, and nothing is done with it but to allocate. What is allocated
    // is used on the device's one stream, in order, as all that this crate launches.
    unsafe { own.disable_event_tracking() };
    Ok(known.get_or_init(|| own.per_thread_stream()))
}

/// Forgets the errors of calls that could not return them, such as a free in a capture that has failed: the next call
/// would.
pub(super) fn forget_errors(stream: &CudaStream) {
    let _ = stream.context().check_err();
    let own = STREAMS.get(stream.context().ordinal()).and_then(OnceLock::get);
    if let Some(own) = own {
        let _ = own.context().check_err();
    }
}

/// An `F32` that nobody reads, on the device of `storage`.
pub(crate) fn of_one(storage: &CudaStorage) -> Result<CudaStorage> {
    alloc::<f32>(&storage.device, 1)
}

/// Takes the memory out of a tensor's storage, and leaves a byte there: nobody may look at it again.
pub(crate) fn take(storage: &mut CudaStorage) -> Result<CudaStorage> {
    let rest = alloc::<u8>(&storage.device, 1)?;
    Ok(std::mem::replace(storage, rest))
}

/// The pool that candle's and this crate's allocations come from.
#[allow(unsafe_code)]
fn pool(device: &CudaDevice) -> Result<CUmemoryPool> {
    let mut pool = std::ptr::null_mut();
    let of = device.cuda_stream().context().cu_device();
    // SAFETY: the device is there, and `pool` is there to be written.
    unsafe { sys::cuDeviceGetMemPool(&raw mut pool, of) }.result().w()?;
    Ok(pool)
}

#[allow(unsafe_code)]
fn set(device: &CudaDevice, attribute: Attribute, mut value: u64) -> Result<()> {
    // SAFETY: the pool is the device's own, and the attributes set here are 64 bits.
    unsafe { sys::cuMemPoolSetAttribute(pool(device)?, attribute, (&raw mut value).cast()) }
        .result()
        .w()
}

#[allow(unsafe_code)]
fn get(device: &CudaDevice, attribute: Attribute) -> Result<u64> {
    let mut value = 0u64;
    // SAFETY: the pool is the device's own, and the attributes asked for here are 64 bits.
    unsafe { sys::cuMemPoolGetAttribute(pool(device)?, attribute, (&raw mut value).cast()) }
        .result()
        .w()?;
    Ok(value)
}

/// What graphs have, which is none of the pool's.
#[allow(unsafe_code)]
fn of_graphs(device: &CudaDevice, attribute: GraphAttribute) -> Result<u64> {
    let mut value = 0u64;
    let of = device.cuda_stream().context().cu_device();
    // SAFETY: the device is there, and these attributes are 64 bits.
    unsafe { sys::cuDeviceGetGraphMemAttribute(of, attribute, (&raw mut value).cast()) }
        .result()
        .w()?;
    Ok(value)
}

/// Has the driver keep what is freed on the device, instead of giving it back at the next wait.
pub(crate) fn keep(device: &CudaDevice) -> Result<()> {
    set(device, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX)
}

/// Bytes that tensors have and that the driver has for them, now and at most.
pub(crate) fn statistics(device: &CudaDevice) -> Result<[u64; 4]> {
    use Attribute::{
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as RESERVED,
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH as MOST_RESERVED,
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT as USED, CU_MEMPOOL_ATTR_USED_MEM_HIGH as MOST_USED,
    };
    use GraphAttribute::{
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT as GRAPHS_RESERVED,
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH as GRAPHS_MOST_RESERVED,
        CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT as GRAPHS_USED,
        CU_GRAPH_MEM_ATTR_USED_MEM_HIGH as GRAPHS_MOST_USED,
    };
    let both = |pool, graphs| Ok::<_, Error>(get(device, pool)? + of_graphs(device, graphs)?);
    Ok([
        both(USED, GRAPHS_USED)?,
        both(RESERVED, GRAPHS_RESERVED)?,
        both(MOST_USED, GRAPHS_MOST_USED)?,
        both(MOST_RESERVED, GRAPHS_MOST_RESERVED)?,
    ])
}

/// Forgets what was used at most before now.
#[allow(unsafe_code)]
pub(crate) fn forget_peaks(device: &CudaDevice) -> Result<()> {
    set(device, Attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)?;
    set(device, Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0)?;
    let of = device.cuda_stream().context().cu_device();
    for attribute in [
        GraphAttribute::CU_GRAPH_MEM_ATTR_USED_MEM_HIGH,
        GraphAttribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH,
    ] {
        let mut zero = 0u64;
        // SAFETY: the device is there, and these attributes are 64 bits.
        unsafe { sys::cuDeviceSetGraphMemAttribute(of, attribute, (&raw mut zero).cast()) }
            .result()
            .w()?;
    }
    Ok(())
}

/// Gives back to the driver what no tensor has. Waits, as memory that is in use until then is none of it.
#[allow(unsafe_code)]
pub(crate) fn trim(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    synchronise(&stream)?;
    // SAFETY: the pool is the device's own.
    unsafe { sys::cuMemPoolTrimTo(pool(device)?, 0) }.result().w()?;
    // SAFETY: the device is there.
    unsafe { sys::cuDeviceGraphMemTrim(stream.context().cu_device()) }.result().w()
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::kernels::cuda::Gpu;
    use crate::kernels::testing::devices::gpus;
    use crate::kernels::testing::own_process::in_own_process;

    #[test]
    fn memory_comes_without_events_where_a_device_has_one_stream() -> Result<()> {
        for device in gpus() {
            let Device::Cuda(device) = device else { continue };
            let given = device.cuda_stream();
            let used = without_events(&given)?;
            assert_eq!(used.cu_stream(), given.cu_stream());
            assert_eq!(used.context(), given.context());
            assert!(given.context().is_event_tracking() && !used.context().is_event_tracking());

            let several = Device::new_cuda_with_stream(0)?;
            let Device::Cuda(several) = several else { continue };
            let given = several.cuda_stream();
            let used = without_events(&given)?;
            assert!(Arc::ptr_eq(used, &given) && used.context().is_event_tracking());
        }
        Ok(())
    }

    #[test]
    fn memory_is_kept_from_then_on() -> Result<()> {
        for device in gpus() {
            let Device::Cuda(device) = &device else { continue };
            keep(device)?;
            assert_eq!(get(device, Attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)?, u64::MAX);
            Gpu::of(&Device::Cuda(device.clone()))
                .map(|gpu| gpu.empty(3, DType::F32))
                .transpose()?;
        }
        Ok(())
    }

    const HERE: &str = "kernels::cuda::memory::tests::";
    const MIB: usize = 1 << 20;

    #[test]
    fn statistics_follow_tensors_and_what_is_kept_until_it_is_released() -> Result<()> {
        let test = format!("{HERE}statistics_follow_tensors_and_what_is_kept_until_it_is_released");
        if gpus().is_empty() || !in_own_process(&test, &[]) {
            return Ok(());
        }
        for device in gpus() {
            let tensor = |mib: usize| Tensor::zeros(mib * MIB, DType::U8, &device);
            crate::backend::keep_memory(&device)?;
            let stats = || Ok::<_, Error>(crate::backend::memory_stats(&device)?.expect("a GPU"));
            let start = stats()?;
            // Larger than what a driver reserves at a time.
            let (large, two) = (tensor(256)?, tensor(2)?);
            let both = stats()?;
            assert!(both.used >= start.used + 258 * MIB as u64 && both.reserved >= both.used);
            drop(large);
            device.synchronize()?;
            let kept = stats()?;
            assert_eq!(kept.used, both.used - 256 * MIB as u64);
            assert_eq!((kept.reserved, kept.peak_used), (both.reserved, both.peak_used));
            crate::backend::reset_peak_memory_stats(&device)?;
            assert_eq!(stats()?.peak_used, kept.used);
            assert_eq!(stats()?.peak_reserved, kept.reserved);
            crate::backend::empty_cache(&device)?;
            let released = stats()?;
            assert_eq!(released.used, kept.used);
            assert!(released.reserved < kept.reserved && released.reserved >= released.used);
            drop(two);
        }
        assert_eq!(crate::backend::memory_stats(&Device::Cpu)?, None);
        crate::backend::empty_cache(&Device::Cpu)?;
        crate::backend::reset_peak_memory_stats(&Device::Cpu)?;
        Ok(())
    }

    /// Where nothing that is kept fits, it is given back, and asked for again.
    #[test]
    fn what_is_kept_is_given_back_before_memory_runs_out() -> Result<()> {
        let test = format!("{HERE}what_is_kept_is_given_back_before_memory_runs_out");
        if gpus().is_empty() || !in_own_process(&test, &[("EMULATED_GPU_MEMORY", "67108864")]) {
            return Ok(());
        }
        for device in gpus() {
            crate::backend::keep_memory(&device)?;
            let Some(gpu) = Gpu::of(&device) else { continue };
            for size in 10..22 {
                gpu.empty(size * MIB, DType::U8)?;
            }
            // All of it at once there is not, and that is an error like any other.
            let held = gpu.empty(40 * MIB, DType::U8)?;
            if let Err(error) = gpu.empty(48 * MIB, DType::U8) {
                assert!(error.to_string().contains("OUT_OF_MEMORY"), "{error}");
            }
            drop(held);
            gpu.empty(48 * MIB, DType::U8)?;
        }
        Ok(())
    }
}
