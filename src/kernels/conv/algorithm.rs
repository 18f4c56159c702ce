//! Which algorithm computes a pass of a convolution.

use candle_core::{DType, Tensor};

use super::depthwise;
use super::packed;
use super::product;
use super::shape::Shape;
use crate::kernels::choice::algorithm::chosen;
use crate::kernels::cpu::vector::Vectors;
use crate::kernels::cuda::{Gpu, PassKind};
use crate::kernels::gemm::arithmetic;
use crate::kernels::gemm::micro::InstructionSet;
use crate::kernels::tensors::format::Format;

/// How a pass is computed.
pub(super) enum Algorithm<'a> {
    /// On a GPU: `cuda` chooses further, as it has to ask cuDNN.
    Cuda(&'a Gpu),
    /// By candle's operators, on devices that this crate has no kernels for.
    Portable,
    /// In NCHW, and moved there and back.
    ViaNchw,
    /// By im2col and the `gemm` crate, in F64.
    Im2colF64,
    /// The same in F32.
    Im2col,
    /// By shifted planes, from NCHW images whose every channel is a group, in F32.
    Depthwise,
    /// The same a row of vectors at a time, for the usual kernels.
    DepthwiseRows(Vectors),
    /// With a channel in each lane, for small planes and strides.
    DepthwiseLanes(Vectors),
    /// As a matrix product.
    Product,
    /// By packed GEMM, from NCHW images, or by what `packed` has for some shapes, where the results are finite. A trace
    /// names what did it.
    Packed(InstructionSet),
    /// The same from NHWC images.
    PackedNhwc(InstructionSet),
}

impl<'a> Algorithm<'a> {
    /// The algorithm for a pass over these operands, the image or its gradient first.
    pub(super) fn of(
        pass: PassKind,
        operands: [&'a Tensor; 2],
        bias: Option<&Tensor>,
        shape: &Shape,
    ) -> Self {
        let algorithm = Self::choose(pass, operands, bias, shape);
        chosen(pass.name(), algorithm.name(), shape);
        algorithm
    }

    /// Says that it computes the pass, as what was chosen cannot with these operands.
    pub(super) fn stands_in(&self, pass: PassKind, shape: &Shape) {
        chosen(pass.name(), self.name(), shape);
    }

    fn choose(
        pass: PassKind,
        operands: [&'a Tensor; 2],
        bias: Option<&Tensor>,
        shape: &Shape,
    ) -> Self {
        let nhwc = shape.geometry.format == Format::ChannelsLast;
        let empty = shape.input_dims().contains(&0) || shape.out_dims().contains(&0);
        if let Some(gpu) = Gpu::of(operands[0].device()).filter(|_| !empty) {
            return Self::Cuda(gpu);
        }
        if !operands[0].device().is_cpu() {
            return if nhwc { Self::ViaNchw } else { Self::Portable };
        }
        let double = arithmetic([Some(operands[0]), Some(operands[1]), bias]) == DType::F64;
        match (nhwc, double) {
            (true, true) => Self::ViaNchw,
            (false, true) => Self::Im2colF64,
            (false, false) if depthwise::suits(shape) && !empty => Self::depthwise(shape),
            (_, false) if product::suits(pass, operands, bias, shape) && !empty => Self::Product,
            (true, false) => Self::nhwc(pass, operands, shape).unwrap_or(Self::ViaNchw),
            (false, false) => Self::nchw(operands, shape).unwrap_or(Self::Im2col),
        }
    }

    fn depthwise(shape: &Shape) -> Self {
        if let Some(vectors) = depthwise::lanes::vectors(shape) {
            return Self::DepthwiseLanes(vectors);
        }
        depthwise::rows::vectors(shape).map_or(Self::Depthwise, Self::DepthwiseRows)
    }

    fn nhwc(pass: PassKind, operands: [&Tensor; 2], shape: &Shape) -> Option<Self> {
        packed::nhwc::isa(pass, operands, shape).map(Self::PackedNhwc)
    }

    fn nchw(operands: [&Tensor; 2], shape: &Shape) -> Option<Self> {
        packed::isa(operands, shape).map(Self::Packed)
    }

    /// What a trace shows.
    fn name(&self) -> &'static str {
        match self {
            Self::Cuda(_) => "cuda",
            Self::Portable => "candle",
            Self::ViaNchw => "via nchw",
            Self::Im2colF64 => "im2col, f64",
            Self::Im2col => "im2col",
            Self::Depthwise => "depthwise",
            Self::DepthwiseRows(vectors) | Self::DepthwiseLanes(vectors) => {
                vectors.names().depthwise
            }
            Self::Product => "product",
            Self::Packed(isa) | Self::PackedNhwc(isa) => isa.name(),
        }
    }
}
