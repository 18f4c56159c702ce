//! What a pass over gradients finds: infinities and NaN, and the norm.

use candle_core::{Result, Tensor, TensorId};

use crate::kernels::cuda::Gpu;

/// Where a GPU counts what is not finite in a gradient, or says whether anything is in several.
#[derive(Clone, Debug)]
pub(crate) struct DeviceFoundInf {
    /// `U32`: infinities and NaN of every gradient of a pass; or one number of [`any`](super::any), 0 where
    /// all are finite.
    pub(super) counts: Tensor,
    pub(super) at: usize,
}

impl DeviceFoundInf {
    /// Of one number, in a tensor of its own.
    pub(crate) fn of_one(found: Tensor) -> Self {
        Self { counts: found, at: 0 }
    }

    /// Whether both are one flag.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.at == other.at && self.counts.id() == other.counts.id()
    }

    /// The tensor that the flag is in.
    pub(crate) fn tensor(&self) -> &Tensor {
        &self.counts
    }

    /// The same flag in another tensor.
    pub(crate) fn with_tensor(&self, counts: Tensor) -> Self {
        Self { counts, at: self.at }
    }

    /// Whether the flag of [`any`](super::any) is set. Synchronises.
    pub(crate) fn is_set(&self) -> Result<bool> {
        Ok(Gpu::to_host::<u32>(&self.counts)?.iter().any(|&found| found != 0))
    }

    /// Infinities and NaN of each of `flags`, read together where they are of one pass.
    pub(crate) fn read(flags: &[&Self]) -> Result<Vec<[usize; 2]>> {
        let mut passes: Vec<(TensorId, Vec<u32>)> = Vec::new();
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

/// Whether a gradient, or one of several, holds an infinity or NaN: PyTorch's `found_inf`.
#[derive(Clone, Debug)]
pub(crate) enum FoundInf {
    Host(bool),
    /// On the GPU of the gradients. Reading it synchronises.
    Device(DeviceFoundInf),
}

/// A norm of gradients.
#[derive(Clone, Debug)]
pub(crate) struct Norm {
    /// To clip by: `F64` on the CPU and on CUDA, so that none of finite `F32` gradients is infinite.
    pub(crate) exact: Tensor,
    /// An `F32` scalar.
    pub(crate) rounded: Tensor,
}
