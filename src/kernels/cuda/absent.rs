//! The stand-in for `cuda` without the feature of that name: the same items, and never a device.

mod cache;
mod convolution;
#[path = "absent/gpu.rs"]
mod gpu;
mod grid;
#[path = "absent/launch.rs"]
mod launch;
mod many;
#[path = "nccl/absent.rs"]
mod nccl;
mod once;
mod product;
mod strided;
mod threads;

use candle_core::{CudaDevice, CudaStorage, Result, Tensor};

use crate::error::bail;

pub(crate) use convolution::{Bias, Convolution, PassKind};
pub(crate) use gpu::{Gpu, Graph, reads};
pub(crate) use grid::{Grid, pack, suffix};
pub(crate) use launch::{Launch, Source};
pub(crate) use many::Many;
pub(crate) use nccl::{Combine, Event, HAS_NCCL, ID, Id, Link, Step, new_id};
pub(crate) use product::{Matrices, Product};
pub(crate) use strided::Strided;

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
