//! Two registers of AVX2.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::products::block;
use super::sets::Vectors;
use crate::kernels::cpu::vector::lanes::{Vector, copy_run};

/// Sixteen F32 in two registers: AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Avx2([__m256; 2]);

impl Avx2 {
    /// Calls `f`, compiled for these vectors.
    ///
    /// # Panics
    /// When the processor does not have them.
    #[inline]
    pub(in crate::kernels) fn run<R>(f: impl FnMut() -> R) -> R {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn run<R>(mut f: impl FnMut() -> R) -> R {
            f()
        }
        assert!(Vectors::Avx2.is_available(), "the processor has no AVX2");
        // SAFETY: the features, as asserted.
        unsafe { run(f) }
    }

    #[inline(always)]
    unsafe fn bits(self) -> [__m256i; 2] {
        // SAFETY: the caller's.
        unsafe { [_mm256_castps_si256(self.0[0]), _mm256_castps_si256(self.0[1])] }
    }

    #[inline(always)]
    unsafe fn of([low, high]: [__m256i; 2]) -> Self {
        // SAFETY: the caller's.
        unsafe { Self([_mm256_castsi256_ps(low), _mm256_castsi256_ps(high)]) }
    }
}

impl Vector for Avx2 {
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: the caller's.
        unsafe { Self([_mm256_setzero_ps(); 2]) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        // SAFETY: the caller's.
        unsafe { Self([_mm256_set1_ps(x); 2]) }
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: the caller's.
        unsafe { Self([_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))]) }
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: the caller's.
        unsafe {
            _mm256_storeu_ps(at, self.0[0]);
            _mm256_storeu_ps(at.add(8), self.0[1]);
        }
    }

    #[inline(always)]
    unsafe fn load_masked(at: *const f32, mask: u16) -> Self {
        // SAFETY: the caller's.
        unsafe {
            if mask == u16::MAX {
                return Self::load(at);
            }
            let low = _mm256_maskload_ps(at, lanes(mask));
            let high = match mask >> 8 {
                0 => _mm256_setzero_ps(), // as in rows of few pixels
                mask => _mm256_maskload_ps(at.wrapping_add(8), lanes(mask)),
            };
            Self([low, high])
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const bf16, mask: u16) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let [low, high] = load_halves(at.cast(), mask);
            let (low, high) = (_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high));
            Self([
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const f16, mask: u16) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let [low, high] = load_halves(at.cast(), mask);
            Self([_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)])
        }
    }

    #[inline(always)]
    unsafe fn load_pairs(at: *const bf16, mask: u32) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let [a, b] = load_halves(at.cast(), mask as u16);
            let [c, d] = load_halves(at.wrapping_add(16).cast(), (mask >> 16) as u16);
            Self::of([_mm256_set_m128i(b, a), _mm256_set_m128i(d, c)])
        }
    }

    #[inline(always)]
    unsafe fn store_masked(self, at: *mut f32, mask: u16) {
        // SAFETY: the caller's.
        unsafe {
            if mask == u16::MAX {
                return self.store(at);
            }
            for (half, x) in self.0.into_iter().enumerate() {
                let (at, mask) = (at.wrapping_add(8 * half), mask >> (8 * half) & 0xff);
                match mask {
                    0xff => _mm256_storeu_ps(at, x),
                    0 => {}
                    0x0f => _mm_storeu_ps(at, _mm256_castps256_ps128(x)),
                    // A masked store takes some twenty cycles on processors of AMD.
                    _ => {
                        let mut lanes = [0f32; 8];
                        _mm256_storeu_ps(lanes.as_mut_ptr(), x);
                        copy_run(lanes.as_ptr(), at, mask);
                    }
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, at: *mut bf16, mask: u16) {
        // SAFETY: the caller's.
        unsafe {
            let [low, high] = self.0;
            // Packing takes each half of a register by itself.
            let packed = _mm256_packus_epi32(rounded_to_bf16(low), rounded_to_bf16(high));
            let both = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            store_halves(both, at.cast(), mask);
        }
    }

    #[inline(always)]
    unsafe fn store_pairs(self, at: *mut bf16, mask: u32) {
        // SAFETY: the caller's.
        unsafe {
            let [first, last] = self.bits();
            store_halves(first, at.cast(), mask as u16);
            store_halves(last, at.wrapping_add(16).cast(), (mask >> 16) as u16);
        }
    }

    #[inline(always)]
    unsafe fn store_f16(self, at: *mut f16, mask: u16) {
        // SAFETY: the caller's.
        unsafe {
            let [low, high] = self.0;
            let (low, high) = (rounded_to_f16(low), rounded_to_f16(high));
            store_halves(_mm256_set_m128i(high, low), at.cast(), mask);
        }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([a, b], [c, d]) = (self.0, other.0);
            Self([_mm256_add_ps(a, c), _mm256_add_ps(b, d)])
        }
    }

    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([a, b], [c, d]) = (self.0, other.0);
            Self([_mm256_sub_ps(a, c), _mm256_sub_ps(b, d)])
        }
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([a, b], [c, d]) = (self.0, other.0);
            Self([_mm256_mul_ps(a, c), _mm256_mul_ps(b, d)])
        }
    }

    #[inline(always)]
    unsafe fn mul_add(self, by: Self, sum: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            Self([
                _mm256_fmadd_ps(self.0[0], by.0[0], sum.0[0]),
                _mm256_fmadd_ps(self.0[1], by.0[1], sum.0[1]),
            ])
        }
    }

    #[inline(always)]
    unsafe fn or(self, other: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([a, b], [c, d]) = (self.0, other.0);
            Self([_mm256_or_ps(a, c), _mm256_or_ps(b, d)])
        }
    }

    #[inline(always)]
    unsafe fn upper(self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([low, high], upper) = (self.bits(), _mm256_set1_epi32(!0xffff));
            Self::of([_mm256_and_si256(low, upper), _mm256_and_si256(high, upper)])
        }
    }

    #[inline(always)]
    unsafe fn shift_up(self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let [low, high] = self.bits();
            Self::of([_mm256_slli_epi32::<16>(low), _mm256_slli_epi32::<16>(high)])
        }
    }

    #[inline(always)]
    unsafe fn shift_down(self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let [low, high] = self.bits();
            Self::of([_mm256_srli_epi32::<16>(low), _mm256_srli_epi32::<16>(high)])
        }
    }

    #[inline(always)]
    unsafe fn nearest_bf16(self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([low, high], half) = (self.0, _mm256_set1_epi32(0x8000));
            let is_number = [
                _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(low, low)),
                _mm256_castps_si256(_mm256_cmp_ps::<_CMP_ORD_Q>(high, high)),
            ];
            let [low, high] = self.bits();
            let low = _mm256_add_epi32(low, _mm256_and_si256(half, is_number[0]));
            let high = _mm256_add_epi32(high, _mm256_and_si256(half, is_number[1]));
            Self::of([low, high]).upper()
        }
    }

    #[inline(always)]
    unsafe fn lower_halves(self, high: Self) -> Self {
        // SAFETY: the caller's.
        unsafe { self.shift_up().upper_halves(high.shift_up()) }
    }

    #[inline(always)]
    unsafe fn upper_halves(self, high: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([a, b], [c, d]) = (self.shift_down().bits(), high.shift_down().bits());
            // Packing takes each half of a register by itself.
            Self::of([
                _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(a, b)),
                _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(c, d)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn evens(self, high: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([a, b], [c, d]) = (self.0, high.0);
            Self([
                in_order(_mm256_shuffle_ps::<0b10_00_10_00>(a, b)),
                in_order(_mm256_shuffle_ps::<0b10_00_10_00>(c, d)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn odds(self, high: Self) -> Self {
        // SAFETY: the caller's.
        unsafe {
            let ([a, b], [c, d]) = (self.0, high.0);
            Self([
                in_order(_mm256_shuffle_ps::<0b11_01_11_01>(a, b)),
                in_order(_mm256_shuffle_ps::<0b11_01_11_01>(c, d)),
            ])
        }
    }

    #[inline(always)]
    unsafe fn interleave(self, odds: Self) -> [Self; 2] {
        // SAFETY: the caller's.
        unsafe {
            let mut result = [self; 2];
            for (half, result) in result.iter_mut().enumerate() {
                let (even, odd) = (self.0[half], odds.0[half]);
                let (low, high) = (_mm256_unpacklo_ps(even, odd), _mm256_unpackhi_ps(even, odd));
                *result = Self([
                    _mm256_permute2f128_ps::<0x20>(low, high),
                    _mm256_permute2f128_ps::<0x31>(low, high),
                ]);
            }
            result
        }
    }

    #[inline(always)]
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16] {
        let mut columns = rows;
        for half in 0..2 {
            for side in 0..2 {
                let mut block = [rows[0].0[0]; 8];
                for (i, row) in block.iter_mut().enumerate() {
                    *row = rows[8 * side + i].0[half];
                }
                // SAFETY: the caller's.
                for (i, row) in unsafe { transposed(block) }.into_iter().enumerate() {
                    columns[8 * half + i].0[side] = row;
                }
            }
        }
        columns
    }

    #[inline(always)]
    unsafe fn is_finite(self, mask: u16) -> bool {
        // SAFETY: the caller's.
        unsafe {
            let exponent = _mm256_set1_epi32(0x7f80_0000);
            let mut wrong = 0;
            for (half, x) in self.0.into_iter().enumerate() {
                let bits = _mm256_and_si256(_mm256_castps_si256(x), exponent);
                let equal = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, exponent));
                wrong |= (_mm256_movemask_ps(equal) as u16) << (8 * half);
            }
            wrong & mask == 0
        }
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
        // Sixteen registers: twelve sums, or eight, an element of the left matrix, and columns of the right one.
        const { assert!(ROWS.is_multiple_of(8) || ROWS <= 6 && COUNT == 1) };
        if ROWS <= 6 {
            // SAFETY: the caller's.
            return unsafe { block::<ROWS, 2, LEFT, ADD>(left, right, depth, out) };
        }
        let wide = if COUNT == 3 { 3 } else { 2 };
        for row in (0..ROWS).step_by(4) {
            for half in (0..2 * COUNT).step_by(wide) {
                let left = (left.0.wrapping_add(row * LEFT), left.1);
                let right = (right.0.wrapping_add(8 * half), right.1);
                let out = (out.0.wrapping_add(row * out.1 + 8 * half), out.1);
                // SAFETY: the caller's.
                unsafe {
                    match COUNT {
                        3 => block::<4, 3, LEFT, ADD>(left, right, depth, out),
                        _ => block::<4, 2, LEFT, ADD>(left, right, depth, out),
                    }
                }
            }
        }
    }
}

/// All bits in the lanes of the lowest eight bits of `mask`.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn lanes(mask: u16) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        let mask = _mm256_set1_epi32(i32::from(mask));
        _mm256_cmpeq_epi32(_mm256_and_si256(mask, bits), bits)
    }
}

