//! Vectors of sixteen F32, whatever the processor's registers hold.
//!
//! An algorithm is written once over [`Vector`]. Each instruction set implements the trait in a file of its own, with
//! little more than its instructions: one register of AVX-512, two of AVX2. [`with_vectors`] compiles the algorithm
//! for each of them, and runs the one that its caller chose.
#![allow(unsafe_code)]

mod avx2;
mod avx512;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use half::{bf16, f16};

use super::limit::Limit;
pub(in crate::kernels) use avx2::Avx2;
pub(in crate::kernels) use avx512::Avx512;

/// The instruction sets that vectors are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    Avx2,
    Avx512,
}

impl Vectors {
    // Neither this nor `is_available` is inlined: both are asked before every loop, and were a part of each.
    /// The widest of this processor.
    #[inline(never)]
    pub(crate) fn widest() -> Option<Self> {
        static WIDEST: LazyLock<Option<Vectors>> = LazyLock::new(|| {
            [Vectors::Avx512, Vectors::Avx2].into_iter().find(|v| v.is_available())
        });
        *WIDEST
    }

    /// What packs BF16, and F32 as sums of it: AVX-512, which every processor that multiplies them has. Tests pack for
    /// the stand-in of tile registers, and with AVX2 where there is no AVX-512.
    pub(in crate::kernels) fn for_bf16() -> Self {
        if cfg!(test) && !Self::Avx512.is_available() { Self::Avx2 } else { Self::Avx512 }
    }

