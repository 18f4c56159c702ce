//! The vectors of ARM's processors of 64 bits, which all have NEON.

mod neon;

use super::{Names, Vector};
use crate::kernels::cpu::limit::Limit;
pub(in crate::kernels) use neon::Neon;

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

    /// Whether the processor has what [`Vector`] asks for, and it may be used.
    pub(in crate::kernels) fn is_available(self) -> bool {
        Limit::get() >= Limit::Neon
    }

    /// Whether registers hold a square of sixteen vectors.
    pub(in crate::kernels) fn hold_squares(self) -> bool {
        false
    }

    pub(in crate::kernels) fn names(self) -> Names {
        super::names!("neon")
    }
}

/// See [`super`].
macro_rules! with_vectors {
    ($vectors:expr, $V:ident => $body:expr) => {
        match $vectors {
            $crate::kernels::cpu::vector::Vectors::Neon => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Neon;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
        }
    };
}
pub(in crate::kernels) use with_vectors;

/// See [`super`].
macro_rules! with_bf16_vectors {
    ($V:ident => $body:expr) => {
        $crate::kernels::cpu::vector::with_vectors!(
            $crate::kernels::cpu::vector::Vectors::for_bf16(), $V => $body
        )
    };
}
pub(in crate::kernels) use {with_bf16_vectors, with_bf16_vectors as with_ftz_vectors};
