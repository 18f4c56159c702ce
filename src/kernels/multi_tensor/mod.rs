//! Works on gradients between backward and the step: checks, measures, clips. Each is one pass
//! over memory on the CPU, and only two write: the clipping of elements, and [`apply_scale`] for optimizers that do not
//! multiply. What gradients are to be multiplied by goes with them, to the optimizer's pass.
//!
//! Gradients are `F32` (`F64` for `F64` variables), contiguous, in storage of their own. Where they
//! are written they are taken and given back, because only on the CPU and on CUDA is that in place.

mod cpu;
mod cuda;
mod found;
pub(crate) mod histogram;
mod multiplier;
pub(crate) mod optimizer;
mod portable;
mod scale;

use candle_core::{DType, Device, Error, Result, Tensor};

pub(crate) use found::{DeviceFoundInf, FoundInf, Norm};
pub(crate) use multiplier::{Clip, Growth, Multiplier, Number, ScaledGradient};
pub(crate) use scale::DeviceScale;

use crate::error::bail;
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::portable::clamped;
use crate::kernels::ordered;
use multiplier::tensors;

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

/// The gradient multiplied, in other memory where that changes it. No wait on CUDA.
pub(crate) fn unscaled((gradient, by): ScaledGradient<'_>) -> Result<Tensor> {
    if by.is_one() {
        return Ok(gradient.clone());
    }
    let copy = ordered(gradient.device(), || gradient.copy())?;
    let mut multiplied = apply_scale(vec![copy], &[by])?;
    Ok(multiplied.swap_remove(0))
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
