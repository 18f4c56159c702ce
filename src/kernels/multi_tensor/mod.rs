//! Works on gradients between backward and the step: checks, measures, clips. Each is one pass
//! over memory on the CPU, and none but the clipping of elements writes. What gradients are to be
//! multiplied by goes with them, to the optimizer's pass.
//!
//! Gradients are `F32` (`F64` for `F64` variables), contiguous, in storage of their own. Where they
//! are written they are taken and given back, because only on the CPU and on CUDA is that in place.

mod cpu;
mod cuda;
pub(crate) mod histogram;
mod multiplier;
pub(crate) mod optimizer;
mod portable;
mod scale;

use candle_core::{DType, Device, Error, Result, Tensor};

pub(crate) use multiplier::{Clip, Growth, Multiplier, Number};
pub(crate) use scale::DeviceScale;

use super::cuda::Gpu;
use crate::error::bail;
use crate::kernels::elementwise::portable::clamped;

/// A gradient, and what it is to be multiplied by.
pub(crate) type ScaledGradient<'a> = (&'a Tensor, &'a Multiplier);

/// Where a GPU counts what is not finite in a gradient, or says whether anything is in several.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFoundInf {
    /// `U32`: infinities and NaN of every gradient of a pass; or one number of [`any`], 0 where all are finite.
    counts: Tensor,
    at: usize,
}

impl DeviceFoundInf {
    /// Of one number, in a tensor of its own.
    pub(crate) fn of_one(found: Tensor) -> Self {
        Self { counts: found, at: 0 }
    }

    /// The tensor that the flag is in.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.counts
    }

    /// The same flag in another tensor.
    pub(crate) fn with_tensor(&self, counts: Tensor) -> Self {
        Self { counts, at: self.at }
    }

    /// Whether the flag of [`any`] is set. Synchronises.
    pub(crate) fn is_set(&self) -> Result<bool> {
        Ok(Gpu::to_host::<u32>(&self.counts)?.iter().any(|&found| found != 0))
    }

    /// Infinities and NaN of each of `flags`, read together where they are of one pass.
    pub(crate) fn read(flags: &[&Self]) -> Result<Vec<[usize; 2]>> {
        let mut passes: Vec<(candle_core::TensorId, Vec<u32>)> = Vec::new();
        let mut all = Vec::with_capacity(flags.len());
        for flag in flags {
            let id = flag.counts.id();
            if !passes.iter().any(|(pass, _)| *pass == id) {
                passes.push((id, Gpu::to_host(&flag.counts)?));
            }
            let counts = passes.iter().find(|(pass, _)| *pass == id).map(|(_, counts)| counts);
            let count = |i| counts.and_then(|c| c.get(2 * flag.at + i)).map_or(0, |&c| c as usize);
            all.push([count(0), count(1)]);
        }
        Ok(all)
    }
}

/// Whether a gradient, or one of several, holds an infinity or NaN: PyTorch's `found_inf`.
#[derive(Clone, Debug)]
pub(crate) enum FoundInf {
    Host(bool),
    /// On the GPU of the gradients. Reading it synchronises.
    Device(DeviceFoundInf),
}

/// The GPU that all of `tensors` are on.
pub(crate) fn gpu_of<'a>(tensors: &[&'a Tensor]) -> Result<Option<&'a Gpu>> {
    let Some(first) = tensors.first() else { return Ok(None) };
    let place = first.device().location();
    match tensors.iter().find(|other| other.device().location() != place) {
        None => Ok(Gpu::of(first.device())),
        Some(other) => bail!(
            "gradients on {place:?} and on {:?}: keep the variables of a scaler on one device",
            other.device().location()
        ),
    }
}

fn tensors<'a>(gradients: &[ScaledGradient<'a>]) -> Vec<&'a Tensor> {
    gradients.iter().map(|(gradient, _)| *gradient).collect()
}

fn on_cpu(gradients: &[&Tensor]) -> bool {
    gradients.iter().all(|gradient| gradient.device().is_cpu())
}

