//! Gradients of the weights, from sums that lie as products leave them.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use crate::kernels::cpu::vector::{Vector, first_lanes};

/// How many runs of images have sums of their own: enough for the threads of most processors, and few enough that
/// the sums stay small beside the images.
pub(super) fn runs(weights: usize) -> usize {
    ((1 << 20) / weights.max(1)).clamp(2, 16)
}

/// Adds up the runs of `count` kernels, at most 16, and writes them `stride` apart: tap `i` of theirs lies from `base +
/// offsets[i]` on in each run.
///
/// # Safety
/// The features of `V`.
#[inline(always)]
pub(super) unsafe fn write_kernels<V: Vector>(
    runs: &[impl AsRef<[f32]>],
    offsets: &[usize],
    base: usize,
    count: usize,
    kernels: &mut [MaybeUninit<f32>],
    stride: usize,
) {
    let lanes = first_lanes(count);
    assert!((1..=16).contains(&count) && (count - 1) * stride + offsets.len() <= kernels.len());
    for (first, offsets) in offsets.chunks(16).enumerate() {
        // SAFETY: the features; masks have no more elements than the runs have from there on, and the kernels taps, as
        // asserted.
        unsafe {
            let mut taps = [V::zero(); 16];
            for (tap, offset) in taps.iter_mut().zip(offsets) {
                for (number, run) in runs.iter().enumerate() {
                    let sums = &run.as_ref()[base + offset..][..count];
                    let sums = V::load_masked(sums.as_ptr(), lanes);
                    *tap = if number == 0 { sums } else { tap.add(sums) };
                }
            }
            let mask = first_lanes(offsets.len());
            for (i, kernel) in V::transpose(taps).into_iter().enumerate().take(count) {
                let at = kernels.as_mut_ptr().add(i * stride + first * 16);
                kernel.store_masked(at.cast(), mask);
            }
        }
    }
}
