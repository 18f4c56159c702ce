//! Matrix products on CUDA, by cuBLAS and cuBLASLt.
//!
//! Operands of one dtype are multiplied in it, others in F32 (F64 where one is F64). The libraries read transposed and
//! batched operands by their strides; other layouts are copied, see [`readable`]. If all matrices of a batch share the
//! right operand, the batch is one product with more rows.
//!
//! Every result is rounded once. cuBLASLt adds the bias if it can, and if the dtype that it writes holds the bias
//! exactly. Otherwise the product is written in F32 (F64), and [`add_bias`] adds the bias and rounds.

use candle_core::{DType, Result, Tensor};

use super::layout::readable;
use super::operand::arithmetic;
use crate::error::bail;
use crate::kernels::choice::algorithm::{chosen, fell_back};
use crate::kernels::cuda::{Gpu, Grid, Matrices, Product, Source, pack, suffix};
use crate::kernels::{cast, in_dtype};

static SOURCE: Source = Source { name: "gemm", code: include_str!("gemm.cu") };

/// See [`super::gemm`]. One cuBLAS product. cuBLASLt adds the bias if it can. Operands of one dtype with contiguous
/// rows or columns are not copied.
pub(super) fn gemm(
    gpu: &Gpu,
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
    out: DType,
) -> Result<Tensor> {
    let wide = arithmetic([Some(lhs), Some(rhs), bias]);
    let keeps_dtype = lhs.dtype() == rhs.dtype() && wide == DType::F32;
    let dtype = if keeps_dtype { lhs.dtype() } else { wide };
    if dtype == DType::BF16 && gpu.compute_capability()? < (8, 0) {
        bail!(
            "a product of BF16 tensors needs a GPU of compute capability 8.0 (Ampere) or later, this \
             one has {:?}: use F16, with a gradient scaler",
            gpu.compute_capability()?
        )
    }
    let (lhs, rhs) = (in_dtype(lhs, dtype)?, in_dtype(rhs, dtype)?);
    let (mut shape, n) = (lhs.dims().to_vec(), rhs.dims()[rhs.rank() - 1]);
    let last = shape.len() - 1;
    let (m, k) = (shape[last - 1], shape[last]);
    shape[last] = n;
    let count: usize = shape.iter().product();
    if count == 0 {
        return gpu.empty(shape, out);
    }
    if k == 0 {
        let bias = bias.map(|bias| cast(bias, wide)).transpose()?;
        return add_bias(gpu, None, bias.as_ref(), wide, shape, out);
    }

    let ((lhs, left), (rhs, right)) = (readable(&lhs)?, readable(&rhs)?);
    let into = |out: DType| gpu.empty(shape.as_slice(), out);
    // What cuBLAS writes: the dtype of what it reads, or F32.
    let near = if out == dtype { dtype } else { wide };
    let product = |y: &Tensor, bias: Option<&Tensor>| {
        let (mut batch, mut m) = (count / (m * n), m);
        // One matrix for all rows of the batch: a single product.
        if right.stride == 0 && !left.transposed && left.stride == m * left.ld {
            (batch, m) = (1, batch * m);
        }
        let (lhs, rhs) = (left.of_matrices(&lhs), right.of_matrices(&rhs));
        let out = Matrices { tensor: y, transposed: false, ld: n, stride: m * n };
        let product = Product { batch, m, k, n, lhs, rhs, out };
        match bias {
            Some(bias) => {
                let done = gpu.biased_product(&product, bias)?;
                match done {
                    true => chosen("gemm", "cublaslt", &[m, k, n]),
                    false if dtype == DType::F64 => {}
                    false => fell_back("gemm", "cublaslt", "cublas", &[m, k, n]),
                }
                Ok(done)
            }
            None => gpu.product(&product).map(|()| true),
        }
    };
    let Some(bias) = bias else {
        let y = into(near)?;
        product(&y, None)?;
        return in_dtype(&y, out);
    };
    if bias.dtype() == near || near == DType::F32 {
        let (y, bias) = (into(near)?, in_dtype(bias, near)?.contiguous()?);
        if product(&y, Some(&bias))? {
            return in_dtype(&y, out);
        }
    }
    let (y, bias) = (into(wide)?, in_dtype(bias, wide)?.contiguous()?);
    product(&y, None)?;
    add_bias(gpu, Some(&y), Some(&bias), wide, shape, out)
}

/// `x + bias`, in `out`: `x` is of the shape, or zeros, and both are `wide` and contiguous.
pub(in crate::kernels) fn add_bias(
    gpu: &Gpu,
    x: Option<&Tensor>,
    bias: Option<&Tensor>,
    wide: DType,
    shape: Vec<usize>,
    out: DType,
) -> Result<Tensor> {
    let (y, n) = (gpu.empty(shape.as_slice(), out)?, shape[shape.len() - 1]);
    let count = y.elem_count();
    // Element `i < count` of `x` and `y`, and `i % n` of the bias, which has `n`.
    gpu.launch(&SOURCE, ["bias", suffix(wide)?, suffix(out)?])?
        .write_new(&y)?
        .read_or_null(x)?
        .read_or_null(bias)?
        .size(count)
        .size(n)
        .run(Grid::over(count, pack(wide, out)))?;
    Ok(y)
}
