//! Operators on images and sequences whose channels come last: `(b, h, w, c)`, `(b, l, c)`, by shape.
//!
//! This layout suits tensor cores and CPU tiles best: a row of a kernel meets contiguous elements.
//! The model chooses the layout once, where images enter. All other operators (activations, additions,
//! losses) are the same for both. Weights keep their shape, `(c_out, c_in / groups, kh, kw)`, so that a
//! checkpoint loads in either. PyTorch's `channels_last` is a matter of strides, which an operator may
//! lose without a word; here a shape that does not fit is an error.
//!
//! These have kernels of their own on CUDA, and on a CPU: convolutions there where it has AVX-512, for all
//! but `F64` and groups of one channel. Elsewhere convolutions and pools turn the images to channels first
//! and back: right, and no faster than they.
//!
//! Precision and errors are those of the operators of the same names in [`ops`](super). Layers have a
//! method for it: [`nn::Conv2d::channels_last`](crate::nn::Conv2d::channels_last),
//! [`nn::BatchNorm::channels_last`](crate::nn::BatchNorm::channels_last).
//!
//! ```
//! use candle_amp::ops;
//! use candle_core::{DType, Device, Tensor};
//!
//! let images = Tensor::rand(0f32, 1., (2, 3, 8, 8), &Device::Cpu)?;
//! let weight = Tensor::rand(-1f32, 1., (4, 3, 3, 3), &Device::Cpu)?;
//! let x = images.permute((0, 2, 3, 1))?; // once, where they enter
//! let y = ops::channels_last::conv2d(&x, &weight, None, Default::default())?;
//! let (y, statistics) = ops::channels_last::batch_norm_relu(&y, None, None, None, 1e-5)?;
//! assert_eq!((y.dims(), statistics.mean.dims()), (&[2, 6, 6, 4][..], &[4][..]));
//! let y = ops::channels_last::global_avg_pool2d(&y)?;
//! assert_eq!(y.dims(), [2, 4]);
//!
//! // What has its channels elsewhere does not pass for an image.
//! assert!(ops::channels_last::conv2d(&images, &weight, None, Default::default()).is_err());
//! # Ok::<(), candle_core::Error>(())
//! ```

use candle_core::{D, Result, Tensor, ToUsize2};
use candle_nn::{Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig};

use super::BatchStatistics;
use super::{adaptive_pool, conv, conv_transpose, elementwise, norm, pool};
use crate::kernels::batch_norm::{Affine, Running};
use crate::kernels::tensors::format::Format::ChannelsLast;

/// [`ops::conv2d`](super::conv2d): `x (b, h, w, c_in)`, `weight (c_out, c_in / groups, kh, kw)`,
/// `bias (c_out)` → `(b, h_out, w_out, c_out)`.
///
/// # Precision
///
/// As [`ops::conv2d`](super::conv2d).
///
/// # References
///
/// `torch.nn.functional.conv2d` in `torch.channels_last`.
pub fn conv2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: Conv2dConfig,
) -> Result<Tensor> {
    conv::conv2d_of(ChannelsLast, x, weight, bias, config)
}

/// [`ops::conv1d`](super::conv1d): `x (b, l, c_in)`, `weight (c_out, c_in / groups, k)`, `bias (c_out)`
/// → `(b, l_out, c_out)`: sequences as a transformer has them.
///
/// # Precision
///
/// As [`ops::conv1d`](super::conv1d).
///
/// # References
///
/// `torch.nn.functional.conv1d`, which has channels first alone.
pub fn conv1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: Conv1dConfig,
) -> Result<Tensor> {
    conv::conv1d_of(ChannelsLast, x, weight, bias, config)
}

