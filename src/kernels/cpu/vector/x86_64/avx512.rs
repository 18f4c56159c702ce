//! One register of AVX-512.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::transmute;

use half::{bf16, f16};

use super::sets::Vectors;
use crate::kernels::cpu::vector::lanes::Vector;

/// Sixteen F32 in a register: AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Avx512(__m512);

/// Lanes of two registers: the even ones, the odd ones, and both halves in turns.
const EVENS: [i32; 16] = lanes(0, 2, 0);
const ODDS: [i32; 16] = lanes(1, 2, 0);
const LOW: [i32; 16] = lanes(0, 0, 0);
const HIGH: [i32; 16] = lanes(0, 0, 8);

/// `from + i * step`, or with a step of 0 lanes of two registers in turns.
const fn lanes(from: i32, step: i32, half: i32) -> [i32; 16] {
    let mut lanes = [0; 16];
    let mut i = 0;
    while i < 16 {
        let n = i as i32;
        lanes[i] = if step > 0 { from + n * step } else { half + n / 2 + 16 * (n % 2) };
        i += 1;
    }
    lanes
}

impl Avx512 {
    /// Calls `f`, compiled for these vectors.
    ///
    /// # Panics
    /// When the processor does not have them.
    #[inline]
    pub(in crate::kernels) fn run<R>(f: impl FnMut() -> R) -> R {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
        fn run<R>(mut f: impl FnMut() -> R) -> R {
            f()
        }
        assert!(Vectors::Avx512.is_available(), "the processor has no AVX-512");
        // SAFETY: the features, as asserted.
        unsafe { run(f) }
    }

    /// As [`Self::run`], with the instruction that rounds to BF16, where rounding takes a dozen otherwise; it takes
    /// subnormals for zero.
    ///
    /// # Panics
    /// When the processor does not have it.
    #[inline]
    pub(in crate::kernels) fn run_ftz<R>(f: impl FnMut() -> R) -> R {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
        fn run<R>(mut f: impl FnMut() -> R) -> R {
            f()
        }
        let there = Vectors::Avx512.is_available() && is_x86_feature_detected!("avx512bf16");
        assert!(there, "the processor has no AVX512-BF16");
        // SAFETY: the features, as asserted.
        unsafe { run(f) }
    }

    #[inline(always)]
    unsafe fn bits(self) -> __m512i {
        // SAFETY: the caller's.
        unsafe { _mm512_castps_si512(self.0) }
    }

    #[inline(always)]
    unsafe fn of(bits: __m512i) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_castsi512_ps(bits)) }
    }

    #[inline(always)]
    unsafe fn pick(self, lanes: &[i32; 16], high: Self) -> Self {
        // SAFETY: the caller's; there are 16 lanes.
        unsafe {
            let lanes = _mm512_loadu_si512(lanes.as_ptr().cast());
            Self(_mm512_permutex2var_ps(self.0, lanes, high.0))
        }
    }
}

