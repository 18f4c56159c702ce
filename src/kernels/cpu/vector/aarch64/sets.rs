//! NEON: whether it may be used, and what it is called.

use crate::kernels::cpu::limit::Limit;
use crate::kernels::cpu::vector::names::{Names, names};

/// The instruction sets that vectors are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    Neon,
}

impl Vectors {
    /// Each is wider than those before it.
    pub(in crate::kernels) const ALL: [Self; 1] = [Self::Neon];

    /// What packs BF16, and F32 as sums of it, where a processor multiplies them: no kernel of this target does yet.
    pub(in crate::kernels) fn for_bf16() -> Self {
        Self::Neon
    }

    /// Whether the processor has what [`Vector`](crate::kernels::cpu::vector::Vector) asks for, and it may be used.
    pub(in crate::kernels) fn is_available(self) -> bool {
        Limit::get() >= Limit::Neon
    }

    /// Whether registers hold a square of sixteen vectors.
    pub(in crate::kernels) fn hold_squares(self) -> bool {
        false
    }

    /// Whether large F32 products are blocked, not the `gemm` crate's: where that was measured to be faster.
    pub(in crate::kernels) fn multiply_in_blocks(self) -> bool {
        false
    }

    pub(in crate::kernels) fn names(self) -> Names {
        names!("neon")
    }
}
