//! Losses of rows of classes: which rows count and how much, what becomes of their losses, and what
//! backward needs.

use candle_core::Tensor;

/// What becomes of the losses of rows or elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Their mean. With class weights or an `ignore_index`, their sum over the sum of the weights of the targets that
    /// count.
    #[default]
    Mean,
    /// Their sum.
    Sum,
    /// Each by itself, in `F32` (`F64` for `F64`), to be masked or multiplied.
    None,
}

/// How the rows of a class loss count, and what becomes of their losses.
#[derive(Clone, Debug)]
pub(crate) struct ClassLoss {
    pub(crate) classes: usize,
    /// How much of a target is spread over all classes.
    pub(crate) label_smoothing: f64,
    /// `(classes)`, contiguous and in the dtype of the arithmetic.
    pub(crate) weights: Option<Tensor>,
    /// The target of the rows that do not count. Their losses and gradients are 0, whatever their logits.
    pub(crate) ignored: Option<u32>,
    pub(crate) reduction: Reduction,
}

impl ClassLoss {
    /// Whether the mean is over the sum of the weights of the targets, and not over the number of rows.
    pub(super) fn sums_weights(&self) -> bool {
        let alike = self.weights.is_none() && self.ignored.is_none();
        self.reduction == Reduction::Mean && !alike
    }

    /// What losses are divided by where that is no tensor.
    pub(super) fn count(&self, rows: usize) -> f64 {
        count(self.reduction, rows)
    }

    /// How far the gradient of one row's loss is from that of the next.
    pub(super) fn gradient_stride(&self) -> usize {
        (self.reduction == Reduction::None).into()
    }
}

/// What forward of a class loss gives, all in the dtype of the arithmetic.
pub(crate) struct Reduced {
    /// `()`, or `(n)` of [`Reduction::None`].
    pub(crate) loss: Tensor,
    /// What a mean was divided by, `()`, where that is not the number of rows.
    pub(crate) total: Option<Tensor>,
}

/// What backward of [`cross_entropy_forward`](super::cross_entropy_forward) reads.
#[derive(Clone, Copy)]
pub(crate) struct LogitsGradient<'a> {
    pub(crate) loss: &'a ClassLoss,
    pub(crate) logits: &'a Tensor,
    pub(crate) targets: &'a Tensor,
    pub(crate) log_sum_exp: &'a Tensor,
    pub(crate) total: Option<&'a Tensor>,
    /// That of the loss: one number, or `n`.
    pub(crate) gradient: &'a Tensor,
}

/// What `terms` losses are divided by.
pub(super) fn count(reduction: Reduction, terms: usize) -> f64 {
    if reduction == Reduction::Mean { terms as f64 } else { 1.0 }
}
