//! The instruction sets that multiply packed matrices, and which of them this processor has.

use std::sync::LazyLock;

use candle_core::{DType, Tensor};

use super::calibrate::bf16_over_f32;
use super::target;
use crate::kernels::cpu::limit::{Limit, VARIABLE};
use crate::kernels::cpu::vector::Vectors;

/// A kind of instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) enum InstructionSet {
    /// F32 words, the multiply-add of these vectors.
    F32(Vectors),
    /// Pairs of BF16, `vdpbf16ps`. Subnormal elements and sums count as zero.
    Avx512Bf16,
    /// Pairs of BF16, AMX's `tdpbf16ps`. Subnormal elements and sums count as zero.
    AmxBf16,
    /// The same of F32 or F16, as sums of several of BF16: see [`super`].
    AmxBf16x3,
}

impl InstructionSet {
    /// The best for products of these tensors; `None` where the `gemm` crate is.
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

    /// Those of F32 that this processor has.
    #[cfg(test)]
    pub(in crate::kernels) fn of_f32() -> impl Iterator<Item = Self> {
        Vectors::ALL.into_iter().filter(|set| set.is_available()).map(Self::F32)
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

    /// Its name in [`Limit`].
    pub(in crate::kernels) fn set(self) -> &'static str {
        match self {
            Self::F32(vectors) => vectors.names().set,
            Self::Avx512Bf16 => Limit::Avx512Bf16.name(),
            Self::AmxBf16 | Self::AmxBf16x3 => Limit::Amx.name(),
        }
    }

    /// What a trace shows of packed GEMM.
    pub(in crate::kernels) fn name(self) -> &'static str {
        match self {
            Self::F32(vectors) => vectors.names().packed,
            Self::Avx512Bf16 => "packed, avx512-bf16",
            Self::AmxBf16 => "packed, amx-bf16",
            Self::AmxBf16x3 => "packed, amx-bf16x3",
        }
    }

    /// Whether a word is an F32.
    pub(in crate::kernels) fn is_f32(self) -> bool {
        matches!(self, Self::F32(_))
    }

    /// Whether a word is a pair of BF16.
    pub(in crate::kernels) fn is_bf16(self) -> bool {
        !self.is_f32()
    }

    /// What packs its words and rounds its sums.
    pub(in crate::kernels) fn vectors(self) -> Vectors {
        match self {
            Self::F32(vectors) => vectors,
            Self::Avx512Bf16 | Self::AmxBf16 | Self::AmxBf16x3 => Vectors::for_bf16(),
        }
    }

    /// What sums in F32 where sums of terms are not finite.
    pub(in crate::kernels) fn without_terms(self) -> Self {
        Self::F32(self.vectors())
    }

    /// Elements of a word.
    pub(in crate::kernels) fn per_word(self) -> usize {
        if self.is_bf16() { 2 } else { 1 }
    }

    /// Numbers of BF16 that an F32 is the sum of.
    pub(in crate::kernels) fn terms(self) -> usize {
        if self == Self::AmxBf16x3 { 3 } else { 1 }
    }

    /// Whether these are tile registers, which read whole rows of words.
    pub(in crate::kernels) fn is_amx(self) -> bool {
        matches!(self, Self::AmxBf16 | Self::AmxBf16x3)
    }

    /// Whether subnormal sums are zero already, and the processor rounds to BF16 by an instruction that takes
    /// them for zero too.
    pub(in crate::kernels) fn rounds_ftz(self) -> bool {
        matches!(self, Self::Avx512Bf16 | Self::AmxBf16) && Self::Avx512Bf16.is_available()
    }

    /// Rows of a tile.
    pub(in crate::kernels) fn rows(self) -> usize {
        if self.is_amx() { 16 } else { 8 }
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
