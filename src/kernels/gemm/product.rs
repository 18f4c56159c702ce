//! The one call into the `gemm` crate, behind checked slices.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use rayon::prelude::*;

use super::Arithmetic;

/// A view of `rows × cols` elements of a slice: element `(i, j)` is `data[i * row_stride + j *
/// col_stride]`.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) struct Matrix<'a, A> {
    pub(in crate::kernels) data: &'a [A],
    pub(in crate::kernels) rows: usize,
    pub(in crate::kernels) cols: usize,
    pub(in crate::kernels) row_stride: usize,
    pub(in crate::kernels) col_stride: usize,
}

impl<'a, A> Matrix<'a, A> {
    /// Rows of `cols` elements, one after the other.
    pub(in crate::kernels) fn new(data: &'a [A], rows: usize, cols: usize) -> Self {
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The same elements with rows and columns exchanged.
    pub(in crate::kernels) fn t(self) -> Self {
        Self {
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
            ..self
        }
    }

    /// Some of the rows.
    fn rows(self, start: usize, count: usize) -> Self {
        let data = self.data.get(start * self.row_stride..).unwrap_or_default();
        Self { data, rows: count, ..self }
    }

    /// The number of elements a slice needs to hold this view.
    fn extent(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        let last_row = (self.rows - 1).checked_mul(self.row_stride);
        let last_col = (self.cols - 1).checked_mul(self.col_stride);
        let last = last_row.zip(last_col).and_then(|(row, col)| row.checked_add(col));
        // What does not fit the address space fits no slice either.
        last.and_then(|last| last.checked_add(1)).unwrap_or(usize::MAX)
    }
}

/// Who computes a product.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) enum Threads {
    /// The calling thread: for a caller that runs many products side by side.
    One,
    /// Rayon's current pool.
    All,
}

/// `dst = lhs × rhs`, or `dst += lhs × rhs` when `accumulate`, in `A`.
///
/// `dst` is `lhs.rows` rows of `rhs.cols` elements, each `row_stride` after the one before; unless
/// `accumulate`, its old elements are not read. The order of every sum depends on the shapes alone.
///
/// # Panics
/// When a view reaches beyond its slice, or the shapes do not match.
pub(in crate::kernels) fn product<A: Arithmetic>(
    lhs: Matrix<'_, A>,
    rhs: Matrix<'_, A>,
    dst: &mut [A],
    row_stride: usize,
    accumulate: bool,
    threads: Threads,
) {
    let to = Destination { at: dst.as_mut_ptr(), len: dst.len(), row_stride, accumulate };
    // SAFETY: the elements are initialised, and borrowed mutably.
    unsafe { multiply(lhs, rhs, to, threads) };
}

/// As [`product`] of whole rows, into memory whose elements it writes, every one of them.
///
/// # Panics
/// As [`product`], and when `dst` has other elements too.
pub(super) fn product_fresh<A: Arithmetic>(
    lhs: Matrix<'_, A>,
    rhs: Matrix<'_, A>,
    dst: &mut [MaybeUninit<A>],
    threads: Threads,
) {
    assert_eq!(dst.len(), lhs.rows * rhs.cols, "elements would be left out");
    if lhs.cols == 0 {
        dst.fill(MaybeUninit::new(A::zero()));
        return;
    }
    let at = dst.as_mut_ptr().cast();
    let to = Destination { at, len: dst.len(), row_stride: rhs.cols, accumulate: false };
    // SAFETY: the elements are borrowed mutably, and not read.
    unsafe { multiply(lhs, rhs, to, threads) };
}

/// Where a product goes.
#[derive(Clone, Copy)]
struct Destination<A> {
    at: *mut A,
    len: usize,
    row_stride: usize,
    accumulate: bool,
}

// SAFETY: threads are given parts without an element in common; see `multiply`.
unsafe impl<A: Send> Sync for Destination<A> {}

/// Terms of the products that are cut up here. Of these sizes the `gemm` crate's threads wait for each
/// other longer than they multiply; smaller ones are one thread's.
const CUT: std::ops::RangeInclusive<usize> = 1 << 20..=1 << 25;
/// Rows or columns of a part, at most about.
const PART: usize = 128;
/// Parts start at multiples of this: of the lanes of every vector.
const LANES: usize = 16;

