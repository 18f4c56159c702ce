//! Matrix products in F32 or F64 that packed GEMM does not take. Operands and sums have one type.
//!
//! Large ones in F32 go to [`blocked`] where that is faster, all others to the `gemm` crate. The crate reads operands by
//! their strides and packs what it has to, so a transpose costs no pass of its own. It runs on the calling thread. Its
//! own threads are rayon's, which take other tasks while they wait, and callers hold storage locks ([`parallel`] says why
//! that matters).
//!
//! So it is here that threads share a product of the crate's. The longer side is cut in halves until there are enough
//! parts, and each part is one call. A part packs all of the other side for itself, so parts keep at least [`PART`] rows
//! or columns. The cuts change no order in which the crate adds up terms: bits depend neither on the cuts nor on the
//! number of threads.
//!
//! This module has the only call into the crate, whose pointers it takes from slices with checked bounds.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;

use super::blocked;
use super::matrix::Matrix;
use super::operand::Arithmetic;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::vector::Vectors;

/// Who computes a product.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernels) enum Threads {
    /// The calling thread: for a caller that runs many products side by side.
    One,
    /// That, and those that are free to help ([`parallel`]).
    All,
}

/// `dst = lhs × rhs`, or `dst += lhs × rhs` when `accumulate`, in `A`.
///
/// `dst` is `lhs.rows` rows of `rhs.cols` elements, each `row_stride` after the one before; unless
/// `accumulate`, its old elements are not read. The order of every sum depends on the shapes, on which side is
/// transposed, and on the instruction set.
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
pub(super) fn product_uninit<A: Arithmetic>(
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

// SAFETY: threads are given parts without an element in common; see `in_parts`.
unsafe impl<A: Send> Sync for Destination<A> {}

/// Terms of a product from which on it is cut up: a smaller one takes a thread some 20 µs.
pub(in crate::kernels) const CUT: usize = 1 << 20;
/// Rows or columns of a part, at least, but for the last: a part packs the other side for itself.
const PART: usize = 128;
/// Rows and columns, and elements, up to which the `gemm` crate adds up terms in other ways. Beyond, the order
/// depends on the number of terms alone. So a product's bits depend neither on where it is cut nor on how many
/// threads there are; `cuts_do_not_change_a_bit` tests it.
const ALONE: usize = 64;
const FEW: usize = 256;
/// Rows and columns from which on packing is so little that there are two parts per thread, which end together.
const LARGE: usize = 512;

/// The parts of a product of `m` rows and `n` columns for so many threads: of how many rows, and columns.
fn part(m: usize, n: usize, threads: usize) -> (usize, usize) {
    // In halves, as often as there are threads for, of the longer side.
    let (mut rows, mut columns, mut parts) = (m, n, 1);
    let wanted = |rows: usize, columns: usize| match rows.min(columns) >= LARGE && threads > 1 {
        true => 2 * threads,
        false => threads,
    };
    while parts < wanted(rows, columns) {
        let (view, end, other) = match rows >= columns {
            true => (&mut rows, m, columns),
            false => (&mut columns, n, rows),
        };
        let half = view.div_ceil(2).next_multiple_of(16);
        let last = end - (end.div_ceil(half) - 1) * half;
        // A side that is cut has parts of more than `ALONE`.
        if half < PART || last <= ALONE || last * other.min(ALONE) <= FEW {
            break;
        }
        (*view, parts) = (half, 2 * parts);
    }
    (rows, columns)
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
    let terms = m.saturating_mul(n).saturating_mul(k);
    let threads = match threads {
        Threads::All if terms >= CUT => parallel::threads(),
        _ => 1,
    };
    if let Some((vectors, product)) = in_blocks(lhs, rhs, to) {
        // SAFETY: as asserted; the caller's.
        return unsafe { product.run(vectors, threads) };
    }
    // SAFETY: the same.
    unsafe { in_parts(lhs, rhs, to, threads) }
}

/// By the `gemm` crate.
///
/// # Safety
/// As [`multiply`], and what that asserts.
unsafe fn in_parts<A: Arithmetic>(
    lhs: Matrix<'_, A>,
    rhs: Matrix<'_, A>,
    to: Destination<A>,
    threads: usize,
) {
    let (m, n) = (lhs.rows, rhs.cols);
    let (rows, columns) = part(m, n, threads);
    if (rows, columns) == (m, n) {
        // SAFETY: the caller's.
        return unsafe { call(lhs, rhs, to) };
    }
    let down = m.div_ceil(rows);
    parallel::for_each(down * n.div_ceil(columns), |part| {
        let range = |at: usize, size: usize, end: usize| at * size..end.min((at + 1) * size);
        let (rows, columns) = (range(part % down, rows, m), range(part / down, columns, n));
        let to = &to;
        let offset = rows.start * to.row_stride + columns.start;
        let to = Destination { at: to.at.wrapping_add(offset), len: to.len - offset, ..*to };
        let (lhs, rhs) = (lhs.rows(rows), rhs.t().rows(columns).t());
        // SAFETY: parts of the matrices and of the destination, whose elements no other part has.
        unsafe { call(lhs, rhs, to) };
    });
}

/// The product for [`blocked`], where that is faster.
fn in_blocks<'a, A: Arithmetic>(
    lhs: Matrix<'a, A>,
    rhs: Matrix<'a, A>,
    to: Destination<A>,
) -> Option<(Vectors, blocked::Product<'a>)> {
    let turned = || [lhs.col_stride != 1, rhs.col_stride != 1];
    let vectors = blocked::vectors([lhs.rows, lhs.cols, rhs.cols], turned)?;
    let singles = |Matrix { data, rows, cols, row_stride, col_stride }: Matrix<'a, A>| {
        A::singles(data).map(|data| Matrix { data, rows, cols, row_stride, col_stride })
    };
    let out = (to.at.cast(), to.row_stride);
    let product = blocked::Product {
        left: singles(lhs)?,
        right: singles(rhs)?,
        out,
        accumulate: to.accumulate,
    };
    Some((vectors, product))
}

