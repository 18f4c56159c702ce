//! AVX2 and AVX-512: which of them a processor has, and what they are called.

use std::sync::LazyLock;

use crate::kernels::cpu::limit::Limit;
use crate::kernels::cpu::vector::names::{Names, names};

/// The instruction sets that vectors are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    Avx2,
    Avx512,
}

impl Vectors {
    /// Each is wider than those before it.
    pub(in crate::kernels) const ALL: [Self; 2] = [Self::Avx2, Self::Avx512];

    /// What packs BF16, and F32 as sums of it: AVX-512, which every processor that multiplies them has. Tests pack for
    /// the stand-in of tile registers, and with AVX2 where there is no AVX-512.
    pub(in crate::kernels) fn for_bf16() -> Self {
        if cfg!(test) && !Self::Avx512.is_available() { Self::Avx2 } else { Self::Avx512 }
    }

    // Not inlined: it is asked before every loop, and was a part of each.
    /// Whether the processor has what [`Vector`](crate::kernels::cpu::vector::Vector) asks for, and it may be used.
    #[inline(never)]
    pub(in crate::kernels) fn is_available(self) -> bool {
        static AVAILABLE: LazyLock<[bool; 2]> = LazyLock::new(|| {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            [avx2 && Limit::get() >= Limit::Avx2, avx512 && Limit::get() >= Limit::Avx512]
        });
        AVAILABLE[self as usize]
    }

    /// Whether registers hold a square of sixteen vectors.
    pub(in crate::kernels) fn hold_squares(self) -> bool {
        self == Self::Avx512
    }

    /// Whether large F32 products can be blocked, not the `gemm` crate's: where that was measured to be faster.
    pub(in crate::kernels) fn multiply_in_blocks(self) -> bool {
        true
    }

    pub(in crate::kernels) fn names(self) -> Names {
        match self {
            Self::Avx2 => names!("avx2"),
            Self::Avx512 => names!("avx512"),
        }
    }
}