/// [`ops::conv_transpose2d`](super::conv_transpose2d): `x (b, h, w, c_in)`, `weight (c_in, c_out, kh, kw)`,
/// `bias (c_out)` → `(b, h_out, w_out, c_out)`.
///
/// # Precision
///
/// As [`ops::conv_transpose2d`](super::conv_transpose2d).
///
/// # Examples
///
/// Each pixel becomes two by two:
///
/// ```
/// use candle_amp::ops::channels_last;
/// use candle_core::{Device, Tensor};
/// use candle_nn::ConvTranspose2dConfig;
///
/// let x = Tensor::rand(0f32, 1., (2, 5, 5, 8), &Device::Cpu)?;
/// let weight = Tensor::rand(-1f32, 1., (8, 4, 2, 2), &Device::Cpu)?;
/// let config = ConvTranspose2dConfig { stride: 2, ..Default::default() };
/// let y = channels_last::conv_transpose2d(&x, &weight, None, config)?;
/// assert_eq!(y.dims(), [2, 10, 10, 4]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.conv_transpose2d` in `torch.channels_last`.
pub fn conv_transpose2d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: ConvTranspose2dConfig,
) -> Result<Tensor> {
    conv_transpose::conv_transpose2d_of(ChannelsLast, x, weight, bias, config, 1)
}

/// [`ops::conv_transpose2d_grouped`](super::conv_transpose2d_grouped): shapes as [`conv_transpose2d`], with
/// `weight (c_in, c_out / groups, kh, kw)`.
///
/// # Precision
///
/// As [`ops::conv_transpose2d`](super::conv_transpose2d).
///
/// # References
///
/// `torch.nn.functional.conv_transpose2d` with `groups`, in `torch.channels_last`.
pub fn conv_transpose2d_grouped(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: ConvTranspose2dConfig,
    groups: usize,
) -> Result<Tensor> {
    conv_transpose::conv_transpose2d_of(ChannelsLast, x, weight, bias, config, groups)
}

/// [`ops::conv_transpose1d`](super::conv_transpose1d): `x (b, l, c_in)`,
/// `weight (c_in, c_out / groups, k)`, `bias (c_out)` → `(b, l_out, c_out)`.
///
/// # Precision
///
/// As [`ops::conv_transpose1d`](super::conv_transpose1d).
///
/// # References
///
/// `torch.nn.functional.conv_transpose1d`, which has channels first alone.
pub fn conv_transpose1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    config: ConvTranspose1dConfig,
) -> Result<Tensor> {
    conv_transpose::conv_transpose1d_of(ChannelsLast, x, weight, bias, config)
}

/// [`ops::batch_norm`](super::batch_norm): `x (n, …, c)`, `weight (c)`, `bias (c)` → that of `x`.
///
/// # Precision
///
/// As [`ops::batch_norm`](super::batch_norm).
pub fn batch_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, BatchStatistics)> {
    let (y, of) = norm::batch_norm_of(ChannelsLast, x, Affine { weight, bias }, eps)?;
    Ok((y, of.vectors()?))
}

/// [`ops::batch_norm_relu`](super::batch_norm_relu): `x (n, …, c)`, `residual` as `x`.
///
/// # Precision
///
/// As [`ops::batch_norm_relu`](super::batch_norm_relu).
pub fn batch_norm_relu(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, BatchStatistics)> {
    let affine = Affine { weight, bias };
    let (y, of) = norm::batch_norm_relu_of(ChannelsLast, x, affine, residual, eps)?;
    Ok((y, of.vectors()?))
}

/// [`ops::batch_norm_relu6`](super::batch_norm_relu6): `x (n, …, c)`.
///
/// # Precision
///
/// As [`ops::batch_norm_relu6`](super::batch_norm_relu6).
pub fn batch_norm_relu6(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, BatchStatistics)> {
    let (y, of) = norm::batch_norm_relu6_of(ChannelsLast, x, Affine { weight, bias }, eps)?;
    Ok((y, of.vectors()?))
}

/// [`ops::batch_norm_eval`](super::batch_norm_eval): `x (n, …, c)`.
///
/// # Precision
///
/// As [`ops::batch_norm_eval`](super::batch_norm_eval).
pub fn batch_norm_eval(
    x: &Tensor,
    mean: &Tensor,
    var: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let running = Running { mean, var, eps };
    norm::batch_norm_eval_of(ChannelsLast, x, running, Affine { weight, bias })
}

