//! Matrix products.

mod blocked;
mod cpu;
mod cuda;
mod layout;
mod matrix;
pub(in crate::kernels) mod micro;
mod operand;
mod packed;
mod portable;
mod product;
#[cfg(test)]
pub(super) mod tests;

use candle_core::{DType, Result, Tensor};

pub(super) use cuda::add_bias;
pub(super) use matrix::Matrix;
pub(super) use operand::{Arithmetic, ElementsAs, arithmetic, narrow};
pub(super) use product::{CUT, Threads, product};

use super::choice::algorithm::chosen;
use super::cuda::Gpu;
use super::tensors::MOST_ELEMENTS;
use crate::error::bail;
use crate::kernels::cpu::dtype::with_single;
use crate::kernels::cpu::dtype::{is_near, with_element};
use crate::kernels::cpu::vector::Vectors;

/// The batched product `(…,m,k) × (…,k,n) [+ bias (n)] → (…,m,n)`.
///
/// Every argument is F16, BF16, F32 or F64, not necessarily the same → F64 where one of them is
/// F64, else F32 → rounded once to `out`. The leading dimensions are equal. A transposed or
/// broadcast operand is read through its strides. `k = 0` gives the bias, or zeros. On a GPU, F32 is
/// TF32 inside where [`crate::backend::set_allow_tf32`] says so.
pub(crate) fn gemm(
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
    out: DType,
) -> Result<Tensor> {
    check_size(lhs, rhs)?;
    let near = if is_near(lhs.dtype(), out) { out } else { DType::F32 };
    let product = match Algorithm::of(lhs, rhs, bias) {
        Algorithm::Cuda(gpu) => return cuda::gemm(gpu, lhs, rhs, bias, out),
        Algorithm::Portable => return portable::gemm(lhs, rhs, bias, out),
        Algorithm::GemmCrateF64 => {
            let bias = bias.map(exact).transpose()?;
            cpu::gemm::<f64>(&exact(lhs)?, &exact(rhs)?, bias.as_ref())?
        }
        Algorithm::Packed(isa) => {
            match with_single!(near, O => packed::gemm::<O>(lhs, rhs, bias, isa))? {
                Some(product) => product,
                None => {
                    let name = Algorithm::of_f32(lhs, rhs).name();
                    chosen("gemm", name, &[lhs.shape(), rhs.shape()]);
                    with_element!(near, O => cpu::gemm::<O>(lhs, rhs, bias))?
                }
            }
        }
        Algorithm::GemmCrate | Algorithm::Blocked(_) => {
            with_element!(near, O => cpu::gemm::<O>(lhs, rhs, bias))?
        }
    };
    product.to_dtype(out)
}

/// How a product is computed.
enum Algorithm<'a> {
    Cuda(&'a Gpu),
    /// By candle's operators, on devices that this crate has no kernels for.
    Portable,
    /// By the `gemm` crate, in F64.
    GemmCrateF64,
    /// The same in F32.
    GemmCrate,
    /// In blocks, by these vectors.
    Blocked(Vectors),
    /// By packed GEMM, and again in F32 where a BF16x3 sum is not finite.
    Packed(micro::InstructionSet),
}

impl<'a> Algorithm<'a> {
    fn of(lhs: &'a Tensor, rhs: &Tensor, bias: Option<&Tensor>) -> Self {
        let algorithm = Self::choose(lhs, rhs, bias);
        chosen("gemm", algorithm.name(), &[lhs.shape(), rhs.shape()]);
        algorithm
    }

    fn choose(lhs: &'a Tensor, rhs: &Tensor, bias: Option<&Tensor>) -> Self {
        if let Some(gpu) = Gpu::of(lhs.device()) {
            return Self::Cuda(gpu);
        }
        if !lhs.device().is_cpu() {
            return Self::Portable;
        }
        if arithmetic([Some(lhs), Some(rhs), bias]) == DType::F64 {
            return Self::GemmCrateF64;
        }
        if let Some(isa) = packed::isa(lhs, rhs) {
            return Self::Packed(isa);
        }
        Self::of_f32(lhs, rhs)
    }

    /// Of operands that are F32, or are widened to it.
    fn of_f32(lhs: &Tensor, rhs: &Tensor) -> Self {
        let [rows, depth] = lhs.dims()[lhs.rank() - 2..] else { return Self::GemmCrate };
        let columns = rhs.dims()[rhs.rank() - 1];
        let turned = || {
            [lhs, rhs].map(|side| cpu::Operand::column_stride(side).is_ok_and(|stride| stride != 1))
        };
        blocked::vectors([rows, depth, columns], turned).map_or(Self::GemmCrate, Self::Blocked)
    }

    /// What a trace shows.
    fn name(&self) -> &'static str {
        match self {
            Self::Cuda(_) => "cublas",
            Self::Portable => "candle",
            Self::GemmCrateF64 => "gemm crate, f64",
            Self::GemmCrate => "gemm crate",
            Self::Blocked(vectors) => vectors.names().blocked,
            Self::Packed(isa) => isa.name(),
        }
    }
}

/// Whether a slice holds the product: operands that are repeated by strides of 0 may have more elements than memory.
fn check_size(lhs: &Tensor, rhs: &Tensor) -> Result<()> {
    let dims = lhs.dims().iter().rev().skip(1).chain(rhs.dims().last());
    let count = dims.clone().try_fold(1usize, |count, &size| count.checked_mul(size));
    if dims.clone().any(|&size| size == 0) || count.is_some_and(|count| count <= MOST_ELEMENTS) {
        return Ok(());
    }
    bail!(
        "the product of {:?} and {:?} has more elements than memory has addresses",
        lhs.shape(),
        rhs.shape()
    )
}

/// `tensor` in F64, detached.
pub(super) fn exact(tensor: &Tensor) -> Result<Tensor> {
    tensor.detach().to_dtype(DType::F64)
}
