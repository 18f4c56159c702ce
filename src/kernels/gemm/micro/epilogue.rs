//! Sums, rounded into results.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::{MaybeUninit, transmute};
use std::slice::from_raw_parts_mut;

use half::{bf16, f16};

use super::Tile;
use crate::kernels::cpu::lane::Lane;

/// What sums are rounded to.
pub(in crate::kernels) trait Rounded: Lane<Acc = f32> {
    /// Rounds the elements of `mask` to nearest even, into memory; the rest is not touched.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; the elements of `mask` from `at` on can be written.
    unsafe fn store(at: *mut Self, mask: u16, sums: __m512);

    /// As [`Self::store`], but a subnormal may become zero.
    ///
    /// # Safety
    /// As there, and AVX-512 BF16.
    #[inline(always)]
    unsafe fn store_ftz(at: *mut Self, mask: u16, sums: __m512) {
        // SAFETY: the caller's.
        unsafe { Self::store(at, mask, sums) }
    }

    /// Rounds 32 elements as [`Self::store`] does.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; 32 elements from `at` on can be written.
    #[inline(always)]
    unsafe fn store_pair(at: *mut Self, sums: [__m512; 2]) {
        // SAFETY: the caller's.
        unsafe {
            Self::store(at, u16::MAX, sums[0]);
            Self::store(at.add(16), u16::MAX, sums[1]);
        }
    }

    /// As [`Self::store_pair`], but a subnormal may become zero.
    ///
    /// # Safety
    /// As there, and AVX-512 BF16.
    #[inline(always)]
    unsafe fn store_ftz_pair(at: *mut Self, sums: [__m512; 2]) {
        // SAFETY: the caller's.
        unsafe { Self::store_pair(at, sums) }
    }

    /// Writes a tile, plus the bias of each column: its rows `stride` elements apart. Subnormals may become
    /// zero, as they are to what multiplies pairs.
    ///
    /// # Safety
    /// The elements of all rows can be written, and nobody else reads or writes them.
    ///
    /// # Panics
    /// When the bias has fewer columns, or the processor has no AVX-512.
    unsafe fn store_tile(
        tile: &Tile<'_>,
        bias: Option<&[f32]>,
        out: *mut MaybeUninit<Self>,
        stride: usize,
    ) {
        assert!(super::InstructionSet::Avx512F32.is_available(), "rounding needs AVX-512");
        assert!(bias.is_none_or(|bias| bias.len() >= tile.columns));
        let bias = bias.map(<[f32]>::as_ptr);
        // SAFETY: the features, as asserted or asked for, and the caller's.
        unsafe {
            match is_x86_feature_detected!("avx512bf16") {
                true => store_ftz_tile(tile, bias, out, stride),
                false => store_tile::<Self, false>(tile, bias, out, stride),
            }
        }
    }

    /// Writes `sums + bias`, as many as `out` has places.
    ///
    /// # Panics
    /// When there are fewer, or the processor has no AVX-512.
    fn store_all(sums: &[f32], bias: Option<&[f32]>, out: &mut [MaybeUninit<Self>]) {
        assert!(super::InstructionSet::Avx512F32.is_available(), "rounding needs AVX-512");
        assert!(sums.len() >= out.len() && bias.is_none_or(|bias| bias.len() >= out.len()));
        // SAFETY: the features and lengths, as asserted.
        unsafe { store_line(sums.as_ptr(), bias.map(<[f32]>::as_ptr), out) };
    }
}

/// [`store_tile`] with the instruction that rounds to BF16, where rounding takes a dozen otherwise; it
/// takes subnormals for zero.
///
/// # Safety
/// As there, and AVX-512 BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn store_ftz_tile<O: Rounded>(
    tile: &Tile<'_>,
    bias: Option<*const f32>,
    out: *mut MaybeUninit<O>,
    stride: usize,
) {
    // SAFETY: the caller's.
    unsafe { store_tile::<O, true>(tile, bias, out, stride) }
}

/// See [`Rounded::store_tile`]. Inlined where the features are.
///
/// # Safety
/// AVX-512 F, BW and VL, and BF16 if `FTZ`; places for every row, and numbers in the bias.
#[inline(always)]
unsafe fn store_tile<O: Rounded, const FTZ: bool>(
    tile: &Tile<'_>,
    bias: Option<*const f32>,
    out: *mut MaybeUninit<O>,
    stride: usize,
) {
    for (row, sums) in tile.sums.iter().enumerate().take(tile.rows) {
        let at = out.wrapping_add(row * stride);
        // Most often the next tile's: the line comes, to be written, while that is computed. The standard
        // library's function gives the instruction for reading.
        let next = at.wrapping_add(tile.columns);
        // SAFETY: a hint, of any address; every processor with AVX-512 has it.
        unsafe {
            asm!("prefetchw [{}]", in(reg) next, options(nostack, readonly, preserves_flags))
        };
        // SAFETY: the caller's.
        unsafe { store_all::<O, FTZ>(sums.as_ptr(), bias, from_raw_parts_mut(at, tile.columns)) };
    }
}

