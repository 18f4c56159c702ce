//! The stand-in for a device, of which there is none.

use candle_core::{DType, Device, Result, Shape, Tensor};

use super::launch::{Launch, Name, Source};
use crate::error::{CaptureError, bail};
use crate::kernels::cuda::convolution::{Bias, Convolution, PassKind};
use crate::kernels::cuda::product::Product;

/// No CUDA device. Its field is private, so that what follows one counts as reachable elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct Gpu(Never);

#[derive(Clone, Debug)]
enum Never {}

/// Never made, as no [`Gpu`] is.
#[derive(Debug)]
pub(crate) struct Graph;

pub(crate) fn reads() -> u64 {
    0
}

impl Gpu {
    pub(crate) fn of(_: &Device) -> Option<&Self> {
        None
    }

    pub(crate) fn device(&self) -> Device {
        match self.0 {}
    }

    pub(crate) fn compute_capability(&self) -> Result<(i32, i32)> {
        match self.0 {}
    }

    pub(crate) fn launch(&self, source: &'static Source, _: impl Into<Name>) -> Result<Launch> {
        let _ = (source.name, source.code);
        match self.0 {}
    }

    pub(crate) fn empty(&self, _: impl Into<Shape>, _: DType) -> Result<Tensor> {
        match self.0 {}
    }

    pub(crate) fn ordered<T>(&self, _: impl FnOnce() -> Result<T>) -> Result<T> {
        match self.0 {}
    }

    pub(crate) fn wait_for_all_threads(&self) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn vectors<const N: usize>(&self, _: usize, _: DType) -> Result<[Tensor; N]> {
        match self.0 {}
    }

    pub(crate) fn scratch(&self, _: usize, _: usize, _: DType) -> Result<Tensor> {
        match self.0 {}
    }

    pub(crate) fn scratch_from(&self, _: usize, _: usize, _: DType) -> Result<Tensor> {
        match self.0 {}
    }

    pub(crate) fn kept_scratch(&self) -> Vec<Tensor> {
        match self.0 {}
    }

    pub(crate) fn rehearse<T>(&self, _: impl FnOnce() -> T) -> T {
        match self.0 {}
    }

    pub(crate) fn capture<T>(
        &self,
        _: impl FnOnce() -> crate::Result<T>,
    ) -> crate::Result<(T, Graph), CaptureError> {
        match self.0 {}
    }

    pub(crate) fn replay(&self, _: &Graph) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn upload(_: &Tensor, _: &[u64]) -> Result<()> {
        bail!("this program was built without the feature `cuda`")
    }

    pub(crate) fn has_convolutions(&self) -> bool {
        match self.0 {}
    }

    pub(crate) fn convolution(
        &self,
        _: PassKind,
        _: &Convolution,
        [_, _, _]: [&Tensor; 3],
        _: Option<&Bias<'_>>,
    ) -> Result<Option<&'static str>> {
        match self.0 {}
    }

    pub(crate) fn padded(&self, _: &Tensor, _: usize) -> Result<Tensor> {
        match self.0 {}
    }

    pub(crate) fn zeros(&self, _: impl Into<Shape>, _: DType) -> Result<Tensor> {
        match self.0 {}
    }

    pub(crate) fn product(&self, _: &Product<'_>) -> Result<()> {
        match self.0 {}
    }

    pub(crate) fn biased_product(&self, _: &Product<'_>, _: &Tensor) -> Result<bool> {
        match self.0 {}
    }

    pub(crate) fn to_host<T: candle_core::WithDType>(tensor: &Tensor) -> Result<Vec<T>> {
        tensor.flatten_all()?.to_vec1()
    }
}

#[cfg(test)]
impl Gpu {
    pub(crate) fn name(&self) -> Result<String> {
        match self.0 {}
    }
}
