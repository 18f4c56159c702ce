//! Convolution layers, and transposed ones.

use candle_core::{Result, Tensor};
use candle_nn::{
    Conv1dConfig, Conv2dConfig, ConvTranspose1dConfig, ConvTranspose2dConfig, Init, Module,
    VarBuilder,
};

use crate::kernels::tensors::format::Format;
use crate::ops;

/// A convolution with its parameters: a [`Conv1d`], [`Conv2d`], [`ConvTranspose1d`] or [`ConvTranspose2d`].
///
/// # Errors
///
/// Of `forward`: those of the operator.
#[derive(Clone, Debug)]
pub struct Convolution<C> {
    weight: Tensor,
    bias: Option<Tensor>,
    config: C,
    format: Format,
}

/// [`ops::conv1d`] with its weight `(c_out, c_in / groups, k)` and bias `(c_out)`.
///
/// # References
///
/// `torch.nn.Conv1d`, with zeros as padding.
pub type Conv1d = Convolution<Conv1dConfig>;

/// [`ops::conv2d`] with its weight `(c_out, c_in / groups, k, k)` and bias `(c_out)`.
///
/// # References
///
/// `torch.nn.Conv2d` with a square kernel, and with zeros as padding.
pub type Conv2d = Convolution<Conv2dConfig>;

/// [`ops::conv_transpose1d`] with its weight `(c_in, c_out / groups, k)` and bias `(c_out)`.
///
/// # References
///
/// `torch.nn.ConvTranspose1d`.
pub type ConvTranspose1d = Convolution<ConvTranspose1dConfig>;

/// [`ops::conv_transpose2d`] with its weight `(c_in, c_out, k, k)` and bias `(c_out)`.
///
/// # References
///
/// `torch.nn.ConvTranspose2d` with a square kernel and without groups.
pub type ConvTranspose2d = Convolution<ConvTranspose2dConfig>;

/// [`ops::conv_transpose2d_grouped`] with its weight `(c_in, c_out / groups, k, k)` and bias `(c_out)`.
///
/// # References
///
/// `torch.nn.ConvTranspose2d` with a square kernel.
pub type GroupedConvTranspose2d = Convolution<GroupedConvTranspose2dConfig>;

/// Settings of a [`GroupedConvTranspose2d`]: candle's configuration has no groups.
#[derive(Clone, Copy, Debug)]
pub struct GroupedConvTranspose2dConfig {
    /// Padding, stride, dilation.
    pub config: ConvTranspose2dConfig,
    /// How many groups of channels do not see each other. Default `1`.
    pub groups: usize,
}

impl Default for GroupedConvTranspose2dConfig {
    fn default() -> Self {
        Self { config: ConvTranspose2dConfig::default(), groups: 1 }
    }
}

impl<C> Convolution<C> {
    /// A layer of given parameters.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: C) -> Self {
        Self { weight, bias, config, format: Format::ChannelsFirst }
    }

    /// The layer for sequences `(b, l, c)` and images `(b, h, w, c)`, of [`ops::channels_last`]. The weight is the same.
    pub fn channels_last(self) -> Self {
        Self { format: Format::ChannelsLast, ..self }
    }

    /// Stride, padding, dilation, groups.
    pub fn config(&self) -> &C {
        &self.config
    }

    /// The weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `(c_out)`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The layer with another weight.
    pub(super) fn replace_weight(&self, weight: Tensor) -> Self
    where
        C: Clone,
    {
        let (bias, config, format) = (self.bias.clone(), self.config.clone(), self.format);
        Self { weight, bias, config, format }
    }

    /// With a bias of this size.
    fn with_bias(self, size: usize, init: Init, vb: VarBuilder) -> Result<Self> {
        let bias = Some(vb.get_with_hints(size, "bias", init)?);
        Ok(Self { bias, ..self })
    }
}

macro_rules! modules {
    ($($layer:ident: $op:ident),*) => { $(
        impl Module for $layer {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                let convolve = match self.format {
                    Format::ChannelsFirst => ops::$op,
                    Format::ChannelsLast => ops::channels_last::$op,
                };
                convolve(x, &self.weight, self.bias.as_ref(), self.config)
            }
        }
    )* };
}

modules! {
    Conv1d: conv1d, Conv2d: conv2d,
    ConvTranspose1d: conv_transpose1d, ConvTranspose2d: conv_transpose2d
}

impl Module for GroupedConvTranspose2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let convolve = match self.format {
            Format::ChannelsFirst => ops::conv_transpose2d_grouped,
            Format::ChannelsLast => ops::channels_last::conv_transpose2d_grouped,
        };
        let GroupedConvTranspose2dConfig { config, groups } = self.config;
        convolve(x, &self.weight, self.bias.as_ref(), config, groups)
    }
}

