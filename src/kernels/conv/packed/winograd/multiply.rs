//! The products in the transform, in registers.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

/// `ROWS` rows of the left matrix, elements `LEFT` apart from row to row, times `COUNT` vectors of
/// columns of the right one, over `depth`. Written to rows of `out`, or added to them where `ADD`.
///
/// # Safety
/// AVX-512 F. From its pointer on, each matrix can be read or written at the steps given: the left
/// one's along the sum, the right one's along the sum, and the one from row to row of `out`.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) unsafe fn multiply<
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
    let mut sums = [[_mm512_setzero_ps(); COUNT]; ROWS];
    let ((mut left, left_step), (mut right, right_step)) = (left, right);
    for _ in 0..depth {
        let mut columns = [_mm512_setzero_ps(); COUNT];
        for (n, column) in columns.iter_mut().enumerate() {
            // SAFETY: the caller's.
            *column = unsafe { _mm512_loadu_ps(right.wrapping_add(n * 16)) };
        }
        for (i, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's.
            let row = unsafe { _mm512_set1_ps(*left.wrapping_add(i * LEFT)) };
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
            // SAFETY: the caller's.
            unsafe {
                let sum = if ADD { _mm512_add_ps(_mm512_loadu_ps(at), sum) } else { sum };
                _mm512_storeu_ps(at, sum);
            }
        }
    }
}
