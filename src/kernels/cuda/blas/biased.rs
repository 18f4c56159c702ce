//! Matrix products with a bias, by cuBLASLt, which adds the bias in F32 before it rounds the result.
//!
//! cuBLAS has no product with a bias. To add one afterwards takes another pass over the output. It also rounds a 16-bit
//! result twice, or needs the product in F32 first.
//!
//! BLAS matrices are column-major. A row-major product is therefore computed as its transpose, with the operands
//! exchanged. The bias has one element per output column, which is a row there, as cuBLASLt's epilogue wants it.
//!
//! Each call asks cuBLASLt for an algorithm, by sizes, alignment and workspace. Algorithms that cut a sum into parts
//! must add these in F32. Where there is none, as for F64, `biased_product` returns `false`, and the caller adds the
//! bias.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Arc;

use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Error, Result, Tensor};
use cudarc::cublaslt::{result as lt, sys};
use cudarc::driver::CudaStream;

use super::{Handles, Operand, Product, Scalar, Sizes, of};
use crate::error::bail;
use crate::kernels::cuda::address::address;
use crate::kernels::cuda::gpu::Gpu;
use crate::kernels::cuda::streams::launched;

#[derive(Debug)]
struct Handle {
    handle: sys::cublasLtHandle_t,
    workspace: Tensor,
    stream: Arc<CudaStream>,
}

#[allow(unsafe_code)]
impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made once, and destroyed here alone.
        let _ = unsafe { lt::destroy_handle(self.handle) };
    }
}

/// Declares an owner of a descriptor, which destroys it.
macro_rules! owned {
    ($name:ident, $raw:ty, $destroy:path) => {
        struct $name($raw);

        #[allow(unsafe_code)]
        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made where this was, and destroyed here alone.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}
owned!(Layout, sys::cublasLtMatrixLayout_t, lt::destroy_matrix_layout);
owned!(Description, sys::cublasLtMatmulDesc_t, lt::destroy_matmul_desc);
owned!(Preference, sys::cublasLtMatmulPreference_t, lt::destroy_matmul_pref);

#[allow(unsafe_code)]
impl Layout {
    /// `rows` by `columns`, columns first in memory, and as many of them as the batch has.
    fn of(
        dtype: DType,
        [rows, columns]: [i32; 2],
        ld: i32,
        (batch, stride): (i32, i64),
    ) -> Result<Self> {
        let kind = data_type(dtype)?;
        let this = Self(
            lt::create_matrix_layout(kind, rows as u64, columns as u64, ld.into())
                .map_err(Error::wrap)?,
        );
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        let (count, offset) = (
            Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
            Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
        );
        // SAFETY: the layout was made above, and the attributes are of these types.
        unsafe {
            lt::set_matrix_layout_attribute(this.0, count, raw(&batch), size_of_val(&batch))
                .map_err(Error::wrap)?;
            lt::set_matrix_layout_attribute(this.0, offset, raw(&stride), size_of_val(&stride))
                .map_err(Error::wrap)?;
        }
        Ok(this)
    }

    /// Of an operand of `k` by `other`, before it is transposed.
    fn operand(dtype: DType, it: &Operand, rows: i32, columns: i32, batch: i32) -> Result<Self> {
        use cudarc::cublas::sys::cublasOperation_t::CUBLAS_OP_T;
        let sizes = if it.operation == CUBLAS_OP_T { [columns, rows] } else { [rows, columns] };
        Self::of(dtype, sizes, it.ld, (batch, it.stride))
    }
}

fn raw<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

#[allow(unsafe_code)]
fn description(dtype: DType, a: &Operand, b: &Operand, bias: u64) -> Result<Description> {
    use sys::cublasComputeType_t as Compute;
    use sys::cublasLtMatmulDescAttributes_t as Attribute;
    let compute = match dtype {
        DType::F32 if crate::kernels::choice::tf32::allow_tf32() => {
            Compute::CUBLAS_COMPUTE_32F_FAST_TF32
        }
        _ => Compute::CUBLAS_COMPUTE_32F,
    };
    let scale = sys::cudaDataType_t::CUDA_R_32F;
    let this = Description(lt::create_matmul_desc(compute, scale).map_err(Error::wrap)?);
    let (a, b) = (a.operation as i32, b.operation as i32);
    let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
    let attributes = [
        (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, raw(&a), size_of_val(&a)),
        (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, raw(&b), size_of_val(&b)),
        (Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, raw(&epilogue), size_of_val(&epilogue)),
        (Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, raw(&bias), size_of_val(&bias)),
    ];
    for (attribute, value, size) in attributes {
        // SAFETY: the description was made above, and the attributes are of these types.
        unsafe { lt::set_matmul_desc_attribute(this.0, attribute, value, size) }
            .map_err(Error::wrap)?;
    }
    Ok(this)
}

#[allow(unsafe_code)]
fn preference(workspace: usize, alignments: [u64; 3]) -> Result<Preference> {
    use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
    let this = Preference(lt::create_matmul_pref().map_err(Error::wrap)?);
    // Parts of a sum are added up in F32.
    let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
    let [a, b, c] = alignments.map(|address| 1u32 << address.trailing_zeros().min(8));
    let attributes = [
        (
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            raw(&workspace),
            size_of_val(&workspace),
        ),
        (Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, raw(&scheme), size_of_val(&scheme)),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, raw(&a), size_of_val(&a)),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, raw(&b), size_of_val(&b)),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, raw(&c), size_of_val(&c)),
        (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, raw(&c), size_of_val(&c)),
    ];
    for (attribute, value, size) in attributes {
        // SAFETY: the preference was made above, and the attributes are of these types.
        unsafe { lt::set_matmul_pref_attribute(this.0, attribute, value, size) }
            .map_err(Error::wrap)?;
    }
    Ok(this)
}

