//! What is done with a GPU's memory once a tensor is dropped.

use candle_core::Device;

use crate::Result;
use crate::kernels::cuda;

/// Keeps memory that tensors on `device` have left for the next ones, as PyTorch does: for this process, from
/// here on. Without it the driver takes all of that back whenever the host waits, as it does to read a loss,
/// and the next step has to ask for it again, in milliseconds.
///
/// `nvidia-smi` then shows the most that was ever in use, and other processes cannot have it. Does nothing
/// without a GPU.
///
/// # Errors
///
/// A driver that has no memory pools.
///
/// # Examples
///
/// ```
/// # fn main() -> candle_amp::Result<()> {
/// let device = candle_core::Device::cuda_if_available(0)?;
/// candle_amp::backend::keep_memory(&device)?;
/// # Ok(())
/// # }
/// ```
///
/// # References
///
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` of the CUDA driver; PyTorch's caching allocator.
pub fn keep_memory(device: &Device) -> Result<()> {
    match device {
        Device::Cuda(device) => Ok(cuda::keep(device)?),
        _ => Ok(()),
    }
}
