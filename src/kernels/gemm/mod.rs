//! Matrix products.

mod cpu;
mod cuda;
mod layout;
#[cfg(target_arch = "x86_64")]
pub(in crate::kernels) mod micro;
mod operand;
#[cfg(target_arch = "x86_64")]
mod packed;
mod portable;
mod product;
#[cfg(test)]
pub(super) mod tests;

use candle_core::{DType, Result, Tensor, bail};

pub(super) use cuda::add_bias;
pub(super) use operand::{Arithmetic, Source, narrow};
pub(super) use product::{Matrix, Threads, product};

use super::cuda::Gpu;
use crate::kernels::cpu::dtype::with_element;
#[cfg(target_arch = "x86_64")]
use crate::kernels::cpu::dtype::with_single;

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
    if let Some(gpu) = Gpu::of(lhs.device()) {
        return cuda::gemm(&gpu, lhs, rhs, bias, out);
    }
    if !lhs.device().is_cpu() {
        return portable::gemm(lhs, rhs, bias, out);
    }
    if arithmetic([Some(lhs), Some(rhs), bias]) == DType::F64 {
        let bias = bias.map(exact).transpose()?;
        return cpu::gemm::<f64>(&exact(lhs)?, &exact(rhs)?, bias.as_ref())?.to_dtype(out);
    }
    if out == DType::F64 {
        return gemm(lhs, rhs, bias, DType::F32)?.to_dtype(out);
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(isa) = packed::isa(lhs, rhs)
        && let Some(product) = with_single!(out, O => packed::gemm::<O>(lhs, rhs, bias, isa))?
    {
        return Ok(product);
    }
    with_element!(out, O => cpu::gemm::<O>(lhs, rhs, bias))
}

/// Whether a slice holds the product: operands that are repeated by strides of 0 may have more elements than memory.
fn check_size(lhs: &Tensor, rhs: &Tensor) -> Result<()> {
    let dims = lhs.dims().iter().rev().skip(1).chain(rhs.dims().last());
    let count = dims.clone().try_fold(1usize, |count, &size| count.checked_mul(size));
    if dims.clone().any(|&size| size == 0) || count.is_some_and(|count| count <= MOST) {
        return Ok(());
    }
    bail!(
        "the product of {:?} and {:?} has more elements than memory has addresses",
        lhs.shape(),
        rhs.shape()
    )
}

/// Elements that a slice can have, of any dtype.
const MOST: usize = isize::MAX as usize / 8;

/// What a product of these tensors is computed in: F64 where one of them is F64, else F32.
pub(super) fn arithmetic<const N: usize>(operands: [Option<&Tensor>; N]) -> DType {
    let double = operands.iter().flatten().any(|operand| operand.dtype() == DType::F64);
    if double { DType::F64 } else { DType::F32 }
}

/// `tensor` in F64, detached.
pub(super) fn exact(tensor: &Tensor) -> Result<Tensor> {
    tensor.detach().to_dtype(DType::F64)
}
