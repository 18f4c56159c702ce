//! The instruction sets that multiply packed matrices, and which of them this processor has.

use std::sync::LazyLock;

use candle_core::{DType, Tensor};

/// A kind of instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) enum Unit {
    /// F32 cells, AVX-512's multiply-add.
    Fma,
    /// Pairs of BF16, `vdpbf16ps`. Subnormal elements and sums count as zero.
    Dot,
    /// Pairs of BF16, AMX's `tdpbf16ps`. Subnormal elements and sums count as zero.
    Tiles,
    /// The same of F32 or F16, as sums of several of BF16: see [`super`].
    Planes,
}

impl Unit {
    /// The best for products of these tensors; `None` where the `gemm` crate is.
    pub(in crate::kernels) fn of<const N: usize>(operands: [&Tensor; N]) -> Option<Self> {
        let all = |dtype| operands.iter().all(|operand| operand.dtype() == dtype);
        let wanted = match all(DType::BF16) {
            true => [Some(Self::Tiles), dot(), Some(Self::Fma)],
            false => [Some(Self::Fma), None, None],
        };
        wanted.into_iter().flatten().find(|unit| unit.is_available())
    }

    /// Whether a cell is a pair of BF16.
    pub(in crate::kernels) fn pairs(self) -> bool {
        self != Self::Fma
    }

    /// Elements of a cell.
    pub(in crate::kernels) fn per_cell(self) -> usize {
        if self.pairs() { 2 } else { 1 }
    }

    /// Numbers of BF16 that an F32 is the sum of.
    pub(in crate::kernels) fn planes(self) -> usize {
        if self == Self::Planes { 3 } else { 1 }
    }

    /// Whether these are tile registers, which read whole rows of cells.
    pub(in crate::kernels) fn tiles(self) -> bool {
        matches!(self, Self::Tiles | Self::Planes)
    }

    /// Whether subnormal sums are zero already, and the processor rounds to BF16 by an instruction that takes
    /// them for zero too.
    pub(in crate::kernels) fn rounds_normal(self) -> bool {
        matches!(self, Self::Dot | Self::Tiles) && is_x86_feature_detected!("avx512bf16")
    }

    /// Rows of a tile.
    pub(in crate::kernels) fn rows(self) -> usize {
        if self.tiles() { 16 } else { 8 }
    }

    pub(in crate::kernels) fn is_available(self) -> bool {
        static AVAILABLE: LazyLock<[bool; 4]> = LazyLock::new(|| {
            // Packing and rounding use the first four throughout.
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512dq");
            let dot = avx512 && is_x86_feature_detected!("avx512bf16");
            let tiles = avx512 && super::amx::enable();
            [avx512, dot, tiles, tiles]
        });
        AVAILABLE[self as usize]
    }

    /// Whether products can be computed with it: in tests also where a stand-in takes the place of tile registers.
    pub(in crate::kernels) fn is_runnable(self) -> bool {
        self.is_available() || cfg!(test) && self.tiles()
    }

    pub(super) fn multiply(self, panel: &super::Panel<'_>, f: impl FnMut(super::Tile<'_>)) {
        match self {
            Self::Fma => super::avx512::fma(panel, f),
            Self::Dot => super::avx512::dot(panel, f),
            Self::Tiles | Self::Planes => super::amx::multiply(panel, super::amx::To::Tiles(f)),
        }
    }
}

/// Not on processors with AMX: those take two cycles for the instruction, so that F32 is twice as
/// fast where the system does not let the tiles be used.
fn dot() -> Option<Unit> {
    if super::amx::exists() { None } else { Some(Unit::Dot) }
}
