//! GPU memory: caches it once a tensor is dropped, gives it back, and counts it.

use candle_core::Device;

use crate::Result;
use crate::kernels::cuda;

/// Keeps memory that tensors on `device` have left for the next ones, as PyTorch does: for this process, from
/// here on. Without it the driver takes all of that back whenever the host waits, as it does to read a loss.
/// The next step then has to ask for it again, in milliseconds.
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

/// What the driver's memory pool of a GPU holds, in bytes: candle's tensors, this crate's, and those of graphs. What CUDA's
/// libraries keep for themselves is not among it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// What tensors have now: `torch.cuda.memory_allocated`.
    pub used: u64,
    /// What the driver has for them, used or kept: `torch.cuda.memory_reserved`.
    pub reserved: u64,
    /// The most that tensors had: `torch.cuda.max_memory_allocated`. With graphs, the sum of both peaks, which may be of two
    /// moments.
    pub peak_used: u64,
    /// The most that the driver had: `torch.cuda.max_memory_reserved`. With graphs, as `peak_used`.
    pub peak_reserved: u64,
}

/// How much memory is in use on `device`, by all threads of this process; `None` where it is no CUDA device.
///
/// Host and device disagree by what is on its way: synchronise the device first for numbers that are the same each time.
///
/// # Errors
///
/// A driver that has no memory pools.
///
/// # Examples
///
/// ```
/// use candle_amp::backend::memory_stats;
///
/// let device = candle_core::Device::cuda_if_available(0)?;
/// if let Some(memory) = memory_stats(&device)? {
///     println!("{} MiB at most", memory.peak_used >> 20);
/// }
/// # Ok::<(), candle_amp::Error>(())
/// ```
pub fn memory_stats(device: &Device) -> Result<Option<MemoryStats>> {
    let Device::Cuda(device) = device else { return Ok(None) };
    let [used, reserved, peak_used, peak_reserved] = cuda::statistics(device)?;
    Ok(Some(MemoryStats { used, reserved, peak_used, peak_reserved }))
}

/// Has [`memory_stats`] count its peaks from now on: `torch.cuda.reset_peak_memory_stats`. Does nothing without a GPU.
///
/// # Errors
///
/// A driver that has no memory pools.
pub fn reset_peak_memory_stats(device: &Device) -> Result<()> {
    match device {
        Device::Cuda(device) => Ok(cuda::forget_peaks(device)?),
        _ => Ok(()),
    }
}

/// Gives back to the driver what no tensor has, for other processes: `torch.cuda.empty_cache`. Does nothing without a GPU.
///
/// When memory runs out, this crate's kernels do so by themselves, and ask once more.
///
/// # Synchronisation
///
/// Waits for the device.
///
/// # Errors
///
/// A driver that has no memory pools.
pub fn empty_cache(device: &Device) -> Result<()> {
    match device {
        Device::Cuda(device) => Ok(cuda::trim(device)?),
        _ => Ok(()),
    }
}
