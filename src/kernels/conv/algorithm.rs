//! Which algorithm computes a pass of a convolution.

use candle_core::{DType, Result, Tensor};

use super::depthwise;
use super::packed::{self, Order, few_channels, lanes, winograd};
use super::product;
use super::shape::Shape;
use crate::kernels::choice::algorithm::chosen;
use crate::kernels::cpu::vector::Vectors;
use crate::kernels::cuda::{Gpu, PassKind};
use crate::kernels::gemm::arithmetic;
use crate::kernels::gemm::micro::InstructionSet;
use crate::kernels::tensors::format::Format;

/// How a pass is computed.
#[derive(Clone, Copy)]
pub(super) enum Algorithm<'a> {
    /// On a GPU: `cuda` chooses further, as it has to ask cuDNN.
    Cuda(&'a Gpu),
    /// By candle's operators, on devices that this crate has no kernels for.
    Portable,
    /// In NCHW, and moved there and back.
    ViaNchw,
    /// By im2col and products, in F64.
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
    /// By packed GEMM, from NCHW images.
    Packed(InstructionSet),
    /// The same from NHWC images.
    PackedNhwc(InstructionSet),
    /// By Winograd's transform, from images of either format, in F32.
    Winograd(InstructionSet),
    /// The same of 16-bit operands, by larger tiles.
    LargeTiles(InstructionSet),
    /// By strips of images that have few channels.
    FewChannels(InstructionSet),
    /// With a small image in each lane, in BF16.
    ImagesInLanes(InstructionSet),
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

    /// What this algorithm makes; where that is `None`, as it meets operands that it cannot compute with, what another
    /// one makes. A trace names the one that did it.
    pub(super) fn run(
        mut self,
        pass: PassKind,
        shape: &Shape,
        by: impl Fn(Self) -> Result<Option<Tensor>>,
    ) -> Result<Tensor> {
        loop {
            if let Some(result) = by(self)? {
                return Ok(result);
            }
            self = self.stand_in(pass, shape);
            chosen(pass.name(), self.name(), shape);
        }
    }

    /// What computes a pass that this algorithm gave up: in the end, algorithms that give none up.
    fn stand_in(self, pass: PassKind, shape: &Shape) -> Self {
        let nhwc = shape.geometry.format == Format::ChannelsLast;
        match self {
            Self::PackedNhwc(InstructionSet::AmxBf16x3) => {
                Self::packed(pass, shape, InstructionSet::AmxBf16x3.without_terms(), false)
            }
            Self::Winograd(isa) | Self::LargeTiles(isa) | Self::FewChannels(isa) if nhwc => {
                Self::PackedNhwc(isa)
            }
            Self::Winograd(isa)
            | Self::LargeTiles(isa)
            | Self::FewChannels(isa)
            | Self::ImagesInLanes(isa) => Self::Packed(isa),
            Self::DepthwiseRows(_) | Self::DepthwiseLanes(_) if pass != PassKind::Dgrad => {
                Self::Depthwise
            }
            _ if nhwc => Self::ViaNchw,
            _ => Self::Im2col,
        }
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
            // With channels first, row panels have no more of the padding than taps meet, and im2col asks for memory.
            (true, false) if shape.mostly_padding() => Self::ViaNchw,
            (false, false) if depthwise::suits(shape) && !empty && !shape.mostly_padding() => {
                Self::depthwise(shape)
            }
            (_, false) if product::suits(pass, operands, bias, shape) && !empty => Self::Product,
            (nhwc, false) => match packed::isa(pass, operands, shape) {
                Some(isa) => Self::packed(pass, shape, isa, are_half(operands)),
                None if nhwc => Self::ViaNchw,
                None => Self::Im2col,
            },
        }
    }

    /// Packed GEMM by this instruction set, or what is faster for some shapes, and for operands that [`are_half`].
    pub(super) fn packed(pass: PassKind, shape: &Shape, isa: InstructionSet, half: bool) -> Self {
        let in_lanes = || match pass {
            PassKind::Forward => lanes::suits(shape, Order::Forward, isa),
            PassKind::Dgrad => lanes::suits(shape, Order::Backward, isa),
            PassKind::Wgrad => lanes::wgrad_suits(shape, isa),
        };
        match shape.geometry.format {
            // Before Winograd's, which suits first layers too, and is slower there.
            _ if pass != PassKind::Dgrad && few_channels::suits(shape, isa) => {
                Self::FewChannels(isa)
            }
            _ if half && !isa.is_amx() && winograd::suits_large(pass, shape) => {
                Self::LargeTiles(isa)
            }
            _ if isa.is_f32() && winograd::suits_pass(pass, shape) => Self::Winograd(isa),
            Format::ChannelsLast => Self::PackedNhwc(isa),
            Format::ChannelsFirst if in_lanes() => Self::ImagesInLanes(isa),
            Format::ChannelsFirst => Self::Packed(isa),
        }
    }

    fn depthwise(shape: &Shape) -> Self {
        if let Some(vectors) = depthwise::lanes::vectors(shape) {
            return Self::DepthwiseLanes(vectors);
        }
        depthwise::rows::vectors(shape).map_or(Self::Depthwise, Self::DepthwiseRows)
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
            Self::Winograd(isa) => isa.vectors().names().winograd,
            Self::LargeTiles(isa) => isa.vectors().names().large_tiles,
            Self::FewChannels(isa) => isa.vectors().names().few_channels,
            Self::ImagesInLanes(_) => "images in lanes, avx512-bf16",
        }
    }
}

/// Whether operands are of one dtype of 16 bits.
pub(super) fn are_half([a, b]: [&Tensor; 2]) -> bool {
    a.dtype() == b.dtype() && a.dtype().size_in_bytes() == 2
}
