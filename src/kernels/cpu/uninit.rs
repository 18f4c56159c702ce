//! Memory for results that is not zeroed first, which would be one more pass over it.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// A vector whose elements `fill` writes, every one of them.
#[inline(always)] // `fill` may be a loop that is compiled for some set of instructions
pub(in crate::kernels) fn uninit_vec<T: Copy>(
    len: usize,
    fill: impl FnOnce(&mut [MaybeUninit<T>]),
) -> Vec<T> {
    let mut data = Vec::with_capacity(len);
    fill(&mut data.spare_capacity_mut()[..len]);
    // SAFETY: `fill` has written them all.
    unsafe { data.set_len(len) };
    data
}

/// Zeros in a part of such memory: for a task that writes more than once, or not everything. Whoever goes on with it has it
/// in the cache by then.
pub(in crate::kernels) fn zeroed<T: Copy + Default>(part: &mut [MaybeUninit<T>]) -> &mut [T] {
    part.fill(MaybeUninit::new(T::default()));
    // SAFETY: all elements are written, and a slice of `MaybeUninit<T>` lies in memory as one of `T` does.
    unsafe { &mut *(std::ptr::from_mut(part) as *mut [T]) }
}

/// Elements as places for others.
///
/// # Safety
/// Only elements are written to the places.
pub(in crate::kernels) unsafe fn as_uninit<T: Copy>(data: &mut [T]) -> &mut [MaybeUninit<T>] {
    // SAFETY: they lie in memory alike, and the elements stay elements, as the caller says.
    unsafe { &mut *(std::ptr::from_mut(data) as *mut [MaybeUninit<T>]) }
}

/// As [`uninit_vec`], where `fill` says that it has written every element; else nothing.
pub(in crate::kernels) fn try_uninit_vec<T: Copy>(
    len: usize,
    fill: impl FnOnce(&mut [MaybeUninit<T>]) -> bool,
) -> Option<Vec<T>> {
    let mut data = Vec::with_capacity(len);
    let whole = fill(&mut data.spare_capacity_mut()[..len]);
    // SAFETY: `fill` has written them all.
    whole.then(|| unsafe { data.set_len(len) }).map(|()| data)
}
