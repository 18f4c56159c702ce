//! Layers without parameters that depend on the layout of images: pooling and flattening.

use candle_core::{Result, Tensor, ToUsize2};
use candle_nn::Module;

use crate::kernels::tensors::format::Format;
use crate::ops;

/// [`ops::max_pool2d`] as a layer.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{MaxPool2d, Module};
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::rand(0f32, 1., (2, 3, 8, 8), &Device::Cpu)?.to_dtype(DType::BF16)?;
/// assert_eq!(MaxPool2d::new(2).forward(&x)?.dims(), [2, 3, 4, 4]);
/// let stem = MaxPool2d::new(3).with_stride(2).with_padding(1).channels_last();
/// assert_eq!(stem.forward(&x.permute((0, 2, 3, 1))?)?.dims(), [2, 4, 4, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.MaxPool2d`, without `dilation`, `ceil_mode` and `return_indices`.
pub type MaxPool2d = Pool2d<true>;

/// [`ops::avg_pool2d`] as a layer. It counts padding as zeros.
///
/// # References
///
/// `torch.nn.AvgPool2d`, without `ceil_mode` and `divisor_override`.
pub type AvgPool2d = Pool2d<false>;

/// [`ops::global_avg_pool2d`] as a layer: the result is `(b, c)` in both layouts.
///
/// # References
///
/// `torch.nn.AdaptiveAvgPool2d(1)` and `torch.nn.Flatten()`.
#[derive(Clone, Copy, Debug)]
pub struct GlobalAvgPool2d(Format);

/// [`ops::flatten`] as a layer: all dimensions but the first become one. In both layouts the result has the order of
/// channels first, so that a linear layer behind it has the same weight.
///
/// # References
///
/// `torch.nn.Flatten()`.
#[derive(Clone, Copy, Debug)]
pub struct Flatten(Format);

/// A window that slides over images: a [`MaxPool2d`] or an [`AvgPool2d`].
#[derive(Clone, Copy, Debug)]
pub struct Pool2d<const MAX: bool> {
    kernel: (usize, usize),
    stride: (usize, usize),
    padding: (usize, usize),
    format: Format,
}

impl<const MAX: bool> Pool2d<MAX> {
    /// A window of this size: one number, or `(height, width)`. As in PyTorch, the stride is the size unless
    /// [`with_stride`](Self::with_stride) sets it, and nothing is padded.
    pub fn new(kernel: impl ToUsize2) -> Self {
        let (kernel, format) = (kernel.to_usize2(), Format::ChannelsFirst);
        Self { kernel, stride: kernel, padding: (0, 0), format }
    }

    /// Sets the stride.
    #[must_use]
    pub fn with_stride(self, stride: impl ToUsize2) -> Self {
        Self { stride: stride.to_usize2(), ..self }
    }

    /// Sets the padding of each side, at most half the size.
    #[must_use]
    pub fn with_padding(self, padding: impl ToUsize2) -> Self {
        Self { padding: padding.to_usize2(), ..self }
    }

    /// Takes and returns images `(b, h, w, c)`, as [`ops::channels_last`] does.
    #[must_use]
    pub fn channels_last(self) -> Self {
        Self { format: Format::ChannelsLast, ..self }
    }
}

impl<const MAX: bool> Module for Pool2d<MAX> {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let pool = match (self.format, MAX) {
            (Format::ChannelsFirst, true) => ops::max_pool2d,
            (Format::ChannelsFirst, false) => ops::avg_pool2d,
            (Format::ChannelsLast, true) => ops::channels_last::max_pool2d,
            (Format::ChannelsLast, false) => ops::channels_last::avg_pool2d,
        };
        pool(x, self.kernel, self.stride, self.padding)
    }
}

impl GlobalAvgPool2d {
    /// Takes images `(b, c, h, w)`.
    pub fn new() -> Self {
        Self(Format::ChannelsFirst)
    }

    /// Takes images `(b, h, w, c)`, as [`ops::channels_last`] returns them.
    #[must_use]
    pub fn channels_last(self) -> Self {
        Self(Format::ChannelsLast)
    }
}

impl Flatten {
    /// Takes images `(b, c, h, w)`.
    pub fn new() -> Self {
        Self(Format::ChannelsFirst)
    }

    /// Takes images `(b, h, w, c)`, as [`ops::channels_last`] returns them.
    #[must_use]
    pub fn channels_last(self) -> Self {
        Self(Format::ChannelsLast)
    }
}

impl Default for GlobalAvgPool2d {
    fn default() -> Self {
        Self::new()
    }
}

impl Default for Flatten {
    fn default() -> Self {
        Self::new()
    }
}

impl Module for GlobalAvgPool2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.0 {
            Format::ChannelsFirst => ops::global_avg_pool2d(x),
            Format::ChannelsLast => ops::channels_last::global_avg_pool2d(x),
        }
    }
}

impl Module for Flatten {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.0 {
            Format::ChannelsFirst => ops::flatten(x),
            Format::ChannelsLast => ops::channels_last::flatten(x),
        }
    }
}
