//! Matrix products by cuBLAS: sums in F32 (F64 for F64), whatever is read and written.
//!
//! BLAS counts columns first. A row-major matrix is its transpose there, so that `lhs · rhs` is asked
//! for as `rhsᵀ · lhsᵀ`, and nothing is copied.

mod biased;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::rc::Rc;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Result, Tensor};
use cudarc::cublas::{result as cublas, sys};
use cudarc::driver::{CudaStream, sys::CUstreamCaptureStatus};

use super::address::{address, start};
use super::captures;
use super::gpu::Gpu;
use super::product::{Matrices, Product};
use super::quick::Quick;
use super::streams::launched;
use crate::error::bail;

/// Bytes of memory for products that are cut along the sum: what NVIDIA recommends, from Hopper on and before.
const WORKSPACE: [usize; 2] = [32 << 20, 4 << 20];
/// The place of that in [`Gpu::scratch`].
const PLACE: usize = 4;

/// A library handle on a stream. One per thread: a handle's workspace is for one product at a time.
#[derive(Debug)]
struct Handle {
    handle: sys::cublasHandle_t,
    /// Kept alive as long as the handle names it.
    _workspace: Tensor,
    /// Kept alive as long as the handle names it.
    stream: Arc<CudaStream>,
}

#[allow(unsafe_code)]
impl Handle {
    fn new(gpu: &Gpu, stream: Arc<CudaStream>) -> Result<Self> {
        let workspace = gpu.workspace()?;
        let (start, size) = (address(&workspace)? as *mut c_void, workspace.elem_count());
        stream.context().bind_to_thread().w()?;
        let this = Self { handle: cublas::create_handle().w()?, _workspace: workspace, stream };
        // Where a sum is cut into parts, the parts are added up in F32 too.
        let mode = sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
        // SAFETY: the handle was made above. The stream and the workspace live as long as it. A stream takes a workspace
        // that was set before it back.
        unsafe {
            cublas::set_stream(this.handle, this.stream.cu_stream().cast()).w()?;
            sys::cublasSetWorkspace_v2(this.handle, start, size).result().w()?;
            sys::cublasSetMathMode(this.handle, mode).result().w()?;
        }
        Ok(this)
    }
}

#[allow(unsafe_code)]
impl Drop for Handle {
    fn drop(&mut self) {
        // It waits for the device.
        let _held = captures::hold_off(self.stream.context().ordinal());
        // SAFETY: made by `new`, and destroyed here alone. At the end of a process there may be
        // nothing left to destroy, which is no error.
        let _ = unsafe { cublas::destroy_handle(self.handle) };
    }
}

type Handles<T> = RefCell<Quick<(usize, usize), Rc<T>>>;

/// The thread's handle on the stream of `gpu`, made by `new` the first time: not in a capture, whose memory is the graph's.
fn of<T>(
    handles: &Handles<T>,
    gpu: &Gpu,
    new: impl FnOnce(Arc<CudaStream>) -> Result<T>,
) -> Result<Rc<T>> {
    let stream = gpu.0.cuda_stream();
    let key = (stream.context().cu_ctx().addr(), stream.cu_stream().addr());
    if let Some(handle) = handles.borrow().get(&key) {
        return Ok(handle.clone());
    }
    if stream.capture_status().w()? != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
        bail!(
            "a product that no step before the capture had: cuBLAS allocates its memory at the first one"
        );
    }
    let handle = Rc::new(new(stream)?);
    handles.borrow_mut().insert(key, handle.clone());
    Ok(handle)
}

impl Gpu {
    /// Memory for one product at a time, whichever library computes it: the thread's products follow one another on the
    /// stream.
    fn workspace(&self) -> Result<Tensor> {
        let [hopper, before] = WORKSPACE;
        let size = if self.compute_capability()?.0 >= 9 { hopper } else { before };
        self.scratch(PLACE, size, DType::U8)
    }

