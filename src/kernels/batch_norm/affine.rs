//! What follows the normalisation: a weight and a bias, a residual and a rectifier. And the gradients.

use candle_core::Tensor;

/// What a normalised channel is multiplied by, and what is added then.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Affine<'a> {
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rectifier {
    Relu,
    /// `min(relu(y), 6)`
    Relu6,
}

/// What follows the normalisation, before the one rounding.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Finish<'a> {
    Plain,
    Rectified(Rectifier),
    /// `relu(y + residual)`; of `x`'s shape and dtype.
    AddRelu(&'a Tensor),
}

/// `(dx, dweight, dbias)`.
pub(super) type Gradients = (Tensor, Tensor, Tensor);
