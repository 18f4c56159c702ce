//! Which instruction sets this processor has, and which are the best.

use std::sync::LazyLock;

use candle_core::{DType, Tensor};

use super::calibrate::bf16_over_f32;
use super::isa::InstructionSet;
use super::target;
use crate::kernels::cpu::limit::{Limit, VARIABLE};
use crate::kernels::cpu::vector::Vectors;

impl InstructionSet {
    /// The best for products of these tensors; `None` where [`product`](super::super::product) is.
    pub(in crate::kernels) fn of<const N: usize>(operands: [&Tensor; N]) -> Option<Self> {
        let bf16 = operands.iter().all(|operand| operand.dtype() == DType::BF16);
        if bf16 { Self::best_for_bf16() } else { Self::best_for_f32() }
    }

    /// The best for products of BF16.
    pub(in crate::kernels) fn best_for_bf16() -> Option<Self> {
        static BEST: LazyLock<Option<InstructionSet>> = LazyLock::new(|| {
            let tiles = Some(InstructionSet::AmxBf16).filter(|isa| isa.is_available());
            tiles.or_else(avx512_bf16).or_else(InstructionSet::best_for_f32)
        });
        *BEST
    }

    /// The best for products of F32, and of F16 widened.
    pub(in crate::kernels) fn best_for_f32() -> Option<Self> {
        Vectors::widest().map(Self::F32)
    }

    /// Why [`Self::best_for_bf16`] is what it is.
    pub(in crate::kernels) fn bf16_reason() -> String {
        let ratio = || {
            bf16_over_f32()
                .map(|ratio| format!("AVX512-BF16 takes {ratio:.2} times as long as F32: measured"))
        };
        match Self::best_for_bf16() {
            Some(Self::AmxBf16 | Self::AmxBf16x3) => {
                "tile registers, which the system grants".to_owned()
            }
            _ if is_asked_for() => format!("{VARIABLE} asks for it"),
            _ => ratio().unwrap_or_else(|| match Limit::get() {
                limit if limit < Limit::Avx512Bf16 && target::has_bf16() => {
                    format!("{VARIABLE}={limit} allows no instructions for BF16: widened to F32")
                }
                _ => "without instructions for BF16: widened to F32".to_owned(),
            }),
        }
    }

    /// Those of F32 that this processor has.
    #[cfg(test)]
    pub(in crate::kernels) fn of_f32() -> impl Iterator<Item = Self> {
        Vectors::ALL.into_iter().filter(|set| set.is_available()).map(Self::F32)
    }

    pub(in crate::kernels) fn is_available(self) -> bool {
        match self {
            Self::F32(vectors) => vectors.is_available(),
            Self::Avx512Bf16 => target::has_pairs(),
            Self::AmxBf16 | Self::AmxBf16x3 => target::has_tiles(),
        }
    }

    /// Whether products can be computed with it: in tests also where a stand-in takes the place of tile registers.
    pub(in crate::kernels) fn is_runnable(self) -> bool {
        let stand_in = cfg!(all(test, target_arch = "x86_64")) && self.is_amx();
        self.is_available() || stand_in && self.vectors().is_available()
    }

    /// Whether subnormal sums are zero already, and the processor rounds to BF16 by an instruction that takes
    /// them for zero too.
    pub(in crate::kernels) fn rounds_ftz(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::AmxBf16) && Self::Avx512Bf16.is_available()
    }
}

/// Whether the environment names AVX512-BF16, which then is not measured.
fn is_asked_for() -> bool {
    Limit::get() == Limit::Avx512Bf16 && InstructionSet::Avx512Bf16.is_available()
}

/// Where it is faster than sums of twice as many words in F32, with a margin for what is measured, or asked for.
fn avx512_bf16() -> Option<InstructionSet> {
    const MOST: f64 = 1.75;
    if is_asked_for() {
        return Some(InstructionSet::Avx512Bf16);
    }
    bf16_over_f32().filter(|&ratio| ratio < MOST).map(|_| InstructionSet::Avx512Bf16)
}
