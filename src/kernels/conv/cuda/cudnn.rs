//! Convolutions by cuDNN, NCHW and NHWC.

use candle_core::{DType, Result, Tensor};

use super::nhwc;
use super::pass::CudaPass;
use crate::kernels::cast::cast_into;
use crate::kernels::choice::algorithm::{chosen, fell_back};
use crate::kernels::choice::tf32::allow_tf32;
use crate::kernels::conv::geometry::Geometry;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cuda::{Bias, Convolution, PassKind};
use crate::kernels::elementwise::plain;
use crate::kernels::in_dtype;
use crate::kernels::tensors::format::Format;

/// Asks cuDNN for the pass, in the dtype `written`, with `bias`, of that dtype, if there is one. cuDNN adds it before it
/// rounds. The pass's own bias is left to the caller. A weight's gradient has the layout of cuDNN's weights. `None` if
/// cuDNN does not do it.
pub(super) fn convolve(
    pass: &CudaPass<'_>,
    written: DType,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let CudaPass { gpu, kind, shape, operands: [a, b], .. } = *pass;
    let (dtype, format) = (a.dtype(), shape.geometry.format);
    if dtype == DType::F64 || !gpu.has_convolutions() {
        return Ok(None);
    }
    // The channels of a tap lie side by side where those of a pixel do.
    let b = match format {
        Format::ChannelsLast if kind != PassKind::Wgrad => {
            &nhwc::to_taps(gpu, b, shape, shape.taps())?
        }
        _ => b,
    };
    let Geometry { stride, padding: (above, left), dilation, groups, .. } = shape.geometry;
    let Shape { batch, c_in, c_out, height, width, out_height, out_width, .. } = *shape;
    let convolution = |tf32| Convolution {
        format,
        input: [batch, c_in, height, width],
        weight: shape.weight_dims(),
        output: [batch, c_out, out_height, out_width],
        padding: [above, left],
        stride,
        dilation,
        groups,
        tf32,
    };
    let dims = pass.result_dims();
    let order = match kind {
        PassKind::Forward => [0, 1, 2],
        PassKind::Dgrad => [2, 1, 0],
        PassKind::Wgrad => [0, 2, 1],
    };
    // A gradient that is laid out anew is no result yet.
    let result = match (kind, format) {
        (PassKind::Wgrad, Format::ChannelsLast) if nhwc::turns(shape, shape.taps()) => {
            gpu.scratch_from(nhwc::TURNED, dims.iter().product(), written)?
        }
        _ => gpu.empty(&dims, written)?,
    };
    // A number for each channel, at all pixels.
    let spread = bias.map(|bias| {
        let bias = match format {
            Format::ChannelsFirst => bias.reshape((1, (), 1, 1))?,
            Format::ChannelsLast => bias.reshape((1, 1, 1, ()))?,
        };
        bias.broadcast_as(result.shape())
    });
    let spread = spread.transpose()?;
    let spread = || spread.as_ref().map_or(Ok(()), |bias| cast_into(&result, bias));
    let values = bias.map(plain).transpose()?;
    let bias = values.as_ref().map(|values| Bias { values, spread: &spread });
    let done_by = |operands: [&Tensor; 2], tf32| {
        let all = [operands[0], operands[1], &result];
        gpu.convolution(kind, &convolution(tf32), order.map(|at| all[at]), bias.as_ref())
    };
    let mut done = done_by([a, b], allow_tf32())?;
    // From 16-bit operands cuDNN may have no algorithm that writes F32. But a 16-bit number is exact in TF32, and from
    // TF32 operands it has.
    if done.is_none() && dtype != written && gpu.compute_capability()? >= (8, 0) {
        let b = match kind {
            PassKind::Wgrad => b,
            _ => &b.flatten_all()?.narrow(0, 0, shape.c_out * shape.taps())?,
        };
        done = done_by([&in_dtype(a, written)?, &in_dtype(b, written)?], true)?;
    }
    if let Some(by) = done {
        chosen(kind.name(), by, shape);
    }
    Ok(done.is_some().then_some(result))
}

/// Says that `pass` runs by `algorithm`, and counts it where cuDNN was there to do it.
pub(super) fn without_cudnn(pass: &CudaPass<'_>, algorithm: &'static str) {
    let CudaPass { gpu, kind, shape, operands, .. } = *pass;
    if gpu.has_convolutions() && operands[0].dtype() != DType::F64 {
        fell_back(kind.name(), "cudnn", algorithm, shape);
    } else {
        chosen(kind.name(), algorithm, shape);
    }
}
