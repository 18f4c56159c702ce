//! A convolution, as cuDNN is asked for it.

use candle_core::{Result, Tensor};

use crate::kernels::tensors::format::Format;

/// Which of a convolution's three tensors is made of the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PassKind {
    /// The output.
    Forward,
    /// The gradient of the input.
    Dgrad,
    /// The gradient of the weight.
    Wgrad,
}

impl PassKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Forward => "conv forward",
            Self::Dgrad => "conv dgrad",
            Self::Wgrad => "conv wgrad",
        }
    }
}

/// Sizes `[n, c, h, w]`, vertical first where there are two. All are contiguous, of images and weights
/// in the order that `format` says: channels last, weights are `(c_out, kh, kw, c_in / groups)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Convolution {
    pub(crate) format: Format,
    pub(crate) input: [usize; 4],
    pub(crate) weight: [usize; 4],
    pub(crate) output: [usize; 4],
    pub(crate) padding: [usize; 2],
    pub(crate) stride: usize,
    pub(crate) dilation: usize,
    pub(crate) groups: usize,
    /// Whether F32 values are rounded to TF32: of 16-bit values, that is exact.
    pub(crate) tf32: bool,
}

/// What is added to each channel of a convolution's result, before the one rounding.
pub(crate) struct Bias<'a> {
    /// A number per channel, contiguous.
    pub(crate) values: &'a Tensor,
    /// Writes them to all pixels of the result, for a library that can only add to what is there.
    pub(crate) spread: &'a dyn Fn() -> Result<()>,
}
