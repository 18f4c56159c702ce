//! The engine for tensors on a device.

use std::sync::Arc;

use candle_core::Device;

use super::communicator::Communicator;
use super::environment::{from_environment, is_launched};
use super::nccl::Nccl;
use crate::error::Result;
use crate::kernels::cuda::HAS_NCCL;

/// The engine for tensors on `device`, for how this process was started: several processes that each have a CUDA device
/// exchange tensors by [`Nccl`] (feature `nccl`). All else is as [`from_environment`] says.
///
/// # Errors
///
/// As [`from_environment`] and [`Nccl::init`].
pub fn from_environment_on(device: &Device) -> Result<Arc<dyn Communicator>> {
    match device {
        Device::Cuda(_) if HAS_NCCL && is_launched()? => Nccl::init(device),
        _ => from_environment(),
    }
}