/// Sixteen elements of 16 bits; zeros for those that are not in the mask.
///
/// # Safety
/// AVX2; the elements of the mask can be read.
#[inline(always)]
unsafe fn load_halves(at: *const u16, mask: u16) -> [__m128i; 2] {
    let (first, count) = (mask.trailing_zeros() as isize, mask.count_ones() as usize);
    let from = at.wrapping_offset(first);
    // Loads that end with the run, moved to their lanes: a copy in memory would be waited for.
    // SAFETY: the caller's. A vector has 16 elements, and loads of a run touch its elements alone. A run of 8 or more
    // begins in lane 8 or before, and ends after lane 7; one of 4 or more begins in lane 12 or before. So nothing is
    // moved by more than 8 lanes.
    unsafe {
        match count {
            16 => [_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(8).cast())],
            8..16 => {
                let last = from.add(count - 8);
                let end = first + count as isize;
                [
                    moved_up(_mm_loadu_si128(from.cast()), first),
                    moved_up(_mm_loadu_si128(last.cast()), end - 16),
                ]
            }
            4..8 => {
                let [first_four, last_four] =
                    [from, from.add(count - 4)].map(|at| at.cast::<u64>().read_unaligned());
                let run = u128::from(first_four) | u128::from(last_four) << (16 * (count - 4));
                let run = _mm_set_epi64x((run >> 64) as i64, run as i64);
                [moved_up(run, first.min(8)), moved_up(run, first - 8)]
            }
            _ => {
                let mut elements = [0u16; 16];
                copy_run(at, elements.as_mut_ptr(), mask);
                let at = elements.as_ptr();
                [_mm_loadu_si128(at.cast()), _mm_loadu_si128(at.add(8).cast())]
            }
        }
    }
}

