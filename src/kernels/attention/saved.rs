//! What forward keeps, and what backward goes by.

use candle_core::Tensor;

/// What forward leaves for [`backward`](super::backward()).
///
/// The maximum and the sum are apart. Their logarithm, one number, would be rounded to the last place of the larger,
/// so that `exp(score - log_sum_exp)` lost as many digits as the scores are far from 0.
#[derive(Clone, Debug)]
pub(crate) struct Kept {
    /// The largest score of each query, `(b, h, t)`, in the dtype of the arithmetic; 0 where it sees no key.
    pub(crate) max: Tensor,
    /// One over the sum of `exp(scores - max)`, likewise.
    pub(crate) inverse_sum: Tensor,
    /// The output in `F32`, of kernels whose backward sums over it.
    pub(crate) unrounded: Option<Tensor>,
}

/// What [`backward`](super::backward()) goes by: the arguments of [`forward`](super::forward), its
/// second result, and the gradient of its first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Saved<'a> {
    pub(crate) q: &'a Tensor,
    pub(crate) k: &'a Tensor,
    pub(crate) v: &'a Tensor,
    pub(crate) mask: Option<&'a Tensor>,
    pub(crate) kept: &'a Kept,
    pub(crate) grad: &'a Tensor,
}
