//! Memory asked for before it is needed.
#![allow(unsafe_code)]

/// Asks for the cache lines of `count` elements from `at` on, which may lie beyond the slice; where the first is not at
/// the start of a line, the last line may be left out. A hint: a processor asks ahead by itself, but not across pages, and
/// not along as many places at once.
#[inline(always)]
pub(in crate::kernels) fn prefetch<T>(data: &[T], at: usize, count: usize) {
    prefetch_at(data.as_ptr().wrapping_add(at), count);
}

/// Whether planes of so many elements are far enough apart to ask for the next: it is often in another page.
pub(in crate::kernels) fn is_far<T>(plane: usize) -> bool {
    plane * size_of::<T>() >= 2048
}

/// As [`prefetch`], from any address, whatever is there.
#[inline(always)]
pub(in crate::kernels) fn prefetch_at<T>(at: *const T, count: usize) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..count * size_of::<T>()).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: nothing is read; any address will do, and every such processor has it.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_byte_add(offset).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (at, count);
}

/// Asks for the cache line of an address, to be written. The standard library's function gives the instruction for reading.
/// Elsewhere than on x86-64 it asks for nothing.
#[inline(always)]
pub(in crate::kernels) fn prefetch_to_write<T>(at: *const T) {
    // SAFETY: a hint, of any address; every processor with AVX2 takes it, and others of this target do nothing.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::asm;
        asm!("prefetchw [{}]", in(reg) at, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}
