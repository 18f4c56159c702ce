//! Arrays made an element at a time.

#![allow(unsafe_code)]

use std::mem::MaybeUninit;

/// The array of `f(0)`, `f(1)` and so on.
///
/// [`std::array::from_fn`] and `array::map` do the same, for elements of every type and for functions that panic
/// half-way. Every use of those is six functions more to compile, which were a quarter of this crate.
#[inline(always)]
pub(crate) fn from_fn<T: Copy, const N: usize>(mut f: impl FnMut(usize) -> T) -> [T; N] {
    let mut array = [const { MaybeUninit::uninit() }; N];
    let mut i = 0;
    // An iterator would be compiled once more for every use.
    while i < N {
        array[i] = MaybeUninit::new(f(i));
        i += 1;
    }
    // SAFETY: all `N` elements are written, and an array of `MaybeUninit<T>` lies in memory as one of `T` does.
    unsafe { array.as_ptr().cast::<[T; N]>().read() }
}