impl Gpu {
    /// Computes `product` with `bias (n)`, contiguous and of the dtype of the output, added to every
    /// row. `false` where the library has no such product, and nothing was done.
    #[allow(unsafe_code)]
    pub(crate) fn biased_product(&self, product: &Product<'_>, bias: &Tensor) -> Result<bool> {
        thread_local!(static HANDLES: Handles<Handle> = RefCell::default());
        let new = |stream: Arc<CudaStream>| {
            let workspace = self.workspace()?;
            stream.context().bind_to_thread().w()?;
            Ok(Handle { handle: lt::create_handle().map_err(Error::wrap)?, workspace, stream })
        };
        let dtype = product.lhs.tensor.dtype();
        let bias = address(bias)?;
        if dtype == DType::F64 || !bias.is_multiple_of(16) {
            return Ok(false);
        }
        let handle = HANDLES.with(|handles| of(handles, self, new))?;
        let Sizes { batch, m, n, k, a, b, ldc, stride_c } = Sizes::of(product)?;
        let out = address(product.out.tensor)?;
        handle.stream.context().bind_to_thread().w()?; // of several devices, another one may be current
        let a_layout = Layout::operand(dtype, &a, n, k, batch)?;
        let b_layout = Layout::operand(dtype, &b, k, m, batch)?;
        let c_layout = Layout::of(product.out.tensor.dtype(), [n, m], ldc, (batch, stride_c))?;
        let description = description(dtype, &a, &b, bias)?;
        let size = handle.workspace.elem_count();
        let preference = preference(size, [a.address, b.address, out])?;
        let (one, zero) = (Scalar::of(DType::F32, 1.0), Scalar::of(DType::F32, 0.0));
        // SAFETY: all descriptors are alive.
        let found = unsafe {
            lt::get_matmul_algo_heuristic(
                handle.handle,
                description.0,
                a_layout.0,
                b_layout.0,
                c_layout.0,
                c_layout.0,
                preference.0,
            )
        };
        // Whatever the reason: it has asked the device for nothing yet, and what ails the device shows in the product
        // that runs instead.
        let Ok(found) = found else { return Ok(false) };
        // SAFETY: as in `Gpu::product`; besides, `n` elements of the bias are read, and the
        // workspace, which only products on this stream use, is written, as much as it has.
        let done = unsafe {
            lt::matmul(
                handle.handle,
                description.0,
                one.address(),
                zero.address(),
                a.address as *const c_void,
                a_layout.0,
                b.address as *const c_void,
                b_layout.0,
                out as *const c_void,
                c_layout.0,
                out as *mut c_void,
                c_layout.0,
                &found.algo,
                address(&handle.workspace)? as *mut c_void,
                size,
                handle.stream.cu_stream().cast(),
            )
        };
        match done {
            Err(lt::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => Ok(false),
            done => {
                done.map_err(Error::wrap)?;
                launched(&handle.stream);
                Ok(true)
            }
        }
    }
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    Ok(match dtype {
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        other => bail!("expected matrices of F16, BF16 or F32, got {other:?}"),
    })
}
