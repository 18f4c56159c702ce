//! The statistics that channels are normalised by: those of the batch, or running ones.

use candle_core::{Result, Tensor};

use crate::kernels::cat;

/// What a batch's normalisation was made from: three vectors, one after the other in one tensor, so that a GPU
/// allocates once and the host makes no views.
#[derive(Clone, Debug)]
pub(crate) struct Statistics(pub(super) Tensor);

impl Statistics {
    /// Where the vectors are among three.
    pub(super) const MEAN: usize = 0;
    pub(super) const VAR: usize = 1;
    pub(super) const INV_STD: usize = 2;

    /// Of vectors of one dtype.
    pub(crate) fn new(mean: &Tensor, var: &Tensor, inv_std: &Tensor) -> Result<Self> {
        cat(&[mean.clone(), var.clone(), inv_std.clone()], 0).map(Self)
    }

    fn vector(&self, at: usize) -> Result<Tensor> {
        let channels = self.0.elem_count() / 3;
        self.0.narrow(0, at * channels, channels)
    }

    pub(crate) fn mean(&self) -> Result<Tensor> {
        self.vector(Self::MEAN)
    }

    /// The biased variance: the mean square distance from the mean.
    pub(crate) fn var(&self) -> Result<Tensor> {
        self.vector(Self::VAR)
    }

    /// `1 / sqrt(var + eps)`
    pub(crate) fn inv_std(&self) -> Result<Tensor> {
        self.vector(Self::INV_STD)
    }
}

/// Statistics to normalise by that are not the batch's own: constants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Running<'a> {
    pub(crate) mean: &'a Tensor,
    pub(crate) var: &'a Tensor,
    /// Added to the variance.
    pub(crate) eps: f64,
}
