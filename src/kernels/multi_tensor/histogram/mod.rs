//! Histogram of a gradient's elements: counts by exponent, and of zeros, infinities and NaN.

mod counts;
mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result, Tensor};

pub(crate) use counts::{Counts, LOWEST};

use crate::kernels::accumulator;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// The elements of `tensor`, floating point, times `factor`, by their exponents. The product is
/// taken in `F32` (`F64` for `F64`).
///
/// # Synchronisation
///
/// One read of the counts on a GPU. From other devices all is copied to the CPU.
pub(crate) fn exponents(tensor: &Tensor, factor: f32) -> Result<Counts> {
    if let Some(gpu) = Gpu::of(tensor.device()) {
        return cuda::exponents(gpu, &plain(tensor)?, factor);
    }
    let dtype = accumulator(tensor.dtype());
    let tensor = tensor.detach().to_device(&Device::Cpu)?.to_dtype(dtype)?.contiguous()?;
    match dtype {
        DType::F64 => cpu::exponents::<f64>(&tensor, factor),
        _ => cpu::exponents::<f32>(&tensor, factor),
    }
}

/// How many elements of `tensor`, `F32` or `F64` and contiguous, are infinite, and how many NaN.
///
/// # Synchronisation
///
/// One read on a GPU.
pub(crate) fn non_finite(tensor: &Tensor) -> Result<[usize; 2]> {
    if let Some(gpu) = Gpu::of(tensor.device()) {
        let counts = cuda::exponents(gpu, &plain(tensor)?, 1.0)?;
        return Ok([counts.infinite as usize, counts.nan as usize]);
    }
    match (tensor.device().is_cpu(), tensor.dtype()) {
        (true, DType::F64) => cpu::non_finite::<f64>(tensor),
        (true, _) => cpu::non_finite::<f32>(tensor),
        (false, _) => portable_non_finite(tensor),
    }
}

fn portable_non_finite(tensor: &Tensor) -> Result<[usize; 2]> {
    let count = |mask: Tensor| mask.to_dtype(DType::U32)?.sum_all();
    let infinite = count(tensor.abs()?.eq(f64::INFINITY)?)?;
    let nan = count(tensor.ne(tensor)?)?;
    let counts = Tensor::stack(&[infinite, nan], 0)?.to_vec1::<u32>()?;
    Ok([counts[0] as usize, counts[1] as usize])
}
