//! CUDA devices as kernels see them: compile, launch, allocate, read back.
//!
//! Without the feature `cuda` this module is `absent.rs`, which has the same items and no device, so
//! that kernels' `cuda.rs` need no `cfg` and are type-checked on every machine.
//!
//! Everything runs on candle's stream of the device, in order. Only [`Gpu::to_host`] waits, and a thread
//! that uses what another has launched: see `threads`.

mod blas;
mod cache;
mod compile;
mod convolution;
#[cfg_attr(not(feature = "cudnn"), path = "dnn/absent.rs")]
mod dnn;
mod graph;
mod grid;
mod launch;
mod many;
mod memory;
#[cfg_attr(not(feature = "nccl"), path = "nccl/absent.rs")]
mod nccl;
mod once;
mod product;
mod quick;
mod scratch;
mod strided;
mod threads;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Once};

use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{
    CudaDevice, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Shape, Storage, Tensor,
};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};
use half::{bf16, f16};

pub(crate) use convolution::{Bias, Convolution, PassKind};
pub(crate) use graph::Graph;
pub(crate) use grid::{Grid, pack, suffix};
pub(crate) use launch::{Launch, Table};
pub(crate) use many::Many;
pub(crate) use memory::{forget_peaks, keep, of_one, statistics, take, trim};
pub(crate) use nccl::{Combine, Event, HAS_NCCL, ID, Id, Link, Step, new_id};
pub(crate) use product::{Matrices, Product};
pub(crate) use strided::Strided;

use crate::error::bail;
use compile::Name;
use memory::alloc;

/// The source of a kernel folder: `name` is unique in the crate, `code` goes after `common.cuh` and
/// `many.cuh`.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) code: &'static str,
}

/// A CUDA device. Cloning one counts seven owners up, and dropping it down: kernels are given a reference.
#[derive(Clone, Debug)]
#[repr(transparent)]
pub(crate) struct Gpu(CudaDevice);

thread_local! {
    static READS: Cell<u64> = const { Cell::new(0) };
    /// The capability of the context that was asked last, so that attention asks the driver once.
    static CAPABILITY: Cell<Option<(usize, (i32, i32))>> = const { Cell::new(None) };
}

/// How often this thread has waited for a GPU to read from it, in this crate.
pub(crate) fn reads() -> u64 {
    READS.get()
}

impl Gpu {
    /// `device`, if it is a CUDA device.
    #[allow(unsafe_code)]
    pub(crate) fn of(device: &Device) -> Option<&Self> {
        let Device::Cuda(device) = device else { return None };
        // SAFETY: a `Gpu` is in memory what its only field is.
        Some(unsafe { &*std::ptr::from_ref(device).cast::<Self>() })
    }

    /// What candle calls it.
    pub(crate) fn device(&self) -> Device {
        Device::Cuda(self.0.clone())
    }

    /// Major and minor: `(9, 0)` for Hopper.
    pub(crate) fn compute_capability(&self) -> Result<(i32, i32)> {
        let stream = self.0.cuda_stream();
        let context = stream.context().cu_ctx().addr();
        if let Some((asked, capability)) = CAPABILITY.get()
            && asked == context
        {
            return Ok(capability);
        }
        let capability = stream.context().compute_capability().w()?;
        CAPABILITY.set(Some((context, capability)));
        Ok(capability)
    }

    /// The kernel `name` of `source`, which is compiled for this device the first time.
    pub(crate) fn launch(&self, source: &'static Source, name: impl Into<Name>) -> Result<Launch> {
        let stream = self.0.cuda_stream();
        Ok(Launch::new(compile::function(&stream, source, name.into())?, stream))
    }

    /// A tensor whose elements are whatever was there: the caller's kernel writes all of them.
    pub(crate) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        let len = shape.elem_count();
        let storage = match dtype {
            DType::U8 => alloc::<u8>(&self.0, len),
            DType::U32 => alloc::<u32>(&self.0, len),
            DType::I16 => alloc::<i16>(&self.0, len),
            DType::I32 => alloc::<i32>(&self.0, len),
            DType::I64 => alloc::<i64>(&self.0, len),
            DType::F16 => alloc::<f16>(&self.0, len),
            DType::BF16 => alloc::<bf16>(&self.0, len),
            DType::F32 => alloc::<f32>(&self.0, len),
            DType::F64 => alloc::<f64>(&self.0, len),
            _ => bail!("no kernel writes {dtype:?}"),
        }?;
        Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false))
    }

    /// `N` vectors in one piece of memory, as [`empty`](Self::empty); each begins where 16 bytes may be read.
    pub(crate) fn vectors<const N: usize>(&self, len: usize, dtype: DType) -> Result<[Tensor; N]> {
        let stride = len.next_multiple_of(16);
        let all = self.empty(N * stride, dtype)?;
        let parts = (0..N).map(|i| all.narrow(0, i * stride, len)).collect::<Result<Vec<_>>>()?;
        parts.try_into().map_err(|_| candle_core::Error::Msg("as many parts as were made".into()))
    }

    /// `x`, contiguous, and rows of zeros after its own: `rows` in all. Copied and filled without a kernel.
    #[allow(unsafe_code)]
    pub(crate) fn padded(&self, x: &Tensor, rows: usize) -> Result<Tensor> {
        let mut dims = x.dims().to_vec();
        match dims.first_mut() {
            Some(own) if *own <= rows => *own = rows,
            _ => bail!("{:?} has no room in {rows} rows", x.shape()),
        }
        let y = self.empty(dims, x.dtype())?;
        let [own, all] = [x, &y].map(|t| t.elem_count() * t.dtype().size_in_bytes());
        let (from, to, stream) = (address(x)?, address(&y)?, self.0.cuda_stream());
        stream.context().bind_to_thread().w()?;
        if own > 0 {
            // SAFETY: both tensors have so many bytes, and live until the copy is done, as they are freed in the order of
            // the stream. Nobody else has `y`.
            unsafe { result::memcpy_dtod_async(to, from, own, stream.cu_stream()) }.w()?;
        }
        if all > own {
            // SAFETY: these are the bytes of `y` after those above.
            unsafe { result::memset_d8_async(to + own as u64, 0, all - own, stream.cu_stream()) }
                .w()?;
        }
        launched(&stream);
        Ok(y)
    }

    /// A tensor of zeros; of no elements too, for which a driver has no memory.
    pub(crate) fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        if shape.elem_count() == 0 {
            return self.empty(shape, dtype);
        }
        let zeros = Tensor::zeros(shape, dtype, &self.device());
        launched(&self.0.cuda_stream());
        zeros
    }

    /// Waits for what every thread of this process has launched.
    pub(crate) fn wait_for_all_threads(&self) -> Result<()> {
        self.0.cuda_stream().context().synchronize().w()
    }

    /// The elements of `tensor` on the host: waits for all that was launched before, in other threads too.
    ///
    /// The one way from a device to the host in this crate; [`reads`] counts.
    pub(crate) fn to_host<T: candle_core::WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
        READS.set(READS.get() + 1);
        start(tensor)?; // candle's copy is in this thread's stream, whoever made the tensor
        tensor.flatten_all()?.to_vec1()
    }
}

