//! The instruction sets that multiply packed matrices.

use crate::kernels::cpu::limit::Limit;
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

    /// Rows of a tile.
    pub(in crate::kernels) fn rows(self) -> usize {
        if self.is_amx() { 16 } else { 8 }
    }
}
