//! F32 and F16 as sums of BF16, which tile registers multiply: Henry, Tang and Heinecke,
//! arXiv:1904.06376.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::f16;

use super::pack::{Bf16Terms, MatrixView};
use crate::kernels::cpu::vector::transposed;

impl Bf16Terms for f32 {
    const COUNT: usize = 3;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack_tile(
        view: &MatrixView<'_, Self>,
        from: [usize; 2],
        by_line: bool,
        out: *mut u32,
        stride: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { split_tile(view, from, by_line, out, stride) }
    }
}

impl Bf16Terms for f16 {
    /// Of 11 bits, nothing is left for a third.
    const COUNT: usize = 2;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn pack_tile(
        view: &MatrixView<'_, Self>,
        from: [usize; 2],
        by_line: bool,
        out: *mut u32,
        stride: usize,
    ) {
        // SAFETY: the caller's.
        unsafe { split_tile(view, from, by_line, out, stride) }
    }
}

/// What is split as F32.
trait Widened: Bf16Terms {
    /// Zeros for the elements not in `mask`.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; the elements of `mask` from `at` on can be read.
    unsafe fn load(at: *const Self, mask: u16) -> __m512;
}

impl Widened for f32 {
    #[inline(always)]
    unsafe fn load(at: *const Self, mask: u16) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_maskz_loadu_ps(mask, at) }
    }
}

impl Widened for f16 {
    #[inline(always)]
    unsafe fn load(at: *const Self, mask: u16) -> __m512 {
        // SAFETY: the caller's.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at.cast())) }
    }
}

/// See [`Bf16Terms::pack_tile`]. A word has the elements `k` and `k + 16`, not `k` and `k + 1`, so that none has
/// to move: the order of a sum is the same on both sides.
///
/// # Safety
/// As there.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn split_tile<T: Widened>(
    view: &MatrixView<'_, T>,
    [line, word]: [usize; 2],
    by_line: bool,
    out: *mut u32,
    stride: usize,
) {
    let along = view.depth_stride == 1;
    let lines = view.lines - line;
    let mut halves = [[_mm512_setzero_si512(); 16]; 2];
    for (half, tile) in halves.iter_mut().enumerate() {
        let k = 2 * word + 16 * half;
        let elements = view.depth.saturating_sub(k);
        let (rows, columns) = if along { (lines, elements) } else { (elements, lines) };
        let mask = if columns >= 16 { u16::MAX } else { (1 << columns) - 1 };
        let from = line * view.line_stride + k * view.depth_stride;
        let from = view.data.as_ptr().wrapping_add(from);
        let step = if along { view.line_stride } else { view.depth_stride };
        for (i, row) in tile.iter_mut().enumerate().take(rows) {
            // SAFETY: only elements of the matrix are in the mask.
            *row = _mm512_castps_si512(unsafe { T::load(from.wrapping_add(i * step), mask) });
        }
        if along != by_line {
            *tile = transposed(*tile);
        }
    }
    let next = if by_line { 16 } else { 256 };
    let [first, last] = &halves;
    for (row, (first, last)) in first.iter().zip(last).enumerate() {
        let (first, last) = (split(*first), split(*last));
        for term in 0..T::COUNT {
            let words = _mm512_or_si512(_mm512_srli_epi32::<16>(first[term]), last[term]);
            // SAFETY: the caller's.
            unsafe { _mm512_storeu_si512(out.add(term * next + row * stride).cast(), words) };
        }
    }
}

/// Three BF16 terms, in upper halves, whose sum is the element: its nearest BF16, the nearest to the remainder,
/// and the rest. 24 bits fit into three times 8.
///
/// Lower halves are always zero, because a caller may OR another element into them. Under 2^-110 the third term is
/// subnormal and has bits there; they are cut off. AMX takes subnormals for zero anyway, so each element keeps its
/// value to within 2^-126.
///
/// If an element is infinite, NaN or rounds beyond BF16's range, one of the first two terms is infinite or NaN, so
/// that none of its products is finite.
#[target_feature(enable = "avx512f")]
#[inline]
pub(in crate::kernels) fn split(x: __m512i) -> [__m512i; 3] {
    let first = nearest(x);
    let rest = _mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(first));
    let second = nearest(_mm512_castps_si512(rest));
    let last = _mm512_sub_ps(rest, _mm512_castsi512_ps(second));
    [first, second, _mm512_and_si512(_mm512_castps_si512(last), _mm512_set1_epi32(UPPER))]
}

const UPPER: i32 = !0xffff;

/// The nearest BF16. A NaN is cut instead: rounded up, its payload could carry into a zero.
#[target_feature(enable = "avx512f")]
#[inline]
fn nearest(x: __m512i) -> __m512i {
    let value = _mm512_castsi512_ps(x);
    let is_number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(value, value);
    let up = _mm512_mask_add_epi32(x, is_number, x, _mm512_set1_epi32(0x8000));
    _mm512_and_si512(up, _mm512_set1_epi32(UPPER))
}