/// Which gradients hold an infinity or NaN when they are multiplied.
///
/// Checking the product, not the scaled value, catches an overflow of the product itself: with a
/// scale below 1 that happens, and PyTorch's kernel misses it.
///
/// # Synchronisation
///
/// None on CUDA; one read of all flags together on another GPU.
pub(crate) fn check(gradients: &[ScaledGradient<'_>]) -> Result<Vec<FoundInf>> {
    let all = tensors(gradients);
    if let Some(gpu) = gpu_of(&all)? {
        return Ok(cuda::check(gpu, gradients)?.into_iter().map(FoundInf::Device).collect());
    }
    let found = if on_cpu(&all) { cpu::check(gradients)? } else { portable::check(gradients)? };
    Ok(found.into_iter().map(FoundInf::Host).collect())
}

/// Multiplies the gradients.
pub(crate) fn apply_scale(
    gradients: Vec<Tensor>,
    multipliers: &[&Multiplier],
) -> Result<Vec<Tensor>> {
    let scaled_gradients: Vec<ScaledGradient<'_>> =
        gradients.iter().zip(multipliers.iter().copied()).collect();
    let all = tensors(&scaled_gradients);
    if let Some(gpu) = gpu_of(&all)? {
        cuda::apply_scale(gpu, &scaled_gradients)?;
    } else if on_cpu(&all) {
        cpu::apply_scale(&scaled_gradients)?;
    } else {
        return scaled_gradients.iter().map(|due| multiplied(*due)).collect();
    }
    Ok(gradients)
}

/// The product, out of candle's operators; nothing is written. No wait.
pub(crate) fn multiplied((gradient, by): ScaledGradient<'_>) -> Result<Tensor> {
    portable::multiplied(gradient, by)
}

/// Counts, on their GPU, the finite elements of `gradients` that `F16` rounds to infinity.
pub(crate) fn overflows_f16(gpu: &Gpu, gradients: &[&Tensor]) -> Result<Vec<DeviceFoundInf>> {
    cuda::overflows_f16(gpu, gradients)
}

/// Whether one of `flags`, of which there are some, counted anything: one `U32` on their GPU, 1 or 0.
pub(crate) fn any(flags: &[&DeviceFoundInf]) -> Result<DeviceFoundInf> {
    let counts: Vec<&Tensor> = flags.iter().map(|flag| &flag.counts).collect();
    match gpu_of(&counts)? {
        Some(gpu) => cuda::any(gpu, flags).map(DeviceFoundInf::of_one),
        None => bail!("flags are on a GPU, and there are some"),
    }
}

/// The ranks that have a share each of the gradients whose norm is wanted.
pub(crate) trait NormOfRanks {
    /// The sum of `squares` of all ranks.
    fn sum_of_squares(&self, squares: f64) -> Result<f64>;

    /// The norm of all ranks' gradients, where each rank's have this one: a scalar of its dtype on their device.
    fn norm(&self, norm: Tensor) -> Result<Tensor>;
}

/// A norm of gradients.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    /// To clip by: `F64` on the CPU and on CUDA, so that none of finite `F32` gradients is infinite.
    pub(crate) exact: Tensor,
    /// An `F32` scalar.
    pub(crate) rounded: Tensor,
}

/// The L2 norm of all gradients together, multiplied, and what [`check`] finds, in
/// the same pass. Squares are summed in `f64` on the CPU and on CUDA, in `F32` elsewhere. With `ranks`, the norm is of
/// the gradients of all of them, and what is found is this rank's.
pub(crate) fn norm(
    gradients: &[ScaledGradient<'_>],
    ranks: Option<&dyn NormOfRanks>,
) -> Result<(Norm, Vec<FoundInf>)> {
    let all = tensors(gradients);
    let of_ranks = |norm: Norm| match ranks {
        None => Ok(norm),
        Some(ranks) => {
            let exact = ranks.norm(norm.exact)?;
            Ok::<_, Error>(Norm { rounded: exact.to_dtype(DType::F32)?, exact })
        }
    };
    if let Some(gpu) = gpu_of(&all)? {
        let (norm, flags) = cuda::norm(gpu, gradients)?;
        Ok((of_ranks(norm)?, flags.into_iter().map(FoundInf::Device).collect()))
    } else if on_cpu(&all) {
        let squares = cpu::squares(gradients)?;
        let sum: f64 = squares.iter().map(|(sum, _)| sum).sum();
        let sum = ranks.map_or(Ok(sum), |ranks| ranks.sum_of_squares(sum))?;
        let found = squares.into_iter().map(|(_, found)| FoundInf::Host(found)).collect();
        let norm = sum.sqrt();
        let (exact, rounded) =
            (Tensor::new(norm, &Device::Cpu)?, Tensor::new(norm as f32, &Device::Cpu)?);
        Ok((Norm { exact, rounded }, found))
    } else {
        let norm = portable::norm(gradients)?;
        Ok((of_ranks(Norm { exact: norm.clone(), rounded: norm })?, check(gradients)?))
    }
}

/// Limits every element of every gradient to `-limit..=limit`. NaN stays NaN.
pub(crate) fn clip_value(gradients: Vec<Tensor>, limit: f64) -> Result<Vec<Tensor>> {
    let all: Vec<&Tensor> = gradients.iter().collect();
    if let Some(gpu) = gpu_of(&all)? {
        cuda::clip_value(gpu, &all, limit)?;
        Ok(gradients)
    } else if on_cpu(&all) {
        cpu::clip_value(&all, limit)?;
        Ok(gradients)
    } else {
        gradients.iter().map(|g| clamped(g, -limit, limit)).collect()
    }
}

#[cfg(test)]
mod tests;
