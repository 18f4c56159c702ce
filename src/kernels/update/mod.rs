//! What happens to gradients between backward and the step: unscale and check, clip. Each is one
//! pass over memory on the CPU.
//!
//! Gradients are `F32` (`F64` for `F64` variables), contiguous, in storage of their own; they are
//! taken and given back, because only on the CPU and on CUDA are they written in place.

mod cpu;
mod cuda;
mod portable;
mod scale;

use candle_core::{Device, Result, Tensor, bail};

pub(crate) use scale::{DeviceScale, Growth};

use super::cuda::Gpu;

/// What gradients are multiplied by.
#[derive(Clone, Debug)]
pub(crate) enum Factor {
    Host(f32),
    /// The inverse of a scale that is on their device: [`DeviceScale`]'s state.
    Device(Tensor),
}

/// Where a device counts what is not finite in a gradient.
#[derive(Clone, Debug)]
pub(crate) struct Flag {
    /// `U32`, infinities and NaN of every gradient of a pass.
    counts: Tensor,
    at: usize,
}

impl Flag {
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

/// Whether a gradient holds an infinity or NaN.
#[derive(Clone, Debug)]
pub(crate) enum Found {
    Host(bool),
    Device(Flag),
}

/// The GPU that all of `tensors` are on.
pub(crate) fn gpu_of(tensors: &[&Tensor]) -> Result<Option<Gpu>> {
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

/// Multiplies every gradient by `factor` and tells which hold an infinity or NaN afterwards.
///
/// Checking the product, not the scaled value, catches an overflow of the product itself: with a
/// scale below 1 that happens, and PyTorch's kernel misses it.
///
/// # Synchronisation
///
/// None on CUDA; one read of all flags together on another GPU.
pub(crate) fn unscale(
    gradients: Vec<Tensor>,
    factor: &Factor,
) -> Result<(Vec<Tensor>, Vec<Found>)> {
    let all: Vec<&Tensor> = gradients.iter().collect();
    if let Some(gpu) = gpu_of(&all)? {
        let flags = cuda::unscale(&gpu, &all, factor)?;
        return Ok((gradients, flags.into_iter().map(Found::Device).collect()));
    }
    let Factor::Host(inverse) = *factor else { bail!("a scale on another device than gradients") };
    let (gradients, flags) = if all.iter().all(|g| g.device().is_cpu()) {
        let flags = gradients.iter().map(|g| cpu::unscale(g, inverse)).collect::<Result<_>>()?;
        (gradients, flags)
    } else {
        portable::unscale(gradients, inverse)?
    };
    Ok((gradients, flags.into_iter().map(Found::Host).collect()))
}

/// Counts, on their GPU, the finite elements of `gradients` that `F16` rounds to infinity.
pub(crate) fn overflows_f16(gpu: &Gpu, gradients: &[&Tensor]) -> Result<Vec<Flag>> {
    cuda::overflows_f16(gpu, gradients)
}

/// One `U32` on their GPU: 1 where one of `flags`, of which there are some, counted anything, else 0.
pub(crate) fn any(flags: &[&Flag]) -> Result<Tensor> {
    let counts: Vec<&Tensor> = flags.iter().map(|flag| &flag.counts).collect();
    match gpu_of(&counts)? {
        Some(gpu) => cuda::any(&gpu, flags),
        None => bail!("flags are on a GPU, and there are some"),
    }
}

/// The L2 norm of all gradients together, an `F32` scalar; squares are summed in `f64` on the CPU
/// and on CUDA, in `F32` elsewhere.
pub(crate) fn norm(gradients: &[&Tensor]) -> Result<Tensor> {
    if let Some(gpu) = gpu_of(gradients)? {
        cuda::norm(&gpu, gradients)
    } else if gradients.iter().all(|g| g.device().is_cpu()) {
        let squares = gradients.iter().map(|g| cpu::sum_of_squares(g)).sum::<Result<f64>>()?;
        Tensor::new(squares.sqrt() as f32, &Device::Cpu)
    } else {
        portable::norm(gradients)
    }
}

/// Multiplies every gradient by `min(1, max_norm / (norm + 1e-6))`, as PyTorch's
/// `clip_grad_norm_`. No wait: `norm` may be on its way.
pub(crate) fn clip_norm(
    gradients: Vec<Tensor>,
    norm: &Tensor,
    max_norm: f64,
) -> Result<Vec<Tensor>> {
    // Only measured. A norm beyond `F32` is infinite, and would make NaN of finite gradients.
    if max_norm.is_infinite() {
        return Ok(gradients);
    }
    let all: Vec<&Tensor> = gradients.iter().collect();
    if let Some(gpu) = gpu_of(&all)? {
        cuda::clip_norm(&gpu, &all, norm, max_norm)?;
        Ok(gradients)
    } else if all.iter().all(|g| g.device().is_cpu()) {
        let factor = max_norm / (f64::from(norm.to_scalar::<f32>()?) + 1e-6);
        // A NaN norm must reach the gradients: `min` would hide it.
        if factor < 1.0 || factor.is_nan() {
            gradients.iter().try_for_each(|g| cpu::multiply(g, factor))?;
        }
        Ok(gradients)
    } else {
        portable::clip_norm(gradients, norm, max_norm)
    }
}

/// Limits every element of every gradient to `-limit..=limit`. NaN stays NaN.
pub(crate) fn clip_value(gradients: Vec<Tensor>, limit: f64) -> Result<Vec<Tensor>> {
    let all: Vec<&Tensor> = gradients.iter().collect();
    if let Some(gpu) = gpu_of(&all)? {
        cuda::clip_value(&gpu, &all, limit)?;
        Ok(gradients)
    } else if all.iter().all(|g| g.device().is_cpu()) {
        gradients.iter().try_for_each(|g| cpu::clip_value(g, limit))?;
        Ok(gradients)
    } else {
        gradients.iter().map(|g| g.clamp(-limit, limit)).collect()
    }
}

#[cfg(test)]
mod tests;
