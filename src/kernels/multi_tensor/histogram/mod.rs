//! Histogram of a gradient's elements: counts by exponent, and of zeros, infinities and NaN.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use candle_core::{DType, Device, Result, Tensor};

use crate::kernels::accumulator;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;

/// The exponents counted one by one; what lies beyond counts as the last. `F32` has -149 to 127, and
/// a scale moves them by 127 at most.
pub(crate) const LOWEST: i32 = -300;
pub(crate) const HIGHEST: i32 = 300;
pub(crate) const BINS: usize = (HIGHEST - LOWEST + 1) as usize;

/// Elements by `floor(log2(|x|))`, from [`LOWEST`] up. Each count is three: a power of two itself;
/// what lies between; and from 2 - 2⁻¹¹ times the power on, which `F16` rounds to the next. So the
/// edges of `F16`, after a scale that is a power of two, are edges of the counts.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Counts {
    pub(crate) bins: Vec<[u64; 3]>,
    pub(crate) zero: u64,
    pub(crate) infinite: u64,
    pub(crate) nan: u64,
}

impl Default for Counts {
    fn default() -> Self {
        Self { bins: vec![[0; 3]; BINS], zero: 0, infinite: 0, nan: 0 }
    }
}

impl Counts {
    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.bins.iter_mut().zip(&other.bins) {
            for (mine, theirs) in mine.iter_mut().zip(theirs) {
                *mine += theirs;
            }
        }
        self.zero += other.zero;
        self.infinite += other.infinite;
        self.nan += other.nan;
    }
}

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