/// [`ops::max_pool2d`](super::max_pool2d): `x (b, h, w, c)` → `(b, h_out, w_out, c)`.
///
/// # Precision
///
/// As [`ops::max_pool2d`](super::max_pool2d).
pub fn max_pool2d(
    x: &Tensor,
    kernel: impl ToUsize2,
    stride: impl ToUsize2,
    padding: impl ToUsize2,
) -> Result<Tensor> {
    pool::max_pool2d_of(ChannelsLast, x, kernel, stride, padding)
}

/// [`ops::avg_pool2d`](super::avg_pool2d): `x (b, h, w, c)` → `(b, h_out, w_out, c)`.
///
/// # Precision
///
/// As [`ops::avg_pool2d`](super::avg_pool2d).
pub fn avg_pool2d(
    x: &Tensor,
    kernel: impl ToUsize2,
    stride: impl ToUsize2,
    padding: impl ToUsize2,
) -> Result<Tensor> {
    pool::avg_pool2d_of(ChannelsLast, x, kernel, stride, padding)
}

/// [`ops::global_avg_pool2d`](super::global_avg_pool2d): `x (b, h, w, c)` → `(b, c)`.
///
/// # Precision
///
/// As [`ops::global_avg_pool2d`](super::global_avg_pool2d).
pub fn global_avg_pool2d(x: &Tensor) -> Result<Tensor> {
    pool::global_avg_pool2d_of(ChannelsLast, x)
}

/// [`ops::flatten`](super::flatten): `x (b, …, c)` → `(b, c · …)`. The result has the order of channels first, so that a
/// linear layer behind it has the same weight in both layouts.
///
/// # Precision
///
/// The dtype of `x` in and out.
///
/// # Examples
///
/// ```
/// use candle_amp::ops::{self, channels_last};
/// use candle_core::{Device, Tensor};
///
/// let first = Tensor::rand(0f32, 1., (2, 3, 4, 5), &Device::Cpu)?;
/// let last = first.permute((0, 2, 3, 1))?;
/// let (a, b) = (ops::flatten(&first)?, channels_last::flatten(&last)?);
/// assert_eq!(a.to_vec2::<f32>()?, b.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.flatten(x, 1)` of a tensor in `torch.channels_last`.
pub fn flatten(x: &Tensor) -> Result<Tensor> {
    let rank = x.rank();
    if rank < 3 {
        return elementwise::flatten(x);
    }
    let order: Vec<usize> = [0, rank - 1].into_iter().chain(1..rank - 1).collect();
    elementwise::flatten(&x.permute(order)?)
}

/// [`ops::cat`](super::cat) of `(b, …, c)` tensors along their channels.
///
/// # Precision
///
/// As [`ops::cat`](super::cat).
///
/// # Errors
///
/// As [`ops::cat`](super::cat).
///
/// # References
///
/// `torch.cat(parts, 1)` of tensors in `torch.channels_last`.
pub fn cat(parts: &[&Tensor]) -> Result<Tensor> {
    super::cat(parts, D::Minus1)
}

/// [`ops::adaptive_avg_pool2d`](super::adaptive_avg_pool2d): `x (b, h, w, c)` → `(b, height, width, c)`.
///
/// # Precision
///
/// As [`ops::adaptive_avg_pool2d`](super::adaptive_avg_pool2d).
pub fn adaptive_avg_pool2d(x: &Tensor, output: impl ToUsize2) -> Result<Tensor> {
    adaptive_pool::adaptive_avg_pool2d_of(ChannelsLast, x, output)
}

/// [`ops::adaptive_max_pool2d`](super::adaptive_max_pool2d): `x (b, h, w, c)` → `(b, height, width, c)`.
///
/// # Precision
///
/// As [`ops::adaptive_max_pool2d`](super::adaptive_max_pool2d).
pub fn adaptive_max_pool2d(x: &Tensor, output: impl ToUsize2) -> Result<Tensor> {
    adaptive_pool::adaptive_max_pool2d_of(ChannelsLast, x, output)
}