    /// Computes `product`.
    #[allow(unsafe_code)]
    pub(crate) fn product(&self, product: &Product<'_>) -> Result<()> {
        thread_local!(static HANDLES: Handles<Handle> = RefCell::default());
        let handle =
            HANDLES.with(|handles| of(handles, self, |stream| Handle::new(self, stream)))?;
        let Sizes { batch, m, n, k, a, b, ldc, stride_c } = Sizes::of(product)?;
        let dtype = product.lhs.tensor.dtype();
        let (one, zero) = (Scalar::of(dtype, 1.0), Scalar::of(dtype, 0.0));
        let out = address(product.out.tensor)?;
        handle.stream.context().bind_to_thread().w()?; // of several devices, another one may be current
        // SAFETY: `Sizes` says what its reads and writes are; the caller's tensors hold that much,
        // as `Matrices` and `Product` ask for and `gemm` sees to, on the stream of the handle. The
        // scalars are of the type of the arithmetic, and read before the call returns.
        unsafe {
            cublas::gemm_strided_batched_ex(
                handle.handle,
                a.operation,
                b.operation,
                n,
                m,
                k,
                one.address(),
                a.address as *const c_void,
                data_type(dtype)?,
                a.ld,
                a.stride,
                b.address as *const c_void,
                data_type(dtype)?,
                b.ld,
                b.stride,
                zero.address(),
                out as *mut c_void,
                data_type(product.out.tensor.dtype())?,
                ldc,
                stride_c,
                batch,
                compute_type(dtype),
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .w()?;
        launched(&handle.stream);
        Ok(())
    }
}

/// One, or zero, in the type of the arithmetic.
enum Scalar {
    Single(f32),
    Double(f64),
}

impl Scalar {
    fn of(dtype: DType, value: f32) -> Self {
        if dtype == DType::F64 { Self::Double(value.into()) } else { Self::Single(value) }
    }

    fn address(&self) -> *const c_void {
        match self {
            Self::Single(value) => std::ptr::from_ref(value).cast(),
            Self::Double(value) => std::ptr::from_ref(value).cast(),
        }
    }
}

/// One operand: `ld` elements from a column to the next, in BLAS's order.
struct Operand {
    address: u64,
    operation: sys::cublasOperation_t,
    ld: c_int,
    stride: i64,
}

/// A product in BLAS's numbers: `a` is the right operand and `b` the left, both `(k, ·)`.
struct Sizes {
    batch: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    a: Operand,
    b: Operand,
    ldc: c_int,
    stride_c: i64,
}

impl Sizes {
    fn of(product: &Product<'_>) -> Result<Self> {
        let operand = |matrices: &Matrices<'_>| {
            let operation = match matrices.transposed {
                true => sys::cublasOperation_t::CUBLAS_OP_T,
                false => sys::cublasOperation_t::CUBLAS_OP_N,
            };
            let (address, ld) = (start(matrices.tensor)?, int(matrices.ld)?);
            Ok::<_, candle_core::Error>(Operand {
                address,
                operation,
                ld,
                stride: long(matrices.stride)?,
            })
        };
        Ok(Self {
            batch: int(product.batch)?,
            m: int(product.m)?,
            n: int(product.n)?,
            k: int(product.k)?,
            a: operand(&product.rhs)?,
            b: operand(&product.lhs)?,
            ldc: int(product.out.ld)?,
            stride_c: long(product.out.stride)?,
        })
    }
}

fn int(size: usize) -> Result<c_int> {
    match size.try_into() {
        Ok(size) => Ok(size),
        Err(_) => bail!("a matrix of {size} rows or columns is more than cuBLAS takes, 2^31 - 1"),
    }
}

fn long(size: usize) -> Result<i64> {
    i64::try_from(size).map_err(candle_core::Error::wrap)
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    Ok(match dtype {
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        DType::F64 => sys::cudaDataType_t::CUDA_R_64F,
        other => bail!("expected matrices of F16, BF16, F32 or F64, got {other:?}"),
    })
}

fn compute_type(dtype: DType) -> sys::cublasComputeType_t {
    match dtype {
        DType::F64 => sys::cublasComputeType_t::CUBLAS_COMPUTE_64F,
        DType::F32 if crate::kernels::choice::tf32::allow_tf32() => {
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
    }
}
