//! The micro-kernels of processors with AVX2, AVX-512 or AMX.
#![allow(unsafe_code)]

mod amx;
mod avx2;
mod avx512;

use std::mem::MaybeUninit;
use std::sync::LazyLock;

use super::epilogue::Rounded;
use super::isa::InstructionSet;
use super::product::{PackedGemm, Tile};
use crate::kernels::cpu::limit::Limit;
use crate::kernels::cpu::vector::Vectors;
pub(super) use amx::BLOCK;

/// See [`PackedGemm::multiply`], which checks what this relies on.
pub(super) fn multiply(isa: InstructionSet, gemm: &PackedGemm<'_>, f: &mut dyn FnMut(Tile<'_>)) {
    match isa {
        InstructionSet::F32(Vectors::Avx2) => avx2::multiply(gemm, f),
        InstructionSet::F32(Vectors::Avx512) => avx512::fma(gemm, f),
        InstructionSet::Avx512Bf16 => avx512::dot(gemm, f),
        InstructionSet::AmxBf16 | InstructionSet::AmxBf16x3 => {
            amx::multiply(gemm, amx::Output::Tiles(f));
        }
    }
}

/// Adds a product of tile registers to sums, whose rows have `columns` elements.
pub(super) fn add_to_tiles(gemm: &PackedGemm<'_>, sums: &mut [f32], columns: usize) {
    amx::multiply(gemm, amx::Output::Sums(sums, columns));
}

/// Rounds a product of whole blocks of tile registers, as [`PackedGemm::round`] has it.
///
/// # Safety
/// As there. The processor has tiles, unless this is a test, and AVX-512 BF16; one segment and one term, the depth
/// whole registers, rows and columns in whole blocks of [`BLOCK`].
pub(super) unsafe fn round_tiles<O: Rounded>(
    gemm: &PackedGemm<'_>,
    bias: Option<&[f32]>,
    out: *mut MaybeUninit<O>,
    stride: usize,
) {
    // SAFETY: the caller's.
    unsafe { amx::rounded(gemm, bias, out, stride) }
}

/// Whether the processor multiplies pairs of BF16, allowed or not.
pub(super) fn has_bf16() -> bool {
    is_x86_feature_detected!("avx512bf16")
}

/// Whether pairs of BF16 may be multiplied.
pub(super) fn has_pairs() -> bool {
    static HAS: LazyLock<bool> = LazyLock::new(|| {
        Vectors::Avx512.is_available() && Limit::get() >= Limit::Avx512Bf16 && has_bf16()
    });
    *HAS
}

/// Whether tile registers may be used, which the system is asked for.
pub(super) fn has_tiles() -> bool {
    static HAS: LazyLock<bool> = LazyLock::new(|| {
        Vectors::Avx512.is_available() && Limit::get() >= Limit::Amx && amx::enable()
    });
    *HAS
}
