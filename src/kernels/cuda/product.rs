//! A batch of matrix products, as BLAS is asked for it.

use candle_core::Tensor;

/// Matrices of one tensor, row by row, or column by column where `transposed`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices<'a> {
    /// Any strides: its first element is that of the first matrix.
    pub(crate) tensor: &'a Tensor,
    pub(crate) transposed: bool,
    /// Elements from one row to the next, or from one column.
    pub(crate) ld: usize,
    /// Elements from one matrix to the next; 0 where all are one.
    pub(crate) stride: usize,
}

/// `out = lhs · rhs`: `batch` products of `(m, k)` and `(k, n)`, none of them 0.
///
/// `lhs` and `rhs` are of one dtype; `out`, a contiguous tensor and not transposed, of that or of F32, which
/// nobody else has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product<'a> {
    pub(crate) batch: usize,
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    pub(crate) lhs: Matrices<'a>,
    pub(crate) rhs: Matrices<'a>,
    pub(crate) out: Matrices<'a>,
}