/// # Safety
/// As [`multiply`], and what that asserts.
unsafe fn call<A: Arithmetic>(lhs: Matrix<'_, A>, rhs: Matrix<'_, A>, to: Destination<A>) {
    let (m, k, n) = (lhs.rows, lhs.cols, rhs.cols);
    // SAFETY: gemm reads lhs at i * row_stride + p * col_stride and rhs at p * row_stride + j *
    // col_stride, and reads (if `accumulate`) and writes dst at i * row_stride + j, for i < m, p <
    // k, j < n. All three lie inside their slices: `extent` is one more than the largest such
    // offset, and was compared with the length. As j < n <= row_stride, each place in dst is named
    // once, so threads do not share one. A slice has at most isize::MAX bytes, so every stride that
    // is multiplied by more than zero fits an isize. dst is the caller's alone, so it overlaps
    // neither operand; the slices outlive the call, and what is read is initialised. `A` is f32 or f64
    // (gemm panics on any other type).
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
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use rand::Rng;

    use super::{Destination, Matrix, in_parts, part};
    use crate::kernels::gemm::tests::generator;

    const SHAPES: [[usize; 3]; 10] = [
        [300, 300, 300],
        [1000, 33, 40],
        [5000, 300, 1],
        [1, 300, 5000],
        [2, 600, 1500],
        [1500, 600, 2],
        [130, 129, 131],
        [700, 520, 3],
        [513, 600, 1025],
        [17, 2000, 400],
    ];

    /// How the `gemm` crate adds up terms must not depend on where products are cut. If a new version fails
    /// here, `ALONE` and `FEW` are no longer its limits.
    #[test]
    fn cuts_do_not_change_a_bit() {
        let (mut rng, mut cut) = (generator(77), 0);
        for [m, k, n] in SHAPES {
            for transposed in [false, true] {
                let mut numbers = |count| -> Vec<f32> {
                    (0..count).map(|_| rng.random_range(-1.0..1.0)).collect()
                };
                let (left, right) = (numbers(m * k), numbers(k * n));
                let (left, mut right) = (Matrix::new(&left, m, k), Matrix::new(&right, k, n));
                if transposed {
                    (right.row_stride, right.col_stride) = (1, k);
                }
                let results = [1, 2, 3, 16, 64].map(|threads| {
                    cut += usize::from(part(m, n, threads) != (m, n));
                    let mut sums = vec![0f32; m * n];
                    let at = sums.as_mut_ptr();
                    let to = Destination { at, len: m * n, row_stride: n, accumulate: false };
                    // SAFETY: matrices of these sizes.
                    unsafe { in_parts(left, right, to, threads) };
                    sums.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                });
                for result in &results[1..] {
                    assert!(*result == results[0], "{m} {k} {n}, {transposed}");
                }
            }
        }
        assert!(cut > SHAPES.len() * 4, "{cut} of these products were cut up");
    }

    #[test]
    fn parts_cover_a_product_and_are_large() {
        for [m, _, n] in SHAPES {
            assert_eq!(part(m, n, 1), (m, n));
            for threads in [2, 3, 16, 64] {
                let (rows, columns) = part(m, n, threads);
                for (size, all) in [(rows, m), (columns, n)] {
                    let last = all - (all.div_ceil(size) - 1) * size;
                    assert!(size == all || size >= super::PART && last > super::ALONE, "{m} {n}");
                }
            }
        }
        assert_eq!(part(256, 256, 2), (128, 256));
        assert_eq!(part(1024, 1024, 2), (512, 512));
        assert_eq!(part(1, 5000, 4), (1, 1264));
        assert_eq!(part(100, 100, 4), (100, 100));
    }
}
