//! The one call into the `gemm` crate, behind checked slices.

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
#[allow(unsafe_code)]
pub(in crate::kernels) fn product<A: Arithmetic>(
    lhs: Matrix<'_, A>,
    rhs: Matrix<'_, A>,
    dst: &mut [A],
    row_stride: usize,
    accumulate: bool,
    threads: Threads,
) {
    let (m, k, n) = (lhs.rows, lhs.cols, rhs.cols);
    assert_eq!(k, rhs.rows, "the inner dimensions differ");
    assert!(n <= row_stride, "the rows of the destination overlap");
    let written = Matrix { data: &*dst, rows: m, cols: n, row_stride, col_stride: 1 };
    assert!(written.extent() <= dst.len(), "the destination is too small");
    assert!(lhs.extent() <= lhs.data.len(), "the left matrix reaches beyond its data");
    assert!(rhs.extent() <= rhs.data.len(), "the right matrix reaches beyond its data");
    let threads = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::All => gemm::Parallelism::Rayon(0),
    };
    // SAFETY: gemm reads lhs at i * row_stride + p * col_stride and rhs at p * row_stride + j *
    // col_stride, and reads (if `accumulate`) and writes dst at i * row_stride + j, for i < m, p <
    // k, j < n. All three lie inside their slices: `extent` is one more than the largest such
    // offset, and was compared with the length. As j < n <= row_stride, each place in dst is named
    // once, so threads do not share one. A slice has at most isize::MAX bytes, so every stride that
    // is multiplied by more than zero fits an isize. dst is borrowed mutably, so it overlaps
    // neither operand; the slices outlive the call, which returns when its threads are done, and
    // are initialised. `A` is f32 or f64 (gemm panics on any other type).
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst.as_mut_ptr(),
            1,
            row_stride as isize,
            accumulate,
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
