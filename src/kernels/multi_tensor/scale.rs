//! A loss scale that lives on a GPU, and what the host has yet to learn of it.

use candle_core::{Result, Tensor, TensorId};

use super::cuda;
use super::multiplier::{Growth, Number};
use crate::kernels::capture;
use crate::kernels::cuda::Gpu;

/// The scale, its inverse and its two trackers on a GPU, which moves them. A log has the flags that
/// moved them: the host's own copy of the rule follows it when somebody asks.
#[derive(Debug)]
pub(crate) struct DeviceScale {
    gpu: Gpu,
    /// Five words of 32 bits: scale, inverse, growth tracker, hysteresis tracker, and how many updates there were.
    state: Tensor,
    /// `U32`, the flag of each update: a ring, written where the number of the update says.
    log: Tensor,
    updates: usize,
    /// Of these, those that the host has not read.
    unread: usize,
}

impl DeviceScale {
    /// Updates that the log holds: the host has to read at least that often.
    pub(crate) const LOG: usize = 1024;

    /// On `gpu`, in the state that the host has.
    pub(crate) fn new(gpu: &Gpu, scale: f32, inverse: f32, trackers: [u32; 2]) -> Result<Self> {
        let words = [scale.to_bits(), inverse.to_bits(), trackers[0], trackers[1], 0];
        let state = cuda::upload(&gpu.device(), words)?;
        let log = gpu.empty(Self::LOG, candle_core::DType::U32)?;
        Ok(Self { gpu: gpu.clone(), state, log, updates: 0, unread: 0 })
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Scale, inverse and trackers, as the kernel has them.
    #[cfg(test)]
    pub(super) fn state(&self) -> Result<Tensor> {
        self.state.narrow(0, 0, 4)
    }

    /// Another one than before after each move to a device.
    pub(crate) fn id(&self) -> TensorId {
        self.state.id()
    }

    /// Its inverse, which the device moves with it.
    pub(crate) fn inverse(&self) -> Result<Number> {
        Ok(Number::Device(self.state.narrow(0, 1, 1)?))
    }

    /// The scale itself, `F32`, one element.
    pub(crate) fn scale(&self) -> Result<Tensor> {
        self.state.narrow(0, 0, 1)
    }

    /// A copy of the scale as it is now.
    pub(crate) fn snapshot(&self) -> Result<Number> {
        self.scale()?.copy().map(Number::Device)
    }

    /// Moves the scale by `found`, one `U32`. In a capture the host notes nothing: each replay does.
    pub(crate) fn update(&mut self, found: &Tensor, rule: &Growth) -> Result<()> {
        cuda::update_scale(&self.gpu, &self.state, found, &self.log, rule)?;
        if !capture::is_active() {
            self.updated();
        }
        Ok(())
    }

    /// Notes an update that the device makes.
    pub(crate) fn updated(&mut self) {
        (self.updates, self.unread) = (self.updates + 1, self.unread + 1);
    }

    /// Whether the log is full: the next update needs a [`read`](Self::read) before it.
    pub(crate) fn is_full(&self) -> bool {
        self.unread == Self::LOG
    }

    /// The flags since the last call. Waits, where there are any.
    pub(crate) fn read(&mut self) -> Result<Vec<bool>> {
        if self.unread == 0 {
            return Ok(Vec::new());
        }
        let first = (self.updates - self.unread) % Self::LOG;
        let wraps = first + self.unread > Self::LOG;
        let (from, len) = if wraps { (0, Self::LOG) } else { (first, self.unread) };
        let flags = Gpu::to_host::<u32>(&self.log.narrow(0, from, len)?)?;
        let flag = |number: usize| flags.get((first + number) % Self::LOG - from) != Some(&0);
        let all = (0..self.unread).map(flag).collect();
        self.unread = 0;
        Ok(all)
    }
}
