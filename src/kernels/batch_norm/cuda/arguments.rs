//! What the kernels of both layouts take: statistics, what follows, and scratch for partial results.

use candle_core::{Result, Tensor};

use crate::kernels::batch_norm::affine::{Finish, Rectifier};
use crate::kernels::batch_norm::statistics::{Running, Statistics};
use crate::kernels::cuda::Launch;

/// The places of partial results in [`Gpu::scratch`](crate::kernels::cuda::Gpu::scratch): of parts of
/// channels, and of channels.
pub(super) const PARTS: usize = 5;
pub(super) const FACTORS: usize = 6;

impl Rectifier {
    /// What kernels know it by.
    pub(super) fn code(self) -> i32 {
        match self {
            Self::Relu => 1,
            Self::Relu6 => 3,
        }
    }
}

impl<'a> Finish<'a> {
    /// The residual, and what kernels know it by.
    pub(super) fn parts(self) -> (Option<&'a Tensor>, i32) {
        match self {
            Self::Plain => (None, 0),
            Self::Rectified(by) => (None, by.code()),
            Self::AddRelu(residual) => (Some(residual), 2),
        }
    }
}

impl Statistics {
    /// Adds all three for `kernel` to write.
    pub(super) fn written(&self, kernel: Launch) -> Result<Launch> {
        kernel.parts(&self.0, 3, [Self::MEAN, Self::VAR, Self::INV_STD])
    }
}

/// The statistics that `x` was normalised by.
#[derive(Clone, Copy)]
pub(super) enum NormalisedBy<'a> {
    /// Of the batch itself, so that the gradient passes through them.
    Batch(&'a Statistics),
    Running(Running<'a>),
}

impl NormalisedBy<'_> {
    /// Adds the mean for `kernel` to read, and the spread: `1 / std` of a batch, else the variance. A running one is
    /// in the dtype of the arithmetic.
    pub(super) fn read(self, kernel: Launch) -> Result<Launch> {
        match self {
            Self::Batch(Statistics(all)) => {
                kernel.parts(all, 3, [Statistics::MEAN, Statistics::INV_STD])
            }
            Self::Running(Running { mean, var, .. }) => kernel.read(mean)?.read(var),
        }
    }

    /// The spread alone.
    pub(super) fn read_spread(self, kernel: Launch) -> Result<Launch> {
        match self {
            Self::Batch(Statistics(all)) => kernel.parts(all, 3, [Statistics::INV_STD]),
            Self::Running(Running { var, .. }) => kernel.read(var),
        }
    }

    /// Whether they are of the batch, and epsilon.
    pub(super) fn settings(self) -> (i32, f64) {
        match self {
            Self::Batch(_) => (1, 0.0),
            Self::Running(Running { eps, .. }) => (0, eps),
        }
    }
}
