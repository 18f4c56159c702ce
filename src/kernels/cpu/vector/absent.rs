//! No vectors, on targets that this crate knows none of: there loops are the compiler's, and products the `gemm` crate's.

use super::names::Names;

/// None.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {}

impl Vectors {
    pub(in crate::kernels) const ALL: [Self; 0] = [];

    pub(in crate::kernels) fn for_bf16() -> Self {
        unreachable!("this target has no vectors")
    }

    pub(in crate::kernels) fn is_available(self) -> bool {
        match self {}
    }

    pub(in crate::kernels) fn hold_squares(self) -> bool {
        match self {}
    }

    /// Whether large F32 products are blocked, not the `gemm` crate's: where that was measured to be faster.
    pub(in crate::kernels) fn multiply_in_blocks(self) -> bool {
        match self {}
    }

    pub(in crate::kernels) fn names(self) -> Names {
        match self {}
    }
}

/// The body is compiled for no set.
macro_rules! with_vectors {
    ($vectors:expr, $V:ident => $body:expr) => {
        match $vectors {}
    };
}
pub(in crate::kernels) use with_vectors;

macro_rules! with_bf16_vectors {
    ($V:ident => $body:expr) => {
        match $crate::kernels::cpu::vector::Vectors::for_bf16() {}
    };
}
pub(in crate::kernels) use {with_bf16_vectors, with_bf16_vectors as with_ftz_vectors};
