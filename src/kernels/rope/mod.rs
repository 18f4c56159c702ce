//! Rotary position embedding: pairs of elements turned by an angle of their position.
//!
//! Cosines and sines are `(positions, d / 2)`, or `(b, positions, d / 2)` for positions of each
//! batch its own, of any float dtype; there are at least as many as `x` has positions.

mod cpu;
mod cuda;
mod form;
mod portable;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

pub(crate) use form::Form;

use crate::kernels::accumulator;
use crate::kernels::cast;
use crate::kernels::cuda::Gpu;

/// `x`, of any strides, with its pairs turned; backwards where `back`. In `out`.
pub(crate) fn rotate(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    form: Form,
    back: bool,
    out: DType,
) -> Result<Tensor> {
    if let Some(gpu) = Gpu::of(x.device()) {
        return cuda::rotate(gpu, &x.detach(), [cos, sin], form, back, out);
    }
    let wide = accumulator(x.dtype());
    let (x, cos, sin) = (x.detach(), cast(cos, wide)?, cast(sin, wide)?);
    // Backwards is forwards with the sines' signs changed.
    let sin = if back { sin.neg()? } else { sin };
    if x.device().is_cpu() {
        cpu::rotate(&x, &cos, &sin, form, out)
    } else {
        portable::rotate(&x, &cos, &sin, form, out)
    }
}