impl Vector for Avx512 {
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_setzero_ps()) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_set1_ps(x)) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_loadu_ps(at)) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller's.
        unsafe { _mm512_storeu_ps(at, self.0) }
    }

    #[inline(always)]
    unsafe fn load_masked(at: *const f32, mask: u16) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_maskz_loadu_ps(mask, at)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16, mask: u16) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
        }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16, mask: u16) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, at.cast()))) }
    }

    #[inline(always)]
    unsafe fn load_pairs(at: *const bf16, mask: u32) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::of(_mm512_maskz_loadu_epi16(mask, at.cast())) }
    }

    #[inline(always)]
    unsafe fn store_masked(self, at: *mut f32, mask: u16) {
        // SAFETY: the caller's.
        unsafe { _mm512_mask_storeu_ps(at, mask, self.0) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, at: *mut bf16, mask: u16) {
        // SAFETY: the caller's.
        unsafe {
            let rounded = _mm512_srli_epi32::<16>(rounded_to_bf16(self.0));
            _mm256_mask_storeu_epi16(at.cast(), mask, _mm512_cvtepi32_epi16(rounded));
        }
    }

    #[inline(always)]
    unsafe fn store_bf16_ftz(self, at: *mut bf16, mask: u16) {
        // SAFETY: the caller's; the two are of 32 bytes.
        unsafe {
            let rounded: __m256i = transmute(_mm512_cvtneps_pbh(self.0));
            _mm256_mask_storeu_epi16(at.cast(), mask, rounded);
        }
    }

    #[inline(always)]
    unsafe fn store_bf16_pair([first, last]: [Self; 2], at: *mut bf16) {
        // SAFETY: the caller's. A whole cache line at once takes half the time of two halves.
        unsafe {
            let both = upper_halves(rounded_to_bf16(first.0), rounded_to_bf16(last.0));
            _mm512_storeu_si512(at.cast(), both);
        }
    }

    #[inline(always)]
    unsafe fn store_bf16_ftz_pair([first, last]: [Self; 2], at: *mut bf16) {
        // SAFETY: the caller's; the two are of 64 bytes.
        unsafe {
            let both: __m512i = transmute(_mm512_cvtne2ps_pbh(last.0, first.0));
            _mm512_storeu_si512(at.cast(), both);
        }
    }

    #[inline(always)]
    unsafe fn store_pairs(self, at: *mut bf16, mask: u32) {
        // SAFETY: the caller's.
        unsafe { _mm512_mask_storeu_epi16(at.cast(), mask, self.bits()) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, at: *mut f16, mask: u16) {
        // SAFETY: the caller's.
        unsafe {
            let rounded =
                _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0);
            _mm256_mask_storeu_epi16(at.cast(), mask, rounded);
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_add_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_sub_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_mul_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, sum: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_fmadd_ps(self.0, by.0, sum.0)) }
    }

    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self(_mm512_or_ps(self.0, other.0)) }
    }

    #[inline(always)]
    unsafe fn upper(self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::of(_mm512_and_si512(self.bits(), _mm512_set1_epi32(!0xffff))) }
    }

    #[inline(always)]
    unsafe fn shift_up(self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::of(_mm512_slli_epi32::<16>(self.bits())) }
    }

    #[inline(always)]
    unsafe fn shift_down(self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::of(_mm512_srli_epi32::<16>(self.bits())) }
    }

    #[inline(always)]
    unsafe fn nearest_bf16(self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let is_number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(self.0, self.0);
            let (bits, half) = (self.bits(), _mm512_set1_epi32(0x8000));
            Self::of(_mm512_mask_add_epi32(bits, is_number, bits, half)).upper()
        }
    }

    #[inline(always)]
    unsafe fn lower_halves(self, high: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(self.bits()));
            Self::of(_mm512_inserti64x4::<1>(low, _mm512_cvtepi32_epi16(high.bits())))
        }
    }

    #[inline(always)]
    unsafe fn upper_halves(self, high: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { Self::of(upper_halves(self.bits(), high.bits())) }
    }

    #[inline(always)]
    unsafe fn evens(self, high: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { self.pick(&EVENS, high) }
    }

    #[inline(always)]
    unsafe fn odds(self, high: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { self.pick(&ODDS, high) }
    }

    #[inline(always)]
    unsafe fn interleave(self, odds: Self) -> [Self; 2] {
        // SAFETY: the caller's.
        unsafe { [self.pick(&LOW, odds), self.pick(&HIGH, odds)] }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16] {
        // SAFETY: the caller's. A row is a register, any bits of which are either.
        unsafe { transmute(transposed(transmute::<[Self; 16], [__m512i; 16]>(rows))) }
    }

    #[inline(always)]
    unsafe fn is_finite(self, mask: u16) -> bool {
        /// Quiet NaN, infinity, negative infinity, signalling NaN.
        const NOT_FINITE: i32 = 0x99;
        // SAFETY: the caller's.
        unsafe { _mm512_mask_fpclass_ps_mask::<NOT_FINITE>(mask, self.0) == 0 }
    }

    #[inline(always)]
    unsafe fn multiply<
        const ROWS: usize,
        const COUNT: usize,
        const LEFT: usize,
        const ADD: bool,
    >(
        left: (*const f32, usize),
        right: (*const f32, usize),
        depth: usize,
        out: (*mut f32, usize),
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); COUNT]; ROWS];
            let ((mut left, left_step), (mut right, right_step)) = (left, right);
            for _ in 0..depth {
                let mut columns = [_mm512_setzero_ps(); COUNT];
                for (n, column) in columns.iter_mut().enumerate() {
                    *column = _mm512_loadu_ps(right.wrapping_add(n * 16));
                }
                for (i, sums) in sums.iter_mut().enumerate() {
                    let row = _mm512_set1_ps(*left.wrapping_add(i * LEFT));
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = _mm512_fmadd_ps(row, column, *sum);
                    }
                }
                left = left.wrapping_add(left_step);
                right = right.wrapping_add(right_step);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (n, &sum) in sums.iter().enumerate() {
                    let at = out.0.wrapping_add(i * out.1 + n * 16);
                    let sum = if ADD { _mm512_add_ps(_mm512_loadu_ps(at), sum) } else { sum };
                    _mm512_storeu_ps(at, sum);
                }
            }
        }
    }
}

