//! In place of micro-kernels where a target has none. ARM takes those for BF16 and for tile registers from here.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::epilogue::Rounded;
use super::isa::InstructionSet;
use super::product::{PackedGemm, Tile};

/// See [`PackedGemm::multiply`].
pub(super) fn multiply(isa: InstructionSet, _: &PackedGemm<'_>, _: &mut dyn FnMut(Tile<'_>)) {
    unreachable!("{isa:?} is not of this target");
}

pub(super) fn add_to_tiles(_: &PackedGemm<'_>, _: &mut [f32], _: usize) {
    unreachable!("this target has no tile registers");
}

/// # Safety
/// None is asked for.
pub(super) unsafe fn round_tiles<O: Rounded>(
    _: &PackedGemm<'_>,
    _: Option<&[f32]>,
    _: *mut MaybeUninit<O>,
    _: usize,
) {
    unreachable!("this target has no tile registers");
}

/// Of tile registers elsewhere.
pub(super) const BLOCK: usize = 32;

pub(super) fn has_bf16() -> bool {
    false
}

pub(super) fn has_pairs() -> bool {
    false
}

pub(super) fn has_tiles() -> bool {
    false
}