    /// Whether the processor has what [`Vector`] asks for, and it may be used.
    #[inline(never)]
    pub(in crate::kernels) fn is_available(self) -> bool {
        match self {
            Self::Avx2 => {
                Limit::get() >= Limit::Avx2
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            Self::Avx512 => {
                Limit::get() >= Limit::Avx512
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
        }
    }

    /// As [`VARIABLE`](super::limit::VARIABLE) has it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

/// The mask of the first `count` lanes, or of all.
pub(in crate::kernels) fn first_lanes(count: usize) -> u16 {
    ((1u32 << count.min(16)) - 1) as u16
}

/// Sixteen F32. The lanes of a mask are a run: the lowest bit is lane 0.
///
/// # Safety
/// Of all methods: the instruction set's features, which the function that they are inlined into enables
/// ([`with_vectors`]). Of loads and stores: the elements of the mask, or all 16, can be read or written. No other
/// element is touched.
pub(in crate::kernels) trait Vector: Copy {
    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn store(self, at: *mut f32);

    /// The elements of `mask`, and zeros for the others.
    unsafe fn load_masked(at: *const f32, mask: u16) -> Self;
    /// The same, widened.
    unsafe fn load_bf16(at: *const bf16, mask: u16) -> Self;
    /// The same, widened.
    unsafe fn load_f16(at: *const f16, mask: u16) -> Self;
    /// 32 elements as they are, two in a lane, the lower half first; zeros for those that are not in the mask.
    unsafe fn load_pairs(at: *const bf16, mask: u32) -> Self;

    /// Writes the elements of `mask`.
    unsafe fn store_masked(self, at: *mut f32, mask: u16);
    /// The same, rounded to nearest even. A NaN keeps its sign and upper bits, and becomes quiet.
    unsafe fn store_bf16(self, at: *mut bf16, mask: u16);
    /// As [`Self::store_bf16`], but a subnormal may become zero. Needs AVX-512 BF16, where these vectors are AVX-512's.
    #[inline(always)]
    unsafe fn store_bf16_ftz(self, at: *mut bf16, mask: u16) {
        // SAFETY: the caller's.
        unsafe { self.store_bf16(at, mask) }
    }
    /// 32 elements.
    #[inline(always)]
    unsafe fn store_bf16_pair([first, last]: [Self; 2], at: *mut bf16) {
        // SAFETY: the caller's.
        unsafe {
            first.store_bf16(at, u16::MAX);
            last.store_bf16(at.add(16), u16::MAX);
        }
    }
    /// 32 elements, as [`Self::store_bf16_ftz`].
    #[inline(always)]
    unsafe fn store_bf16_ftz_pair(pair: [Self; 2], at: *mut bf16) {
        // SAFETY: the caller's.
        unsafe { Self::store_bf16_pair(pair, at) }
    }
    /// What [`Self::load_pairs`] loads.
    unsafe fn store_pairs(self, at: *mut bf16, mask: u32);
    /// The elements of `mask`, rounded to nearest even.
    unsafe fn store_f16(self, at: *mut f16, mask: u16);

    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * by + sum`, rounded once.
    unsafe fn mul_add(self, by: Self, sum: Self) -> Self;
    /// The bits of both.
    unsafe fn or(self, other: Self) -> Self;
    /// The upper halves of the bits, and zeros below: BF16, cut.
    unsafe fn upper(self) -> Self;
    /// The lower halves of the bits, moved up; zeros below.
    unsafe fn shift_up(self) -> Self;
    /// The upper halves of the bits, moved down; zeros above.
    unsafe fn shift_down(self) -> Self;
    /// The nearest BF16, and of two the larger in magnitude. A NaN is cut instead: rounded up, its payload could carry
    /// into a zero.
    unsafe fn nearest_bf16(self) -> Self;

    /// The lower halves of these lanes and then of `high`, two in a lane.
    unsafe fn lower_halves(self, high: Self) -> Self;
    /// The upper halves.
    unsafe fn upper_halves(self, high: Self) -> Self;

    /// The lanes of even numbers, of these and then of `high`.
    unsafe fn evens(self, high: Self) -> Self;
    /// The lanes of odd numbers.
    unsafe fn odds(self, high: Self) -> Self;
    /// The lanes of both in turns: of their first halves, and of their last ones.
    unsafe fn interleave(self, odds: Self) -> [Self; 2];
    /// Sixteen rows of sixteen, with rows and columns exchanged.
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16];

    /// Whether no lane of `mask` is infinite or NaN.
    unsafe fn is_finite(self, mask: u16) -> bool;

    /// `ROWS` rows of the left matrix, elements `LEFT` apart from row to row, times `COUNT` vectors of columns of the
    /// right one, over `depth`. Each pointer comes with a step: along the sum, and for `out` from row to row. Written
    /// to rows of `out`, or added to them where `ADD`.
    unsafe fn multiply<const ROWS: usize, const COUNT: usize, const LEFT: usize, const ADD: bool>(
        left: (*const f32, usize),
        right: (*const f32, usize),
        depth: usize,
        out: (*mut f32, usize),
    );
}

/// Runs `$body` with `$V` bound to the [`Vector`] of `$vectors`, compiled for its instruction set.
///
/// `$body` is a closure that is called once, but may not move out of what it captures. What it calls must be
/// `#[inline(always)]`, closures too, or else calls a function for every instruction. `map` of an array is not.
///
/// # Panics
/// When the processor has no such instruction set.
macro_rules! with_vectors {
    ($vectors:expr, $V:ident => $body:expr) => {
        match $vectors {
            $crate::kernels::cpu::vector::Vectors::Avx512 => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Avx512;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
            $crate::kernels::cpu::vector::Vectors::Avx2 => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Avx2;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
        }
    };
}
pub(in crate::kernels) use with_vectors;

/// [`with_vectors`] of [`Vectors::for_bf16`]. Only tests compile the body for AVX2.
macro_rules! with_bf16_vectors {
    ($V:ident => $body:expr) => {
        match $crate::kernels::cpu::vector::Vectors::for_bf16() {
            $crate::kernels::cpu::vector::Vectors::Avx2 if cfg!(test) => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Avx2;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
            _ => {
                #[allow(dead_code)]
                type $V = $crate::kernels::cpu::vector::Avx512;
                <$V>::run(
                    #[inline(always)]
                    || $body,
                )
            }
        }
    };
}
pub(in crate::kernels) use with_bf16_vectors;
