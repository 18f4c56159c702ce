//! The stand-in for `cuda` without the feature of that name: the same items, and never a device.

mod cache;
mod convolution;
mod grid;
mod many;
#[path = "nccl/absent.rs"]
mod nccl;
mod once;
mod product;
mod strided;
mod threads;

use crate::error::{CaptureError, bail};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Result, Shape, Tensor};

pub(crate) use convolution::{Bias, Convolution, PassKind};
pub(crate) use grid::{Grid, pack, suffix};
pub(crate) use many::Many;
pub(crate) use nccl::{Combine, Event, HAS_NCCL, ID, Id, Link, Step, new_id};
pub(crate) use product::{Matrices, Product};
pub(crate) use strided::Strided;

#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) code: &'static str,
}

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

pub(crate) fn len(_: &CudaStorage) -> usize {
    usize::MAX
}

pub(crate) fn keep(_: &CudaDevice) -> Result<()> {
    bail!("this program was built without the feature `cuda`")
}

pub(crate) fn statistics(_: &CudaDevice) -> Result<[u64; 4]> {
    bail!("this program was built without the feature `cuda`")
}

pub(crate) fn forget_peaks(device: &CudaDevice) -> Result<()> {
    keep(device)
}

pub(crate) fn trim(device: &CudaDevice) -> Result<()> {
    keep(device)
}

pub(crate) fn of_one(_: &CudaStorage) -> Result<CudaStorage> {
    bail!("this program was built without the feature `cuda`")
}

pub(crate) fn take(_: &mut CudaStorage) -> Result<CudaStorage> {
    bail!("this program was built without the feature `cuda`")
}

pub(crate) fn address(_: &Tensor) -> Result<u64> {
    bail!("this program was built without the feature `cuda`")
}

pub(crate) fn is_aligned(tensor: &Tensor) -> Result<bool> {
    address(tensor).map(|address| address.is_multiple_of(16))
}

pub(crate) fn start(tensor: &Tensor) -> Result<u64> {
    address(tensor)
}

pub(crate) fn address_mut(tensor: &Tensor) -> Result<u64> {
    address(tensor)
}

/// What takes the place of a kernel's name.
#[derive(Debug)]
pub(crate) struct Name;

impl<const N: usize> From<[&'static str; N]> for Name {
    fn from(_: [&'static str; N]) -> Self {
        Self
    }
}

impl From<&'static str> for Name {
    fn from(_: &'static str) -> Self {
        Self
    }
}

/// Never made, as no [`Gpu`] is; but not empty, so that what follows a launch counts as reachable.
#[derive(Debug)]
pub(crate) struct Launch;

impl Launch {
    pub(crate) fn read(self, _: &Tensor) -> Result<Self> {
        Ok(self)
    }

    pub(crate) fn write(self, _: &Tensor) -> Result<Self> {
        Ok(self)
    }

    pub(crate) fn write_new(self, _: &Tensor) -> Result<Self> {
        Ok(self)
    }

    pub(crate) fn read_strided(self, _: &Tensor) -> Result<Self> {
        Ok(self)
    }

    pub(crate) fn write_strided(self, _: &Tensor) -> Result<Self> {
        Ok(self)
    }

    pub(crate) fn parts<const N: usize>(self, _: &Tensor, _: usize, _: [usize; N]) -> Result<Self> {
        Ok(self)
    }

    pub(crate) fn read_or_null(self, _: Option<&Tensor>) -> Result<Self> {
        Ok(self)
    }

    pub(crate) fn write_or_null(self, _: Option<&Tensor>) -> Result<Self> {
        Ok(self)
    }

    pub(crate) fn size(self, _: usize) -> Self {
        self
    }

    pub(crate) fn sizes(self, _: &[usize]) -> Self {
        self
    }

    pub(crate) fn address(self, _: u64) -> Self {
        self
    }

    pub(crate) fn int(self, _: i32) -> Self {
        self
    }

    pub(crate) fn float(self, _: f32) -> Self {
        self
    }

    pub(crate) fn double(self, _: f64) -> Self {
        self
    }

    pub(crate) fn table(self, _: Table) -> Self {
        self
    }

    pub(crate) fn run(self, _: Grid) -> Result<()> {
        Ok(())
    }
}

/// As the one of `launch.rs`.
#[derive(Clone, Debug)]
pub(crate) struct Table;

impl Table {
    pub(crate) const WORDS: usize = 4064;

    pub(crate) fn new(_: &[u64]) -> Self {
        Self
    }
}