/// How many parts a product of `lines` times `others` elements is cut into, by its longer side.
///
/// A part has the bits that it has in the whole, so that bits depend neither on the number of threads nor on who cuts. The
/// `gemm` crate adds up in another order where there are at most 256 elements, or at most 64 rows and 64 columns: no part
/// is that small.
fn parts(lines: usize, others: usize) -> usize {
    let least = (256 / others.max(1) + 1).max(65);
    let most = PART.max(2 * least / 256 * 256);
    lines.div_ceil(most).min(lines / (least + LANES))
}

/// The rows or columns of a part.
fn part(index: usize, parts: usize, lines: usize) -> std::ops::Range<usize> {
    let start = |index: usize| match index == parts {
        true => lines,
        false => index * lines / parts / LANES * LANES,
    };
    start(index)..start(index + 1)
}

/// # Safety
/// The elements of `to` are nobody else's, and initialised where it is to be read.
unsafe fn multiply<A: Arithmetic>(
    lhs: Matrix<'_, A>,
    rhs: Matrix<'_, A>,
    to: Destination<A>,
    threads: Threads,
) {
    let (m, k, n) = (lhs.rows, lhs.cols, rhs.cols);
    assert_eq!(k, rhs.rows, "the inner dimensions differ");
    assert!(n <= to.row_stride, "the rows of the destination overlap");
    let written =
        Matrix { data: &[] as &[A], rows: m, cols: n, row_stride: to.row_stride, col_stride: 1 };
    assert!(written.extent() <= to.len, "the destination is too small");
    assert!(lhs.extent() <= lhs.data.len(), "the left matrix reaches beyond its data");
    assert!(rhs.extent() <= rhs.data.len(), "the right matrix reaches beyond its data");
    // The longer side is cut, as every thread packs the other one.
    let (tall, lines) = (m >= n, m.max(n));
    let parts = parts(lines, m.min(n));
    let terms = m.saturating_mul(n).saturating_mul(k);
    match threads {
        Threads::All if parts > 1 && CUT.contains(&terms) => {
            (0..parts).into_par_iter().for_each(|index| {
                let to = &to;
                let lines = part(index, parts, lines);
                let (start, count) = (lines.start, lines.len());
                let (lhs, rhs, offset) = match tall {
                    true => (lhs.rows(start, count), rhs, start * to.row_stride),
                    false => (lhs, rhs.t().rows(start, count).t(), start),
                };
                let to =
                    Destination { at: to.at.wrapping_add(offset), len: to.len - offset, ..*to };
                // SAFETY: parts of the matrices and of the destination, other rows or columns than
                // those of other threads.
                unsafe { call(lhs, rhs, to, gemm::Parallelism::None) };
            });
        }
        // SAFETY: as asserted; the caller's.
        Threads::All => unsafe { call(lhs, rhs, to, gemm::Parallelism::Rayon(0)) },
        // SAFETY: likewise.
        Threads::One => unsafe { call(lhs, rhs, to, gemm::Parallelism::None) },
    }
}

/// # Safety
/// As [`multiply`], and what that asserts.
unsafe fn call<A: Arithmetic>(
    lhs: Matrix<'_, A>,
    rhs: Matrix<'_, A>,
    to: Destination<A>,
    threads: gemm::Parallelism,
) {
    let (m, k, n) = (lhs.rows, lhs.cols, rhs.cols);
    // SAFETY: gemm reads lhs at i * row_stride + p * col_stride and rhs at p * row_stride + j *
    // col_stride, and reads (if `accumulate`) and writes dst at i * row_stride + j, for i < m, p <
    // k, j < n. All three lie inside their slices: `extent` is one more than the largest such
    // offset, and was compared with the length. As j < n <= row_stride, each place in dst is named
    // once, so threads do not share one. A slice has at most isize::MAX bytes, so every stride that
    // is multiplied by more than zero fits an isize. dst is the caller's alone, so it overlaps
    // neither operand; the slices outlive the call, which returns when its threads are done, and
    // what is read is initialised. `A` is f32 or f64 (gemm panics on any other type).
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            to.at,
            1,
            to.row_stride as isize,
            to.accumulate,
            lhs.data.as_ptr(),
            lhs.col_stride as isize,
            lhs.row_stride as isize,
            rhs.data.as_ptr(),
            rhs.col_stride as isize,
            rhs.row_stride as isize,
            A::of(1.),
            A::of(1.),
            false,
            false,
            false,
            threads,
        );
    }
}
