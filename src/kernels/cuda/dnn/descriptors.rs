//! cuDNN's descriptors of a convolution and its tensors.

use std::ffi::c_int;

use candle_core::{DType, Error, Result};
use cudarc::cudnn::result::{self as cudnn, CudnnError};
use cudarc::cudnn::sys;

use super::status::supported;
use crate::error::bail;
use crate::kernels::cuda::Convolution;
use crate::kernels::tensors::format::Format;

/// Declares an owner of a descriptor, which destroys it.
macro_rules! owned {
    ($name:ident, $raw:ty, $create:path, $destroy:path) => {
        #[derive(Debug)]
        struct $name($raw);

        impl $name {
            fn new() -> Result<Self> {
                Ok(Self($create().map_err(Error::wrap)?))
            }
        }

        #[allow(unsafe_code)]
        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: made by `new`, and destroyed here alone.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    };
}
owned!(
    Images,
    sys::cudnnTensorDescriptor_t,
    cudnn::create_tensor_descriptor,
    cudnn::destroy_tensor_descriptor
);
owned!(
    Weight,
    sys::cudnnFilterDescriptor_t,
    cudnn::create_filter_descriptor,
    cudnn::destroy_filter_descriptor
);
owned!(
    Description,
    sys::cudnnConvolutionDescriptor_t,
    cudnn::create_convolution_descriptor,
    cudnn::destroy_convolution_descriptor
);

/// Of input, weight, output, and of how they go together.
#[derive(Debug)]
pub(super) struct Descriptors {
    input: Images,
    weight: Weight,
    output: Images,
    convolution: Description,
}

/// Input, weight, output, convolution.
pub(super) type Raw = (
    sys::cudnnTensorDescriptor_t,
    sys::cudnnFilterDescriptor_t,
    sys::cudnnTensorDescriptor_t,
    sys::cudnnConvolutionDescriptor_t,
);

#[allow(unsafe_code)]
impl Descriptors {
    /// `None` where a size is more than the library counts to, or the library does not support it.
    pub(super) fn of(convolution: &Convolution, dtype: DType) -> Result<Option<Self>> {
        let Convolution { input, weight, output, padding, stride, dilation, groups, .. } =
            *convolution;
        let sizes = [input, weight, output].map(ints);
        let numbers = ints([stride, dilation, groups, padding[0].max(padding[1])]);
        let ([Some(input), Some(weight), Some(output)], Some([stride, dilation, groups, _])) =
            (sizes, numbers)
        else {
            return Ok(None);
        };
        let this = Self {
            input: Images::new()?,
            weight: Weight::new()?,
            output: Images::new()?,
            convolution: Description::new()?,
        };
        let [above, left] = padding.map(|padding| padding as c_int);
        let kind = data_type(dtype)?;
        let format = match convolution.format {
            Format::ChannelsFirst => sys::cudnnTensorFormat_t::CUDNN_TENSOR_NCHW,
            Format::ChannelsLast => sys::cudnnTensorFormat_t::CUDNN_TENSOR_NHWC,
        };
        // SAFETY: the descriptors were made above.
        let set = || unsafe {
            cudnn::set_tensor4d_descriptor(this.input.0, format, kind, input)?;
            cudnn::set_tensor4d_descriptor(this.output.0, format, kind, output)?;
            cudnn::set_filter4d_descriptor(this.weight.0, kind, format, weight)?;
            cudnn::set_convolution2d_descriptor(
                this.convolution.0,
                above,
                left,
                stride,
                stride,
                dilation,
                dilation,
                sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION,
                // Of the sums, whatever the tensors are.
                sys::cudnnDataType_t::CUDNN_DATA_FLOAT,
            )?;
            cudnn::set_convolution_group_count(this.convolution.0, groups)
        };
        let set = set().and_then(|()| this.set_math(math(dtype, convolution.tf32)));
        Ok(supported(set)?.map(|()| this))
    }

    pub(super) fn set_math(
        &self,
        math: sys::cudnnMathType_t,
    ) -> std::result::Result<(), CudnnError> {
        // SAFETY: the descriptor is alive.
        unsafe { cudnn::set_convolution_math_type(self.convolution.0, math) }
    }

    pub(super) fn raw(&self) -> Raw {
        (self.input.0, self.weight.0, self.output.0, self.convolution.0)
    }
}

/// 16-bit dtypes on tensor cores, F32 as F32 unless TF32 may stand in.
pub(super) fn math(dtype: DType, tf32: bool) -> sys::cudnnMathType_t {
    match dtype {
        DType::F32 if tf32 => sys::cudnnMathType_t::CUDNN_DEFAULT_MATH,
        DType::F32 => sys::cudnnMathType_t::CUDNN_FMA_MATH,
        _ => sys::cudnnMathType_t::CUDNN_TENSOR_OP_MATH,
    }
}

/// If all, and their product, are what the library counts to.
fn ints(sizes: [usize; 4]) -> Option<[c_int; 4]> {
    let product = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size))?;
    c_int::try_from(product).ok()?;
    Some(sizes.map(|size| size as c_int))
}

pub(super) fn data_type(dtype: DType) -> Result<sys::cudnnDataType_t> {
    Ok(match dtype {
        DType::F16 => sys::cudnnDataType_t::CUDNN_DATA_HALF,
        DType::BF16 => sys::cudnnDataType_t::CUDNN_DATA_BFLOAT16,
        DType::F32 => sys::cudnnDataType_t::CUDNN_DATA_FLOAT,
        other => bail!("expected images of F16, BF16 or F32, got {other:?}"),
    })
}
