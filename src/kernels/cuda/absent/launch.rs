//! The stand-in for launches: a kernel's source and its arguments, which nobody reads.

use candle_core::{Result, Tensor};

use crate::kernels::cuda::grid::Grid;

#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) code: &'static str,
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

/// Never made, as no [`Gpu`](crate::kernels::cuda::Gpu) is; but not empty, so that what follows a launch counts as
/// reachable.
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

/// As `Table` in `cuda/launch.rs`.
#[derive(Clone, Debug)]
pub(crate) struct Table;

impl Table {
    pub(crate) const WORDS: usize = 4064;

    pub(crate) fn new(_: Vec<u64>) -> Self {
        Self
    }
}
