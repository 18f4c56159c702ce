//! The epilogue of packed GEMM: adds the bias to F32 sums, rounds them once, to nearest even, and stores them.
//!
//! The thread that has multiplied a tile of at most 32 × 64 sums stores it at once, from its first-level cache. So the
//! F32 sums need no pass over memory of their own, unless they were cut and met in a buffer. Results are F32, F16 or
//! BF16: [`Rounded`] has the stores of each. The loop takes 32 elements, as many BF16 as an AVX-512 register has. Masks
//! cover what is left of a row, and nothing beyond it is touched. While one tile is stored, the place of the next is
//! prefetched.
//!
//! AVX512-BF16 rounds 32 elements to BF16 in one instruction, which makes subnormals zero. Tiles use it where the
//! processor has it, as the instructions that multiply BF16 count subnormals as zero anyway. [`Rounded::store_all`],
//! for sums from a buffer, keeps them.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::slice::from_raw_parts_mut;

use half::{bf16, f16};

use super::isa::InstructionSet;
use super::product::Tile;
use crate::kernels::cpu::lane::Lane;
use crate::kernels::cpu::prefetch::prefetch_to_write;
#[cfg(doc)]
use crate::kernels::cpu::vector::Vectors;
use crate::kernels::cpu::vector::{Vector, first_lanes, with_bf16_vectors, with_ftz_vectors};

/// What sums are rounded to.
pub(in crate::kernels) trait Rounded: Lane<Acc = f32> {
    /// Rounds the elements of `mask` to nearest even, into memory; the rest is not touched.
    ///
    /// # Safety
    /// As [`Vector::store_masked`].
    unsafe fn store<V: Vector>(at: *mut Self, mask: u16, sums: V);

    /// As [`Self::store`], but a subnormal may become zero.
    ///
    /// # Safety
    /// As there, and within `with_ftz_vectors!`.
    #[inline(always)]
    unsafe fn store_ftz<V: Vector>(at: *mut Self, mask: u16, sums: V) {
        // SAFETY: the caller's.
        unsafe { Self::store(at, mask, sums) }
    }

    /// Rounds 32 elements as [`Self::store`] does.
    ///
    /// # Safety
    /// The features of `V`; 32 elements from `at` on can be written.
    #[inline(always)]
    unsafe fn store_pair<V: Vector>(at: *mut Self, sums: [V; 2]) {
        // SAFETY: the caller's.
        unsafe {
            Self::store(at, u16::MAX, sums[0]);
            Self::store(at.add(16), u16::MAX, sums[1]);
        }
    }

