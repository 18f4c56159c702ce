//! Which algorithm computes a pass of a convolution.

use candle_core::{DType, Tensor};

use super::depthwise;
#[cfg(target_arch = "x86_64")]
use super::packed;
use super::product;
use super::shape::Shape;
use crate::kernels::algorithm::chosen;
#[cfg(target_arch = "x86_64")]
use crate::kernels::cpu::vector::Vectors;
use crate::kernels::cuda::{Gpu, Pass};
use crate::kernels::format::Format;
use crate::kernels::gemm::arithmetic;
#[cfg(target_arch = "x86_64")]
use crate::kernels::gemm::micro::InstructionSet;

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
    #[cfg(target_arch = "x86_64")]
    DepthwiseRows(Vectors),
    /// With a channel in each lane, for small planes and strides.
    #[cfg(target_arch = "x86_64")]
    DepthwiseLanes(Vectors),
    /// As a matrix product.
    Product,
    /// By packed GEMM, from NCHW images.
    #[cfg(target_arch = "x86_64")]
    Packed(InstructionSet),
    /// By packed GEMM, from NHWC images.
    #[cfg(target_arch = "x86_64")]
    PackedNhwc(InstructionSet),
}

impl<'a> Algorithm<'a> {
    /// The algorithm for a pass over these operands, the image or its gradient first.
    pub(super) fn of(
        pass: Pass,
        operands: [&'a Tensor; 2],
        bias: Option<&Tensor>,
        shape: &Shape,
    ) -> Self {
        let algorithm = Self::choose(pass, operands, bias, shape);
        chosen(pass.name(), algorithm.name(), shape);
        algorithm
    }

    fn choose(pass: Pass, operands: [&'a Tensor; 2], bias: Option<&Tensor>, shape: &Shape) -> Self {
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

    #[cfg(target_arch = "x86_64")]
    fn depthwise(shape: &Shape) -> Self {
        if let Some(vectors) = depthwise::lanes::vectors(shape) {
            return Self::DepthwiseLanes(vectors);
        }
        depthwise::rows::vectors(shape).map_or(Self::Depthwise, Self::DepthwiseRows)
    }

    #[cfg(target_arch = "x86_64")]
    fn nhwc(pass: Pass, operands: [&Tensor; 2], shape: &Shape) -> Option<Self> {
        packed::nhwc::isa(pass, operands, shape).map(Self::PackedNhwc)
    }

    #[cfg(target_arch = "x86_64")]
    fn nchw(operands: [&Tensor; 2], shape: &Shape) -> Option<Self> {
        packed::isa(operands, shape).map(Self::Packed)
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn depthwise(_: &Shape) -> Self {
        Self::Depthwise
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn nhwc(_: Pass, _: [&Tensor; 2], _: &Shape) -> Option<Self> {
        None
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn nchw(_: [&Tensor; 2], _: &Shape) -> Option<Self> {
        None
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
            #[cfg(target_arch = "x86_64")]
            Self::DepthwiseRows(vectors) | Self::DepthwiseLanes(vectors) => match vectors {
                Vectors::Avx512 => "depthwise, avx512",
                Vectors::Avx2 => "depthwise, avx2",
            },
            Self::Product => "product",
            #[cfg(target_arch = "x86_64")]
            Self::Packed(isa) | Self::PackedNhwc(isa) => isa.name(),
        }
    }
}