/// See [`Rounded::store_all`].
///
/// # Safety
/// AVX-512 F, BW and VL; as many sums, and numbers in the bias, as places.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn store_line<O: Rounded>(
    sums: *const f32,
    bias: Option<*const f32>,
    out: &mut [MaybeUninit<O>],
) {
    // SAFETY: the caller's.
    unsafe { store_all::<O, false>(sums, bias, out) }
}

/// As [`store_line`]. Inlined where the features are.
///
/// # Safety
/// As there, and AVX-512 BF16 if `FTZ`.
#[inline(always)]
pub(in crate::kernels) unsafe fn store_all<O: Rounded, const FTZ: bool>(
    sums: *const f32,
    bias: Option<*const f32>,
    out: &mut [MaybeUninit<O>],
) {
    let (pairs, rest) = out.as_chunks_mut::<32>();
    let done = pairs.len() * 32;
    for (i, places) in pairs.iter_mut().enumerate() {
        let at = places.as_mut_ptr().cast();
        // SAFETY: a pair has 32 places, and there are as many sums.
        unsafe {
            let first = sum(sums, bias, i * 32, u16::MAX);
            let pair = [first, sum(sums, bias, i * 32 + 16, u16::MAX)];
            if FTZ { O::store_ftz_pair(at, pair) } else { O::store_pair(at, pair) }
        }
    }
    for (i, places) in rest.chunks_mut(16).enumerate() {
        let mask = ((1u32 << places.len()) - 1) as u16;
        // SAFETY: as many places, and sums, as the mask has elements.
        unsafe {
            let (at, sums) = (places.as_mut_ptr().cast(), sum(sums, bias, done + i * 16, mask));
            if FTZ { O::store_ftz(at, mask, sums) } else { O::store(at, mask, sums) }
        }
    }
}

/// The sums of `mask` from `at` on, plus their bias.
///
/// # Safety
/// AVX-512 F; there are those sums, and numbers in the bias.
#[inline(always)]
unsafe fn sum(sums: *const f32, bias: Option<*const f32>, at: usize, mask: u16) -> __m512 {
    // SAFETY: the caller's.
    unsafe {
        let sum = _mm512_maskz_loadu_ps(mask, sums.add(at));
        match bias {
            Some(bias) => _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, bias.add(at))),
            None => sum,
        }
    }
}

impl Rounded for f32 {
    #[inline(always)]
    unsafe fn store(at: *mut Self, mask: u16, sums: __m512) {
        // SAFETY: the caller's.
        unsafe { _mm512_mask_storeu_ps(at, mask, sums) }
    }
}

impl Rounded for bf16 {
    #[inline(always)]
    unsafe fn store(at: *mut Self, mask: u16, sums: __m512) {
        // SAFETY: the caller's.
        unsafe {
            let rounded = _mm512_srli_epi32::<16>(rounded(sums));
            _mm256_mask_storeu_epi16(at.cast(), mask, _mm512_cvtepi32_epi16(rounded));
        }
    }

    #[inline(always)]
    unsafe fn store_ftz(at: *mut Self, mask: u16, sums: __m512) {
        // SAFETY: the caller's; the two are of 32 bytes.
        unsafe {
            let rounded: __m256i = transmute(_mm512_cvtneps_pbh(sums));
            _mm256_mask_storeu_epi16(at.cast(), mask, rounded);
        }
    }

    #[inline(always)]
    unsafe fn store_pair(at: *mut Self, sums: [__m512; 2]) {
        // SAFETY: the caller's. A whole cache line at once takes half the time of two halves.
        unsafe {
            let both = upper_halves(rounded(sums[0]), rounded(sums[1]));
            _mm512_storeu_si512(at.cast(), both);
        }
    }

    #[inline(always)]
    unsafe fn store_ftz_pair(at: *mut Self, sums: [__m512; 2]) {
        // SAFETY: the caller's; the two are of 64 bytes.
        unsafe {
            let both: __m512i = transmute(_mm512_cvtne2ps_pbh(sums[1], sums[0]));
            _mm512_storeu_si512(at.cast(), both);
        }
    }
}

/// The upper halves of 32 numbers of 32 bits.
///
/// # Safety
/// AVX-512 F and BW.
#[inline(always)]
pub(in crate::kernels) unsafe fn upper_halves(first: __m512i, last: __m512i) -> __m512i {
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

/// To nearest even, in the upper halves. Not the instruction that rounds to BF16: it flushes subnormals.
///
/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn rounded(sums: __m512) -> __m512i {
    // SAFETY: the caller's.
    unsafe {
        let bits = _mm512_castps_si512(sums);
        let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let up = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
        // A NaN stays one: its sign and upper bits, and the quiet bit.
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums, sums);
        _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x0040_0000))
    }
}

impl Rounded for f16 {
    #[inline(always)]
    unsafe fn store(at: *mut Self, mask: u16, sums: __m512) {
        // SAFETY: the caller's.
        unsafe {
            let rounded =
                _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(sums);
            _mm256_mask_storeu_epi16(at.cast(), mask, rounded);
        }
    }
}
