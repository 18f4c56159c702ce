//! Packed GEMM for NEON, AVX2, AVX-512 and AMX: the innermost loops of matrix products and convolutions.
//!
//! Packing copies both matrices into the order in which a micro-kernel reads them. The unit is a VNNI word of 32
//! bits: one F32, or two BF16 that are neighbours along the depth. `vdpbf16ps` and `tdpbf16ps` multiply such
//! pairs. With words, packing, addresses and loops are the same for F32 and BF16, and only the instruction
//! differs. Every sum is in F32.
//!
//! AMX has no F32. An F32 is therefore split into three BF16 terms whose sum it is (BF16x3), an F16 into two. 16
//! words of the first term are followed by 16 of each other term, so that a tile register loads one term. Six of
//! the nine products of terms are multiplied: the others are too small to change an F32 sum.
//!
//! An element that is not finite, or that BF16 rounds to infinity, makes its sums infinite or NaN, but not always
//! the right one of the two. Callers check the sums and fall back to F32.
//!
//! Other products are those of [`product`](super::product). The tests compare with them.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(not(target_arch = "x86_64"))]
mod absent;
mod best;
mod bf16x3;
mod buffer;
mod calibrate;
mod epilogue;
mod isa;
mod pack;
mod product;
mod results;
#[cfg(test)]
mod tests;
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
use aarch64 as target;
#[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
use absent as target;
pub(in crate::kernels) use bf16x3::split;
pub(in crate::kernels) use buffer::{KeptWords, PackedWords, as_f32, as_f32_mut, with_words};
pub(in crate::kernels) use epilogue::{Rounded, store_all};
pub(in crate::kernels) use isa::InstructionSet;
pub(in crate::kernels) use pack::{Bf16Terms, MatrixView, transpose};
pub(in crate::kernels) use product::{PackedGemm, Tile, WIDTH, equal_parts};
#[cfg(target_arch = "x86_64")]
use x86_64 as target;

/// Words of a sum with all its terms, in whole registers where there are several.
pub(in crate::kernels) fn padded_words(words: usize, terms: usize) -> usize {
    if terms == 1 { words } else { words.next_multiple_of(16) * terms }
}

/// Where a word's first term is; the next one is 16 words further.
#[inline(always)]
pub(in crate::kernels) fn first_term(word: usize, terms: usize) -> usize {
    word / 16 * 16 * terms + word % 16
}

impl PackedGemm<'_> {
    /// Calls `f` with every tile of the product.
    ///
    /// # Panics
    /// When the product reaches beyond its data, or the processor has no such instruction set.
    pub(in crate::kernels) fn multiply(&self, isa: InstructionSet, mut f: impl FnMut(Tile<'_>)) {
        assert!(isa.is_runnable(), "{isa:?} is not available");
        if self.rows * self.columns == 0 {
            return;
        }
        self.check(isa);
        // The kernels are compiled once, not for every `f`: a tile is long beside a call.
        target::multiply(isa, self, &mut f);
    }
}
