//! Sums, rounded into results.
#![allow(unsafe_code)]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use half::{bf16, f16};

use crate::kernels::elementwise::lane::Lane;

/// What sums are rounded to.
pub(in crate::kernels) trait Rounded: Lane<Acc = f32> {
    /// Rounds the elements of `mask` to nearest even, into memory; the rest is not touched.
    ///
    /// # Safety
    /// AVX-512 F, BW and VL; the elements of `mask` from `at` on can be written.
    unsafe fn store(at: *mut Self, mask: u16, sums: __m512);

    /// Writes `sums + bias`, as many as `out` has places.
    ///
    /// # Panics
    /// When there are fewer, or the processor has no AVX-512.
    fn store_all(sums: &[f32], bias: Option<&[f32]>, out: &mut [MaybeUninit<Self>]) {
        assert!(super::Unit::Fma.is_available(), "rounding needs AVX-512");
        assert!(sums.len() >= out.len() && bias.is_none_or(|bias| bias.len() >= out.len()));
        // SAFETY: the features and lengths, as asserted.
        unsafe { store_all(sums.as_ptr(), bias.map(<[f32]>::as_ptr), out) };
    }
}

/// See [`Rounded::store_all`].
///
/// # Safety
/// AVX-512 F, BW and VL; as many sums, and numbers in the bias, as places.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn store_all<O: Rounded>(
    sums: *const f32,
    bias: Option<*const f32>,
    out: &mut [MaybeUninit<O>],
) {
    for (i, places) in out.chunks_mut(16).enumerate() {
        let mask = ((1u32 << places.len()) - 1) as u16;
        // SAFETY: the mask has no more elements than there are places.
        unsafe {
            let mut vector = _mm512_maskz_loadu_ps(mask, sums.add(i * 16));
            if let Some(bias) = bias {
                vector = _mm512_add_ps(vector, _mm512_maskz_loadu_ps(mask, bias.add(i * 16)));
            }
            O::store(places.as_mut_ptr().cast(), mask, vector);
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
        // SAFETY: the caller's. Not the instruction that rounds to BF16: it flushes subnormals.
        unsafe {
            let bits = _mm512_castps_si512(sums);
            let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
            // A NaN stays one: its sign and upper bits, and the quiet bit.
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(sums, sums);
            let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
            let rounded = _mm512_srli_epi32::<16>(_mm512_mask_mov_epi32(up, nan, quiet));
            _mm256_mask_storeu_epi16(at.cast(), mask, _mm512_cvtepi32_epi16(rounded));
        }
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
