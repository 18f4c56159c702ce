//! Sixteen lanes: the trait that each instruction set implements, and runs of lanes.
#![allow(unsafe_code)]

use half::{bf16, f16};

/// The mask of the first `count` lanes, or of all.
pub(in crate::kernels) fn first_lanes(count: usize) -> u16 {
    ((1u32 << count.min(16)) - 1) as u16
}

/// Sixteen F32. The lanes of a mask are a run: the lowest bit is lane 0.
///
/// # Safety
/// Of all methods: the instruction set's features, which the function that they are inlined into enables
/// (`with_vectors!`). Of loads and stores: the elements of the mask, or all 16, can be read or written. No other
/// element is touched.
pub(in crate::kernels) trait Vector: Copy {
    /// Whether it is one register, of 32: tiles can be larger then.
    const WIDE: bool;

    unsafe fn zero() -> Self;
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn store(self, at: *mut f32);

    /// The elements of `mask`, and zeros for the others.
    unsafe fn load_masked(at: *const f32, mask: u16) -> Self;
    /// The same, widened.
    unsafe fn load_bf16(at: *const bf16, mask: u16) -> Self;
    /// The same, widened.
    unsafe fn load_f16(at: *const f16, mask: u16) -> Self;
    /// 32 elements as they are, two in a lane, the lower half first; zeros for those that are not in the mask.
    unsafe fn load_pairs(at: *const bf16, mask: u32) -> Self;

    /// Writes the elements of `mask`.
    unsafe fn store_masked(self, at: *mut f32, mask: u16);
    /// The same, rounded to nearest even. A NaN keeps its sign and upper bits, and becomes quiet.
    unsafe fn store_bf16(self, at: *mut bf16, mask: u16);
    /// As [`Self::store_bf16`], but a subnormal may become zero. Within `with_ftz_vectors!` only.
    #[inline(always)]
    unsafe fn store_bf16_ftz(self, at: *mut bf16, mask: u16) {
        // SAFETY: the caller's.
        unsafe { self.store_bf16(at, mask) }
    }
    /// 32 elements.
    #[inline(always)]
    unsafe fn store_bf16_pair([first, last]: [Self; 2], at: *mut bf16) {
        // SAFETY: the caller's.
        unsafe {
            first.store_bf16(at, u16::MAX);
            last.store_bf16(at.add(16), u16::MAX);
        }
    }
    /// 32 elements, as [`Self::store_bf16_ftz`].
    #[inline(always)]
    unsafe fn store_bf16_ftz_pair(pair: [Self; 2], at: *mut bf16) {
        // SAFETY: the caller's.
        unsafe { Self::store_bf16_pair(pair, at) }
    }
    /// What [`Self::load_pairs`] loads.
    unsafe fn store_pairs(self, at: *mut bf16, mask: u32);
    /// The elements of `mask`, rounded to nearest even.
    unsafe fn store_f16(self, at: *mut f16, mask: u16);

    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// `self * by + sum`, rounded once.
    unsafe fn mul_add(self, by: Self, sum: Self) -> Self;
    /// The bits of both.
    unsafe fn or(self, other: Self) -> Self;
    /// The upper halves of the bits, and zeros below: BF16, cut.
    unsafe fn upper(self) -> Self;
    /// The lower halves of the bits, moved up; zeros below.
    unsafe fn shift_up(self) -> Self;
    /// The upper halves of the bits, moved down; zeros above.
    unsafe fn shift_down(self) -> Self;
    /// The nearest BF16, and of two the larger in magnitude. A NaN is cut instead: rounded up, its payload could carry
    /// into a zero.
    unsafe fn nearest_bf16(self) -> Self;

    /// The lower halves of these lanes and then of `high`, two in a lane.
    unsafe fn lower_halves(self, high: Self) -> Self;
    /// The upper halves.
    unsafe fn upper_halves(self, high: Self) -> Self;

    /// The lanes of even numbers, of these and then of `high`.
    unsafe fn evens(self, high: Self) -> Self;
    /// The lanes of odd numbers.
    unsafe fn odds(self, high: Self) -> Self;
    /// The lanes of both in turns: of their first halves, and of their last ones.
    unsafe fn interleave(self, odds: Self) -> [Self; 2];
    /// Sixteen rows of sixteen, with rows and columns exchanged.
    unsafe fn transpose(rows: [Self; 16]) -> [Self; 16];

    /// Whether no lane of `mask` is infinite or NaN.
    unsafe fn is_finite(self, mask: u16) -> bool;

    /// `ROWS` rows of the left matrix, elements `LEFT` apart from row to row, times `COUNT` vectors of columns of the
    /// right one, over `depth`. Each pointer comes with a step: along the sum, and for `out` from row to row. Written
    /// to rows of `out`, or added to them where `ADD`. `ROWS` is a multiple of eight, or at most six where `COUNT` is 1.
    unsafe fn multiply<const ROWS: usize, const COUNT: usize, const LEFT: usize, const ADD: bool>(
        left: (*const f32, usize),
        right: (*const f32, usize),
        depth: usize,
        out: (*mut f32, usize),
    );
}

/// Copies the elements of a mask, which is a run.
///
/// # Safety
/// They can be read and written.
#[inline(always)]
pub(super) unsafe fn copy_run<T: Copy>(from: *const T, to: *mut T, mask: u16) {
    let (first, count) = (mask.trailing_zeros() as usize, mask.count_ones() as usize);
    let (from, to) = (from.wrapping_add(first), to.wrapping_add(first));
    // A call of `memcpy` would take longer than these few elements.
    // SAFETY: the caller's, of as many elements as a length begins with.
    unsafe {
        match count {
            0 => {}
            1 => *to = *from,
            2..4 => copy_ends::<T, 2>(from, to, count),
            4..8 => copy_ends::<T, 4>(from, to, count),
            8..16 => copy_ends::<T, 8>(from, to, count),
            _ => copy_ends::<T, 16>(from, to, count),
        }
    }
}

/// Copies the first `N` and the last `N` of `count` elements, which may overlap.
///
/// # Safety
/// There are at least `N`, and all can be read and written.
#[inline(always)]
unsafe fn copy_ends<T: Copy, const N: usize>(from: *const T, to: *mut T, count: usize) {
    // SAFETY: the caller's.
    unsafe {
        let first = from.cast::<[T; N]>().read_unaligned();
        let last = from.add(count - N).cast::<[T; N]>().read_unaligned();
        to.cast::<[T; N]>().write_unaligned(first);
        to.add(count - N).cast::<[T; N]>().write_unaligned(last);
    }
}
