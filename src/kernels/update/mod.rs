//! What happens to gradients between backward and the step: unscale and check, clip. Each is one
//! pass over memory on the CPU.
//!
//! Gradients are `F32` (`F64` for `F64` variables), contiguous, in storage of their own; they are
//! taken and given back, because only on the CPU are they written in place.

mod cpu;
mod portable;

use candle_core::{Device, Result, Tensor};

/// Multiplies every gradient by `inverse` and tells which hold an infinity or NaN afterwards.
///
/// Checking the product, not the scaled value, catches an overflow of the product itself: with a
/// scale below 1 that happens, and PyTorch's kernel misses it.
///
/// # Synchronisation
///
/// One read of all flags together on a GPU.
pub(crate) fn unscale(gradients: Vec<Tensor>, inverse: f32) -> Result<(Vec<Tensor>, Vec<bool>)> {
    if gradients.iter().all(|g| g.device().is_cpu()) {
        let flags = gradients.iter().map(|g| cpu::unscale(g, inverse)).collect::<Result<_>>()?;
        Ok((gradients, flags))
    } else {
        portable::unscale(gradients, inverse)
    }
}

/// The L2 norm of all gradients together, an `F32` scalar; squares are summed in `f64` on the CPU,
/// in `F32` elsewhere.
pub(crate) fn norm(gradients: &[&Tensor]) -> Result<Tensor> {
    if gradients.iter().all(|g| g.device().is_cpu()) {
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
    if gradients.iter().all(|g| g.device().is_cpu()) {
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
    if gradients.iter().all(|g| g.device().is_cpu()) {
        gradients.iter().try_for_each(|g| cpu::clip_value(g, limit))?;
        Ok(gradients)
    } else {
        gradients.iter().map(|g| g.clamp(-limit, limit)).collect()
    }
}

#[cfg(test)]
mod tests;