/// Eight elements of 16 bits, so many lanes further up, or down if negative. Zeros come in.
///
/// # Safety
/// AVX2; at most 8 lanes.
#[inline(always)]
unsafe fn moved_up(x: __m128i, lanes: isize) -> __m128i {
    /// The bytes of a vector, in the middle; the highest bit stands for zero.
    const BYTES: [u8; 48] = {
        let mut bytes = [1 << 7; 48];
        let mut byte = 0;
        while byte < 16 {
            bytes[16 + byte] = byte as u8;
            byte += 1;
        }
        bytes
    };
    // SAFETY: the caller's; 16 bytes begin at most 16 before or after the middle ones.
    unsafe { _mm_shuffle_epi8(x, _mm_loadu_si128(BYTES.as_ptr().offset(16 - 2 * lanes).cast())) }
}

/// Writes the elements of the mask, of sixteen of 16 bits.
///
/// # Safety
/// AVX2; the elements of the mask can be written.
#[inline(always)]
unsafe fn store_halves(x: __m256i, at: *mut u16, mask: u16) {
    // SAFETY: the caller's; a vector has 16 elements.
    unsafe {
        if mask == u16::MAX {
            _mm256_storeu_si256(at.cast(), x);
            return;
        }
        let mut elements = [0u16; 16];
        _mm256_storeu_si256(elements.as_mut_ptr().cast(), x);
        copy_run(elements.as_ptr(), at, mask);
    }
}

