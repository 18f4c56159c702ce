//! The stand-in for `nccl` without the feature of that name: no ranks.

mod step;

use candle_core::{Error, Tensor};

use crate::kernels::cuda::gpu::Gpu;
pub(crate) use step::{Combine, Step};

type Result<T, E = Error> = std::result::Result<T, E>;

/// Whether this program has NCCL.
pub(crate) const HAS_NCCL: bool = false;

/// The bytes of an [`Id`].
pub(crate) const ID: usize = 128;
pub(crate) type Id = [u8; ID];

const ABSENT: &str =
    "this program was built without the feature `nccl` of candle-amp, which needs a CUDA device";

pub(crate) fn new_id() -> Result<Id, String> {
    Err(ABSENT.to_owned())
}

#[derive(Debug)]
enum Never {}

/// Never made, as no [`Link`] is.
#[derive(Debug)]
pub(crate) struct Event(Never);

impl Event {
    pub(crate) fn is_done(&self) -> Result<bool, String> {
        match self.0 {}
    }
}

#[derive(Debug)]
pub(crate) struct Link(Never);

impl Link {
    pub(crate) fn new(
        _: &Gpu,
        _: &Id,
        [_, _]: [usize; 2],
        [_, _]: [usize; 2],
    ) -> Result<Self, String> {
        Err(ABSENT.to_owned())
    }

    pub(crate) fn is_settled(&self) -> Result<bool, String> {
        match self.0 {}
    }

    pub(crate) fn wait_for(&self, _: &Event) -> Result<(), String> {
        match self.0 {}
    }

    pub(crate) fn record(&self) -> Result<Event, String> {
        match self.0 {}
    }

    pub(crate) fn start(&self, _: &Step) -> Result<(), String> {
        match self.0 {}
    }

    pub(crate) fn start_headers(&self, _: usize, _: &[u8]) -> Result<(), String> {
        match self.0 {}
    }

    pub(crate) fn fetch_headers(&self, _: usize) -> Result<(), String> {
        match self.0 {}
    }

    pub(crate) fn headers(&self, _: usize) -> Vec<u8> {
        match self.0 {}
    }

    pub(crate) fn fetch_overflow(&self, _: usize) -> Result<(), String> {
        match self.0 {}
    }

    pub(crate) fn has_overflown(&self, _: usize) -> bool {
        match self.0 {}
    }

    pub(crate) fn start_to_leave(&self) -> Result<(), String> {
        match self.0 {}
    }

    pub(crate) fn leave(self) -> Result<(), String> {
        match self.0 {}
    }
}

impl Gpu {
    pub(crate) fn record(&self) -> Result<Event> {
        crate::error::bail!("{ABSENT}")
    }

    pub(crate) fn wait_for(&self, event: &Event) -> Result<()> {
        match event.0 {}
    }

    pub(crate) fn copy(&self, _: &Tensor, _: &Tensor) -> Result<()> {
        crate::error::bail!("{ABSENT}")
    }
}
