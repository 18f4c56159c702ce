//! The sizes of a pass of a convolution, forward or dgrad.

use crate::kernels::conv::shape::Shape;
use crate::kernels::gemm::micro::InstructionSet;

/// Channels of a group, sizes of images, and their number.
pub(super) struct ConvPass {
    pub(super) isa: InstructionSet,
    pub(super) groups: usize,
    pub(super) ins: usize,
    pub(super) outs: usize,
    pub(super) size: (usize, usize),
    pub(super) out_size: (usize, usize),
    pub(super) batch: usize,
}

impl ConvPass {
    pub(super) fn forward(shape: &Shape, isa: InstructionSet) -> Self {
        Self {
            isa,
            groups: shape.geometry.groups,
            ins: shape.group_in(),
            outs: shape.group_out(),
            size: (shape.height, shape.width),
            out_size: (shape.out_height, shape.out_width),
            batch: shape.batch,
        }
    }

    /// dgrad: from the output's gradient to the input's.
    pub(super) fn backward(shape: &Shape, isa: InstructionSet) -> Self {
        let Self { ins, outs, size, out_size, .. } = Self::forward(shape, isa);
        Self { ins: outs, outs: ins, size: out_size, out_size: size, ..Self::forward(shape, isa) }
    }
}
