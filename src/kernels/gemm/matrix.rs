//! Matrices by their strides.

use std::ops::Range;

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
    pub(super) fn rows(self, rows: Range<usize>) -> Self {
        let data = self.data.get(rows.start * self.row_stride..).unwrap_or_default();
        Self { data, rows: rows.len(), ..self }
    }

    /// The number of elements a slice needs to hold this view.
    pub(super) fn extent(&self) -> usize {
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
