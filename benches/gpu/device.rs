//! What is asked of a device that candle does not ask: a plain copy, its name; and its memory.

use anyhow::Result;
use candle_amp::backend::{empty_cache, memory_stats, reset_peak_memory_stats};
use candle_amp_benches::measure::{Runner, seconds};
use candle_core::Device;

#[cfg(feature = "cuda")]
use cuda as gpu;
#[cfg(not(feature = "cuda"))]
use no_cuda as gpu;

/// Copies within a run, so that starting the first one and waiting for the last count for little.
const COPIES: usize = 20;

/// Copies of `bytes` from one place on the device to another.
pub(crate) fn copy(bytes: usize, device: &Device) -> Result<Runner> {
    let mut copy = match gpu::copy(bytes, device)? {
        Some(copy) => copy,
        None => {
            let (from, mut into) = (vec![1u8; bytes], vec![0u8; bytes]);
            Box::new(move || {
                into.copy_from_slice(std::hint::black_box(&from));
                Ok(())
            })
        }
    };
    let device = device.clone();
    Ok(Box::new(move || {
        device.synchronize()?;
        let all = seconds(|| {
            (0..COPIES).try_for_each(|_| copy())?;
            Ok(device.synchronize()?)
        })?;
        Ok(all / COPIES as f64)
    }))
}

/// What it is.
pub(crate) fn name(device: &Device) -> Result<String> {
    Ok(gpu::name(device)?.unwrap_or_else(|| "CPU".into()))
}

/// Gives back what is not in use, and forgets how much was at most before now; `false` where nobody counts.
pub(crate) fn peak_from_here(device: &Device) -> Result<bool> {
    device.synchronize()?;
    // On an H200 rows after a graph seemed to count the memory that it had.
    Ok(empty_cache(device).is_ok() && reset_peak_memory_stats(device).is_ok())
}

/// The most bytes that tensors and graphs have had since, without what the CUDA libraries keep for themselves.
pub(crate) fn peak(device: &Device) -> Result<Option<f64>> {
    let peak = memory_stats(device)?.map(|memory| memory.peak_used as f64);
    Ok(peak.filter(|bytes| *bytes > 0.0)) // 0 where the driver does not count
}

/// Does one copy.
type Copy = Box<dyn FnMut() -> Result<()>>;

#[cfg(feature = "cuda")]
mod cuda {
    use anyhow::Result;
    use candle_core::Device;

    use super::Copy;

    pub(super) fn copy(bytes: usize, device: &Device) -> Result<Option<Copy>> {
        let Device::Cuda(device) = device else { return Ok(None) };
        let stream = device.cuda_stream();
        let (from, mut into) = (stream.alloc_zeros::<u8>(bytes)?, stream.alloc_zeros::<u8>(bytes)?);
        Ok(Some(Box::new(move || Ok(stream.memcpy_dtod(&from, &mut into)?))))
    }

    pub(super) fn name(device: &Device) -> Result<Option<String>> {
        let Device::Cuda(device) = device else { return Ok(None) };
        Ok(Some(device.cuda_stream().context().name()?))
    }
}

/// As the other, of a machine without one.
#[cfg(not(feature = "cuda"))]
mod no_cuda {
    use anyhow::Result;
    use candle_core::Device;

    use super::Copy;

    pub(super) fn copy(_: usize, _: &Device) -> Result<Option<Copy>> {
        Ok(None)
    }

    pub(super) fn name(_: &Device) -> Result<Option<String>> {
        Ok(None)
    }
}