#[cfg(test)]
impl Gpu {
    /// What the driver calls it.
    pub(crate) fn name(&self) -> Result<String> {
        self.0.cuda_stream().context().name().w()
    }
}

/// What a driver calls the stream that each thread has by itself, which candle's devices use.
const PER_THREAD: usize = 2;

/// Whether each thread has a stream of its own where it says `stream`, and candle orders none of them.
fn is_of_each_thread(stream: &CudaStream) -> bool {
    stream.cu_stream().addr() == PER_THREAD && !stream.context().is_in_multi_stream_mode()
}

/// Called before a launch, before a tensor is used otherwise, and before memory is taken.
fn wait_for_other_threads(stream: &CudaStream) -> Result<()> {
    static WARNED: Once = Once::new();
    if !is_of_each_thread(stream) {
        return Ok(());
    }
    let context = stream.context();
    threads::wait_for_others(context.ordinal(), |others| {
        if others {
            WARNED.call_once(|| {
                tracing::warn!(
                    "several threads use a CUDA device whose streams are each one thread's: they wait for one another; \
                     Device::new_cuda_with_stream makes a device with one stream for all threads"
                );
            });
        }
        context.synchronize().w()
    })
}

/// Called after something was launched on `stream`.
fn launched(stream: &Arc<CudaStream>) {
    if is_of_each_thread(stream) {
        threads::launched(stream.context().ordinal());
        // Where the thread is ending already, nobody waits.
        let _ = LEAVING.try_with(|leaving| {
            let all = &mut *leaving.0.borrow_mut();
            let context = stream.context().cu_ctx();
            if !all.iter().any(|other| other.context().cu_ctx() == context) {
                all.push(stream.clone());
            }
        });
    }
}

/// This thread's stream of each device that it has launched something on. A thread that ends waits for them, because they end
/// with it: no kernel is left in a stream that is no more. On an H200 a test that left some there did not end; whether for this,
/// nobody has seen yet.
#[derive(Debug, Default)]
struct Leaving(RefCell<Vec<Arc<CudaStream>>>);

thread_local!(static LEAVING: Leaving = Leaving::default());

impl Drop for Leaving {
    fn drop(&mut self) {
        for stream in self.0.take() {
            // The next call of another thread says so.
            stream.context().record_err(stream.synchronize());
        }
    }
}

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
    let (storage, layout) = tensor.storage_and_layout();
    let storage = on_gpu(&storage)?;
    wait_for_other_threads(stream(storage)?)?;
    first(storage, layout)
}

/// Where the first element of a CUDA tensor is, of any strides.
pub(crate) fn start(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let storage = on_gpu(&storage)?;
    wait_for_other_threads(stream(storage)?)?;
    at(storage, layout.start_offset())
}

/// [`address`], for who uses it after having waited for other threads.
fn unwaited(tensor: &Tensor) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    first(on_gpu(&storage)?, layout)
}

/// [`start`] likewise.
fn start_unwaited(tensor: &Tensor) -> Result<u64> {
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
            wait_for_other_threads(stream(storage)?)?;
            self.0.store(first(storage, layout)?, Ordering::Relaxed);
            Ok(())
        }
    }
    let locate = Locate(AtomicU64::new(0));
    tensor.inplace_op1(&locate)?;
    Ok(locate.0.into_inner())
}

/// The stream that a tensor was allocated on. Its device's own would have to be cloned.
fn stream(storage: &CudaStorage) -> Result<&CudaStream> {
    macro_rules! stream {
        ($($kind:ident),*) => {
            match &storage.slice {
                $(CudaStorageSlice::$kind(slice) => slice.stream(),)*
                _ => bail!("no kernel reads {:?}", storage.slice),
            }
        };
    }
    Ok(stream!(U8, U32, I16, I32, I64, F16, BF16, F32, F64))
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