/// Pairs of lanes 0, 2, 1 and 3: undoes what an instruction does that takes each half of a register by itself.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn in_order(x: __m256) -> __m256 {
    // SAFETY: the caller's.
    unsafe { _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(x))) }
}

/// To nearest even, in the lower halves.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn rounded_to_bf16(x: __m256) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let last = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let up = _mm256_add_epi32(bits, _mm256_add_epi32(last, _mm256_set1_epi32(0x7fff)));
        // A NaN stays one: its sign and upper bits, and the quiet bit.
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x0040_0000));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_srli_epi32::<16>(_mm256_blendv_epi8(up, quiet, nan))
    }
}

/// To nearest even.
///
/// # Safety
/// F16C.
#[cfg(not(miri))]
#[inline(always)]
unsafe fn rounded_to_f16(x: __m256) -> __m128i {
    // SAFETY: the caller's.
    unsafe { _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x) }
}

/// The same, as Miri does not have the instruction.
#[cfg(miri)]
unsafe fn rounded_to_f16(x: __m256) -> __m128i {
    // SAFETY: both are eight elements without padding.
    unsafe {
        let lanes: [f32; 8] = std::mem::transmute(x);
        std::mem::transmute(lanes.map(f16::from_f32))
    }
}

/// Eight rows of eight, with rows and columns exchanged.
///
/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn transposed(r: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller's.
    unsafe {
        let mut t = r;
        for i in 0..4 {
            t[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
            t[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
        }
        // Row `4 i + c` now gets columns `c` and `4 + c` of rows `4 i` to `4 i + 3`.
        let mut s = t;
        for i in 0..2 {
            let [a, b, c, d] = [t[4 * i], t[4 * i + 1], t[4 * i + 2], t[4 * i + 3]];
            s[4 * i] = _mm256_shuffle_ps::<0b01_00_01_00>(a, c);
            s[4 * i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(a, c);
            s[4 * i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(b, d);
            s[4 * i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(b, d);
        }
        for i in 0..4 {
            t[i] = _mm256_permute2f128_ps::<0x20>(s[i], s[4 + i]);
            t[4 + i] = _mm256_permute2f128_ps::<0x31>(s[i], s[4 + i]);
        }
        t
    }
}