    /// As [`Self::store_pair`], but a subnormal may become zero.
    ///
    /// # Safety
    /// As there, and within `with_ftz_vectors!`.
    #[inline(always)]
    unsafe fn store_ftz_pair<V: Vector>(at: *mut Self, sums: [V; 2]) {
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
    /// When the bias has fewer columns, or the processor has no vectors [for BF16](Vectors::for_bf16).
    unsafe fn store_tile(
        tile: &Tile<'_>,
        bias: Option<&[f32]>,
        out: *mut MaybeUninit<Self>,
        stride: usize,
    ) {
        assert!(bias.is_none_or(|bias| bias.len() >= tile.columns));
        let bias = bias.map(<[f32]>::as_ptr);
        // SAFETY: the features, as asked for, and the caller's.
        unsafe {
            match InstructionSet::Avx512Bf16.is_available() {
                true => with_ftz_vectors!(V => {
                    store_tile::<Self, V, true>(tile, bias, out, stride)
                }),
                false => with_bf16_vectors!(V => {
                    store_tile::<Self, V, false>(tile, bias, out, stride)
                }),
            }
        }
    }

    /// Writes `sums + bias`, as many as `out` has places.
    ///
    /// # Panics
    /// When there are fewer, or the processor has no vectors [for BF16](Vectors::for_bf16).
    fn store_all(sums: &[f32], bias: Option<&[f32]>, out: &mut [MaybeUninit<Self>]) {
        assert!(sums.len() >= out.len() && bias.is_none_or(|bias| bias.len() >= out.len()));
        let (sums, bias) = (sums.as_ptr(), bias.map(<[f32]>::as_ptr));
        // SAFETY: the features of the vectors; the lengths, as asserted.
        with_bf16_vectors!(V => unsafe { store_all::<Self, V, false>(sums, bias, out) });
    }
}

/// See [`Rounded::store_tile`]. Inlined where the features are.
///
/// # Safety
/// The features of `V`, within `with_ftz_vectors!` if `FTZ`; places for every row, and numbers in the bias.
#[inline(always)]
unsafe fn store_tile<O: Rounded, V: Vector, const FTZ: bool>(
    tile: &Tile<'_>,
    bias: Option<*const f32>,
    out: *mut MaybeUninit<O>,
    stride: usize,
) {
    for (row, sums) in tile.sums.iter().enumerate().take(tile.rows) {
        let at = out.wrapping_add(row * stride);
        // Most often the next tile's: the line comes, to be written, while that is computed.
        let next = at.wrapping_add(tile.columns);
        prefetch_to_write(next);
        // SAFETY: the caller's.
        unsafe {
            let out = from_raw_parts_mut(at, tile.columns);
            store_all::<O, V, FTZ>(sums.as_ptr(), bias, out);
        };
    }
}

/// See [`Rounded::store_all`]. Inlined where the features are.
///
/// # Safety
/// The features of `V`, within `with_ftz_vectors!` if `FTZ`; as many sums, and numbers in the bias, as places.
#[inline(always)]
pub(in crate::kernels) unsafe fn store_all<O: Rounded, V: Vector, const FTZ: bool>(
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
            let first: V = sum(sums, bias, i * 32, u16::MAX);
            let pair = [first, sum(sums, bias, i * 32 + 16, u16::MAX)];
            if FTZ { O::store_ftz_pair(at, pair) } else { O::store_pair(at, pair) }
        }
    }
    for (i, places) in rest.chunks_mut(16).enumerate() {
        let mask = first_lanes(places.len());
        // SAFETY: as many places, and sums, as the mask has elements.
        unsafe {
            let (at, sums) =
                (places.as_mut_ptr().cast(), sum::<V>(sums, bias, done + i * 16, mask));
            if FTZ { O::store_ftz(at, mask, sums) } else { O::store(at, mask, sums) }
        }
    }
}

/// The sums of `mask` from `at` on, plus their bias.
///
/// # Safety
/// The features of `V`; there are those sums, and numbers in the bias.
#[inline(always)]
unsafe fn sum<V: Vector>(sums: *const f32, bias: Option<*const f32>, at: usize, mask: u16) -> V {
    // SAFETY: the caller's.
    unsafe {
        let sum = V::load_masked(sums.add(at), mask);
        match bias {
            Some(bias) => sum.add(V::load_masked(bias.add(at), mask)),
            None => sum,
        }
    }
}

impl Rounded for f32 {
    #[inline(always)]
    unsafe fn store<V: Vector>(at: *mut Self, mask: u16, sums: V) {
        // SAFETY: the caller's.
        unsafe { sums.store_masked(at, mask) }
    }
}

impl Rounded for f16 {
    #[inline(always)]
    unsafe fn store<V: Vector>(at: *mut Self, mask: u16, sums: V) {
        // SAFETY: the caller's.
        unsafe { sums.store_f16(at, mask) }
    }
}

impl Rounded for bf16 {
    #[inline(always)]
    unsafe fn store<V: Vector>(at: *mut Self, mask: u16, sums: V) {
        // SAFETY: the caller's.
        unsafe { sums.store_bf16(at, mask) }
    }

    #[inline(always)]
    unsafe fn store_ftz<V: Vector>(at: *mut Self, mask: u16, sums: V) {
        // SAFETY: the caller's.
        unsafe { sums.store_bf16_ftz(at, mask) }
    }

    #[inline(always)]
    unsafe fn store_pair<V: Vector>(at: *mut Self, sums: [V; 2]) {
        // SAFETY: the caller's.
        unsafe { V::store_bf16_pair(sums, at) }
    }

    #[inline(always)]
    unsafe fn store_ftz_pair<V: Vector>(at: *mut Self, sums: [V; 2]) {
        // SAFETY: the caller's.
        unsafe { V::store_bf16_ftz_pair(sums, at) }
    }
}
