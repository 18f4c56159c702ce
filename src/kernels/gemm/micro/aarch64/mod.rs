//! The micro-kernel of ARM's processors of 64 bits.

mod neon;

use super::absent;
use super::isa::InstructionSet;
use super::product::{PackedGemm, Tile};
pub(super) use absent::{BLOCK, add_to_tiles, has_bf16, has_pairs, has_tiles, round_tiles};

/// See [`PackedGemm::multiply`], which checks what this relies on.
pub(super) fn multiply(isa: InstructionSet, gemm: &PackedGemm<'_>, f: &mut dyn FnMut(Tile<'_>)) {
    match isa {
        InstructionSet::F32(_) => neon::multiply(gemm, f),
        _ => absent::multiply(isa, gemm, f),
    }
}