/// candle_nn's initial values, of so many weights to an output.
fn uniform(fan_in: usize) -> Init {
    let bound = 1.0 / (fan_in as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// A convolution of sequences with a bias; parameters `weight` and `bias`.
///
/// # Initial values
///
/// The weight is as candle_nn's: normal, of standard deviation `sqrt(2 / fan_in)` with `fan_in = in_channels / groups *
/// kernel_size`. The bias is uniform within `1 / sqrt(in_channels * kernel_size)` of 0, and candle_nn's within
/// `1 / sqrt(in_channels)`. PyTorch's are both uniform within `1 / sqrt(fan_in)`.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn conv1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let layer = conv1d_no_bias(in_channels, out_channels, kernel_size, config, vb.clone())?;
    layer.with_bias(out_channels, uniform(in_channels * kernel_size), vb)
}

/// A convolution of sequences with no bias; parameter `weight`, with the initial values of [`conv1d`].
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn conv1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let shape = (out_channels, in_channels / config.groups.max(1), kernel_size);
    let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
    Ok(Conv1d::new(vb.get_with_hints(shape, "weight", init)?, None, config))
}

/// A convolution with a square kernel and a bias; parameters `weight` and `bias`.
///
/// # Initial values
///
/// As those of [`conv1d`], with `kernel_size * kernel_size` for `kernel_size`.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
///
/// # Examples
///
/// Pixels that no whole stride reaches are left out. The layer of the other layout has the same parameters:
///
/// ```
/// use candle_amp::nn::{self, Conv2dConfig};
/// use candle_core::{DType, Device, Module, Tensor};
///
/// let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let config = Conv2dConfig { padding: 1, stride: 2, ..Default::default() };
/// let layer = nn::conv2d(3, 8, 3, config, vb)?;
/// let x = Tensor::ones((2, 3, 6, 6), DType::F32, &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), [2, 8, 3, 3]); // (6 + 2 - 3) / 2, rounded down, and 1
///
/// let pixels = Tensor::ones((2, 6, 6, 3), DType::F32, &Device::Cpu)?;
/// assert!(layer.forward(&pixels).is_err());
/// assert_eq!(layer.channels_last().forward(&pixels)?.dims(), [2, 3, 3, 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let layer = conv2d_no_bias(in_channels, out_channels, kernel_size, config, vb.clone())?;
    layer.with_bias(out_channels, uniform(in_channels * kernel_size * kernel_size), vb)
}

/// A convolution with a square kernel and no bias; parameter `weight`, with the initial values of [`conv2d`].
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let shape = (out_channels, in_channels / config.groups.max(1), kernel_size, kernel_size);
    let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
    Ok(Conv2d::new(vb.get_with_hints(shape, "weight", init)?, None, config))
}

/// A transposed convolution of sequences with a bias; parameters `weight` and `bias`.
///
/// # Initial values
///
/// candle_nn's: both are uniform within `1 / sqrt(out_channels * kernel_size)` of 0. In PyTorch `out_channels` is divided by the
/// groups.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn conv_transpose1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: ConvTranspose1dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose1d> {
    let layer =
        conv_transpose1d_no_bias(in_channels, out_channels, kernel_size, config, vb.clone())?;
    layer.with_bias(out_channels, uniform(out_channels * kernel_size), vb)
}

/// A transposed convolution of sequences with no bias; parameter `weight`, with the initial values of [`conv_transpose1d`].
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn conv_transpose1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: ConvTranspose1dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose1d> {
    let shape = (in_channels, out_channels / config.groups.max(1), kernel_size);
    let init = uniform(out_channels * kernel_size);
    Ok(ConvTranspose1d::new(vb.get_with_hints(shape, "weight", init)?, None, config))
}

/// A transposed convolution with a square kernel and a bias; parameters `weight` and `bias`.
///
/// # Initial values
///
/// As those of [`conv_transpose1d`], with `kernel_size * kernel_size` for `kernel_size`.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn conv_transpose2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: ConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose2d> {
    let layer =
        conv_transpose2d_no_bias(in_channels, out_channels, kernel_size, config, vb.clone())?;
    layer.with_bias(out_channels, uniform(out_channels * kernel_size * kernel_size), vb)
}

/// A transposed convolution with a square kernel and no bias; parameter `weight`, with the initial values of
/// [`conv_transpose2d`].
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn conv_transpose2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: ConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose2d> {
    let shape = (in_channels, out_channels, kernel_size, kernel_size);
    let init = uniform(out_channels * kernel_size * kernel_size);
    Ok(ConvTranspose2d::new(vb.get_with_hints(shape, "weight", init)?, None, config))
}

/// A transposed convolution of groups of channels with a square kernel and a bias; parameters `weight` and `bias`, with
/// PyTorch's initial values.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn grouped_conv_transpose2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: GroupedConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<GroupedConvTranspose2d> {
    let layer = grouped_conv_transpose2d_no_bias(
        in_channels,
        out_channels,
        kernel_size,
        config,
        vb.clone(),
    )?;
    layer.with_bias(out_channels, grouped_init(out_channels, kernel_size, config), vb)
}

/// A transposed convolution of groups of channels with a square kernel and no bias; parameter `weight`.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn grouped_conv_transpose2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: GroupedConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<GroupedConvTranspose2d> {
    let group_out = out_channels / config.groups.max(1);
    let shape = (in_channels, group_out, kernel_size, kernel_size);
    let init = grouped_init(out_channels, kernel_size, config);
    Ok(GroupedConvTranspose2d::new(vb.get_with_hints(shape, "weight", init)?, None, config))
}

fn grouped_init(
    out_channels: usize,
    kernel_size: usize,
    config: GroupedConvTranspose2dConfig,
) -> Init {
    uniform((out_channels / config.groups.max(1) * kernel_size * kernel_size).max(1))
}
