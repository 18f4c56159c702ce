//! What a gradient is to be multiplied by, which is left to whoever reads it next: a scale, on the host or on a device, and
//! a clip. Also the settings by which a device moves its scale.

use candle_core::{DType, Result, Tensor};

use crate::error::bail;
use crate::kernels::cuda::{Gpu, address};

/// A scale or its inverse.
#[derive(Clone, Debug)]
pub(crate) enum Number {
    Host(f32),
    /// `F32`, one element, on the device of the gradients.
    Device(Tensor),
}

impl Number {
    /// The number. Synchronises if it is on a device.
    pub(crate) fn read(&self) -> Result<f32> {
        match self {
            Self::Host(number) => Ok(*number),
            Self::Device(number) => {
                Ok(Gpu::to_host::<f32>(number)?.first().copied().unwrap_or(f32::NAN))
            }
        }
    }
}

/// When a scale moves: the settings of `ScaleConfig`, as the kernel takes them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    pub(crate) growth_factor: f64,
    pub(crate) backoff_factor: f64,
    pub(crate) growth_interval: u32,
    pub(crate) hysteresis: u32,
    pub(crate) min_scale: f32,
    pub(crate) max_scale: f32,
}

/// `min(1, max_norm / (norm + 1e-6))`, as PyTorch's `clip_grad_norm_`; NaN where `norm` is.
#[derive(Clone, Debug)]
pub(crate) struct Clip {
    /// A scalar, perhaps still on its way: `F64` on the CPU and on CUDA.
    pub(crate) norm: Tensor,
    pub(crate) max_norm: f64,
}

/// Two factors. Each product is rounded to the dtype of the gradient, so that it makes no difference
/// when it is taken.
#[derive(Clone, Debug)]
pub(crate) struct Multiplier {
    pub(crate) inverse: Number,
    pub(crate) clip: Option<Clip>,
}

impl Multiplier {
    pub(crate) const ONE: Self = Self { inverse: Number::Host(1.0), clip: None };

    pub(crate) fn new(inverse: Number) -> Self {
        Self { inverse, clip: None }
    }

    /// Whether it is 1, as far as the host knows.
    pub(crate) fn is_one(&self) -> bool {
        matches!(self, Self { inverse: Number::Host(1.0), clip: None })
    }

    /// The factors, of a gradient on the CPU.
    pub(crate) fn on_host(&self) -> Result<[f64; 2]> {
        let inverse = match &self.inverse {
            Number::Host(inverse) => f64::from(*inverse),
            Number::Device(_) => bail!("a scale on another device than gradients"),
        };
        let clip = match &self.clip {
            Some(Clip { norm, max_norm }) => {
                max_norm / (norm.to_dtype(DType::F64)?.to_scalar::<f64>()? + 1e-6)
            }
            None => 1.0,
        };
        // A NaN norm must reach the gradients: `min` would hide it.
        Ok([inverse, if clip >= 1.0 { 1.0 } else { clip }])
    }

    /// The same factors on a GPU, from the host.
    #[cfg(test)]
    pub(crate) fn on(&self, device: &candle_core::Device) -> Result<Self> {
        let [inverse, _] = self.on_host()?;
        let clip = match &self.clip {
            Some(Clip { norm, max_norm }) => {
                let norm = norm.to_dtype(DType::F64)?.to_device(device)?;
                Some(Clip { norm, max_norm: *max_norm })
            }
            None => None,
        };
        let state = Tensor::new(&[0.0, inverse as f32, 0.0, 0.0], device)?;
        Ok(Self { inverse: Number::Device(state.narrow(0, 1, 1)?), clip })
    }

    /// `Multiplier` of `many.cuh`.
    pub(crate) fn words(&self) -> Result<[u64; 4]> {
        let (inverse_at, inverse) = match &self.inverse {
            Number::Host(inverse) => (0, f64::from(*inverse)),
            Number::Device(inverse) => (address(inverse)?, 1.0),
        };
        let (norm, max_norm) = match &self.clip {
            Some(Clip { norm, .. }) if norm.dtype() != DType::F64 => {
                bail!("a kernel reads a norm of F64, not of {:?}", norm.dtype())
            }
            Some(Clip { norm, max_norm }) => (address(norm)?, *max_norm),
            None => (0, 0.0),
        };
        Ok([inverse_at, inverse.to_bits(), norm, max_norm.to_bits()])
    }
}

/// A gradient, and what it is to be multiplied by.
pub(crate) type ScaledGradient<'a> = (&'a Tensor, &'a Multiplier);

/// The gradients themselves.
pub(super) fn tensors<'a>(gradients: &[ScaledGradient<'a>]) -> Vec<&'a Tensor> {
    gradients.iter().map(|(gradient, _)| *gradient).collect()
}
