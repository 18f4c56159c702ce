//! Convolutions on CUDA.
//!
//! The first of these that applies computes a pass:
//!
//! 1. A kernel of this crate, if each group has one input channel (depthwise).
//! 2. cuDNN, if it can be loaded and has a deterministic algorithm without transforms: an engine of its graph API, or
//!    what its older functions have.
//! 3. cuBLAS on NCHW images as they are, a product for each image, if these are their own columns (1 × 1 kernels of
//!    one group) and large enough, and there is no bias; not for wgrad.
//! 4. im2col and cuBLAS: a kernel writes the columns of a tile of output pixels, so many that they fit
//!    [`WORKSPACE`](pass::WORKSPACE), and cuBLAS multiplies them by the weights. [`nchw`] and [`nhwc`] say how.
//!
//! Forward, dgrad and wgrad are mirror images, so a [`CudaPass`] is any of them. Each multiplies two of the matrices
//! weights, columns and outputs, and the third is the result. For dgrad, col2im follows, which adds each pixel's
//! columns.
//!
//! Products read 16-bit operands if both have the same 16-bit dtype, else F32 (F64), and sum in F32 (F64). The sums
//! are rounded once: to 16 bits if nothing is added to them later, else to F32.

mod cudnn;
mod nchw;
mod nhwc;
mod pass;

use candle_core::{DType, Result, Tensor};

use super::shape::Shape;
use crate::kernels::choice::algorithm::chosen;
use crate::kernels::cuda::{Gpu, Grid, PassKind, suffix};
use crate::kernels::elementwise::plain;
use crate::kernels::gemm::arithmetic;
use crate::kernels::in_dtype;
use crate::kernels::tensors::format::Format;
use cudnn::{convolve, without_cudnn};
use pass::{CudaPass, sizes};

/// See [`super::forward`], [`super::dgrad`] and [`super::wgrad`], which has no bias. Nothing is empty.
pub(super) fn run(
    gpu: &Gpu,
    kind: PassKind,
    tensors: [&Tensor; 2],
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    let wide = arithmetic([Some(tensors[0]), Some(tensors[1]), bias]);
    let [a, b] = &operands(gpu, tensors, wide)?;
    let pass = CudaPass { gpu, kind, shape, operands: [a, b], bias: None, wide, out };
    let Some(bias) = bias else { return pass.run() };
    // cuDNN adds a bias before it rounds, if all have one dtype. So 16-bit results need no F32 copy.
    if bias.dtype() == out
        && a.dtype() == out
        && !shape.depthwise()
        && let Some(y) = convolve(&pass, out, Some(bias))?
    {
        return Ok(y);
    }
    CudaPass { bias: Some(&plain(&in_dtype(bias, wide)?)?), ..pass }.run()
}

impl CudaPass<'_> {
    /// By the first algorithm that applies.
    fn run(&self) -> Result<Tensor> {
        let Self { gpu, kind, shape, bias, out, .. } = *self;
        let format = shape.geometry.format;
        if shape.depthwise() {
            chosen(kind.name(), "depthwise kernel", shape);
            return match (kind, format) {
                (PassKind::Wgrad, Format::ChannelsFirst) => nchw::depthwise_wgrad(self),
                (PassKind::Wgrad, Format::ChannelsLast) => nhwc::depthwise_wgrad(self),
                _ => self.depthwise(),
            };
        }
        if let Some(y) = convolve(self, self.cudnn_dtype(), None)? {
            return match (format, bias) {
                (Format::ChannelsFirst, Some(bias)) => nchw::biased(&y, bias, out),
                (Format::ChannelsLast, Some(bias)) => nhwc::biased(gpu, &y, bias, out),
                (Format::ChannelsLast, None) if kind == PassKind::Wgrad => {
                    nhwc::from_taps(self, &y, shape.taps())
                }
                (_, None) => in_dtype(&y, out),
            };
        }
        if nchw::goes_by_images(self) {
            without_cudnn(self, "cublas");
            return nchw::products_of_images(self);
        }
        without_cudnn(self, "im2col, cublas");
        match (format, kind) {
            (Format::ChannelsFirst, PassKind::Forward) => nchw::forward(self),
            (Format::ChannelsFirst, PassKind::Dgrad) => nchw::dgrad(self),
            (Format::ChannelsFirst, PassKind::Wgrad) => nchw::wgrad(self),
            (Format::ChannelsLast, PassKind::Forward) => nhwc::forward(self),
            (Format::ChannelsLast, PassKind::Dgrad) => nhwc::dgrad(self),
            (Format::ChannelsLast, PassKind::Wgrad) => nhwc::wgrad(self),
        }
    }

    /// Forward or dgrad, where each group has one input channel.
    fn depthwise(&self) -> Result<Tensor> {
        let Self { gpu, shape, operands: [images, weight], .. } = *self;
        let y = gpu.empty(&self.result_dims(), self.near_dtype())?;
        let (source, weight) = match shape.geometry.format {
            Format::ChannelsFirst => (&nchw::SOURCE, weight),
            Format::ChannelsLast => (&nhwc::SOURCE, &nhwc::depthwise_taps(self)?),
        };
        let dgrad = self.kind == PassKind::Dgrad;
        let name = if dgrad { "depthwise_dgrad" } else { "depthwise" };
        let name = [name, suffix(images.dtype())?, suffix(y.dtype())?];
        // A thread writes elements of `y`, and reads those of their channels in their images.
        let kernel = gpu.launch(source, name)?.read(images)?.read(weight)?;
        let kernel = kernel.read_or_null(self.bias)?.write(&y)?.size(shape.batch);
        kernel.sizes(&sizes(shape)).run(Grid::over(y.elem_count(), 1))?;
        in_dtype(&y, self.out)
    }
}

/// Both operands, contiguous and in the dtype that products read.
fn operands(gpu: &Gpu, tensors: [&Tensor; 2], wide: DType) -> Result<[Tensor; 2]> {
    let [a, b] = tensors;
    // Products of BF16 came with compute capability 8.0.
    let known = a.dtype() != DType::BF16 || gpu.compute_capability()? >= (8, 0);
    let dtype =
        if wide == DType::F32 && a.dtype() == b.dtype() && known { a.dtype() } else { wide };
    let operand = |x: &Tensor| plain(&in_dtype(x, dtype)?);
    Ok([operand(a)?, operand(b)?])
}
