//! A convolution, as cuDNN is asked for it.

/// Which of a convolution's three tensors is made of the other two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Pass {
    /// The output.
    Forward,
    /// The gradient of the input.
    Input,
    /// The gradient of the weight.
    Weight,
}

/// Images `(n, c, h, w)`, all contiguous; vertical first where there are two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Convolution {
    pub(crate) input: [usize; 4],
    pub(crate) weight: [usize; 4],
    pub(crate) output: [usize; 4],
    pub(crate) padding: [usize; 2],
    pub(crate) stride: usize,
    pub(crate) dilation: usize,
    pub(crate) groups: usize,
    /// Whether F32 values are rounded to TF32: of halves, that is exact.
    pub(crate) tf32: bool,
}
