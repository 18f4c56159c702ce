//! The memory of a convolution: where its tensors are, and what an algorithm may use beside them.

use std::ffi::c_void;

use candle_core::{Result, Tensor};

use crate::kernels::cuda::address;

/// Bytes that an algorithm may use beside its tensors.
pub(super) const WORKSPACE: usize = 256 << 20;
/// The place of that in [`Gpu::scratch`](crate::kernels::cuda::Gpu::scratch).
pub(super) const PLACE: usize = 3;

/// The addresses of a convolution's tensors: input, weight, output.
#[derive(Clone, Copy)]
pub(super) struct Addresses(pub(super) [u64; 3]);

impl Addresses {
    pub(super) fn of([input, weight, output]: [&Tensor; 3]) -> Result<Self> {
        Ok(Self([address(input)?, address(weight)?, address(output)?]))
    }

    pub(super) fn at(self, index: usize) -> *mut c_void {
        self.0[index] as *mut c_void
    }
}