/// To nearest even, in the upper halves. Not the instruction that rounds to BF16: it flushes subnormals.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn rounded_to_bf16(x: __m512) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let up = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
        // A NaN stays one: its sign and upper bits, and the quiet bit.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x0040_0000))
    }
}

/// The upper halves of 32 numbers of 32 bits.
///
/// # Safety
/// AVX-512 F and BW.
#[inline(always)]
unsafe fn upper_halves(first: __m512i, last: __m512i) -> __m512i {
    // SAFETY: the caller's; there are 32 indices.
    unsafe {
        let upper = _mm512_loadu_si512(UPPER.as_ptr().cast());
        _mm512_permutex2var_epi16(first, upper, last)
    }
}

const UPPER: [u16; 32] = {
    let mut upper = [0; 32];
    let mut i = 0;
    while i < 32 {
        upper[i] = 2 * i as u16 + 1;
        i += 1;
    }
    upper
};

/// The transpose of 16 rows of 16 words.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn transposed(mut r: [__m512i; 16]) -> [__m512i; 16] {
    // SAFETY: the caller's.
    unsafe {
        let mut t = r;
        for i in 0..8 {
            t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
        }
        // Row `4 i + c` now gets columns `c`, `4 + c`, `8 + c` and `12 + c` of rows `4 i` to `4 i + 3`.
        for i in 0..4 {
            for j in 0..2 {
                r[4 * i + 2 * j] = _mm512_unpacklo_epi64(t[4 * i + j], t[4 * i + 2 + j]);
                r[4 * i + 2 * j + 1] = _mm512_unpackhi_epi64(t[4 * i + j], t[4 * i + 2 + j]);
            }
        }
        for i in 0..4 {
            t[i] = _mm512_shuffle_i32x4::<0x88>(r[i], r[4 + i]);
            t[4 + i] = _mm512_shuffle_i32x4::<0xdd>(r[i], r[4 + i]);
            t[8 + i] = _mm512_shuffle_i32x4::<0x88>(r[8 + i], r[12 + i]);
            t[12 + i] = _mm512_shuffle_i32x4::<0xdd>(r[8 + i], r[12 + i]);
        }
        for i in 0..8 {
            r[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[8 + i]);
            r[8 + i] = _mm512_shuffle_i32x4::<0xdd>(t[i], t[8 + i]);
        }
        r
    }
}
