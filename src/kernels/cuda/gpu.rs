//! A CUDA device, and what kernels ask of it: launches, tensors for their results, numbers read back.

use std::cell::Cell;

use candle_core::cuda_backend::WrapErr;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Device, Result, Shape, Storage, Tensor};
use cudarc::driver::result;
use half::{bf16, f16};

use super::address::{address, start};
use super::compile::{self, Name, Source};
use super::launch::Launch;
use super::memory::alloc;
use super::streams::{launched, synchronise, wait_for_other_threads};
use crate::error::bail;

/// A CUDA device. Cloning one counts seven owners up, and dropping it down: kernels are given a reference.
#[derive(Clone, Debug)]
#[repr(transparent)]
pub(crate) struct Gpu(pub(super) CudaDevice);

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

    /// Runs `f`, in which candle launches kernels of its own: after what other threads have launched, which then wait for it.
    pub(crate) fn ordered<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
        let stream = self.0.cuda_stream();
        wait_for_other_threads(&stream)?;
        let result = f();
        launched(&stream);
        result
    }

    /// A tensor of zeros; of no elements too, for which a driver has no memory.
    pub(crate) fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let shape = shape.into();
        if shape.elem_count() == 0 {
            return self.empty(shape, dtype);
        }
        self.ordered(|| Tensor::zeros(shape, dtype, &self.device()))
    }

    /// Waits for what every thread of this process has launched.
    pub(crate) fn wait_for_all_threads(&self) -> Result<()> {
        synchronise(&self.0.cuda_stream())
    }

    /// The elements of `tensor` on the host: waits for all that was launched before, in other threads too.
    ///
    /// For flags, counts and scales; [`reads`] counts.
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
