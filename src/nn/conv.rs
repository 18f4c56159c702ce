//! Convolution layers.

use candle_core::{Result, Tensor};
use candle_nn::{Conv1dConfig, Conv2dConfig, Init, Module, VarBuilder};

use crate::kernels::format::Format;
use crate::ops;

/// [`ops::conv1d`] with its weight `(c_out, c_in / groups, k)` and bias `(c_out)`.
#[derive(Clone, Debug)]
pub struct Conv1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv1dConfig,
    format: Format,
}

impl Conv1d {
    /// A layer of given parameters.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv1dConfig) -> Self {
        Self { weight, bias, config, format: Format::ChannelsFirst }
    }

    /// The layer for sequences `(b, l, c)`: [`ops::channels_last::conv1d`]. The weight is the same.
    pub fn channels_last(self) -> Self {
        Self { format: Format::ChannelsLast, ..self }
    }

    /// Stride, padding, dilation, groups.
    pub fn config(&self) -> &Conv1dConfig {
        &self.config
    }

    /// The weight, `(c_out, c_in / groups, k)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `(c_out)`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Conv1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let convolve = match self.format {
            Format::ChannelsFirst => ops::conv1d,
            Format::ChannelsLast => ops::channels_last::conv1d,
        };
        convolve(x, &self.weight, self.bias.as_ref(), self.config)
    }
}

/// A convolution of sequences with a bias; parameters `weight` and `bias`.
pub fn conv1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let bound = 1.0 / ((in_channels * kernel_size) as f64).sqrt();
    let layer = conv1d_no_bias(in_channels, out_channels, kernel_size, config, vb.clone())?;
    let bias = vb.get_with_hints(out_channels, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Conv1d { bias: Some(bias), ..layer })
}

/// A convolution of sequences with no bias; parameter `weight`.
pub fn conv1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv1dConfig,
    vb: VarBuilder,
) -> Result<Conv1d> {
    let groups = config.groups.max(1);
    let shape = (out_channels, in_channels / groups, kernel_size);
    let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
    let weight = vb.get_with_hints(shape, "weight", init)?;
    Ok(Conv1d::new(weight, None, config))
}

/// [`ops::conv2d`] with its weight `(c_out, c_in / groups, k, k)` and bias `(c_out)`.
#[derive(Clone, Debug)]
pub struct Conv2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: Conv2dConfig,
    format: Format,
}

impl Conv2d {
    /// A layer of given parameters.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: Conv2dConfig) -> Self {
        Self { weight, bias, config, format: Format::ChannelsFirst }
    }

    /// The layer for images `(b, h, w, c)`: [`ops::channels_last::conv2d`]. The weight is the same.
    pub fn channels_last(self) -> Self {
        Self { format: Format::ChannelsLast, ..self }
    }

    /// Stride, padding, dilation, groups.
    pub fn config(&self) -> &Conv2dConfig {
        &self.config
    }

    /// The weight, `(c_out, c_in / groups, k, k)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `(c_out)`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Conv2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let convolve = match self.format {
            Format::ChannelsFirst => ops::conv2d,
            Format::ChannelsLast => ops::channels_last::conv2d,
        };
        convolve(x, &self.weight, self.bias.as_ref(), self.config)
    }
}

/// A convolution with a square kernel and a bias; parameters `weight` and `bias`.
pub fn conv2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let bound = 1.0 / ((in_channels * kernel_size * kernel_size) as f64).sqrt();
    let layer = conv2d_no_bias(in_channels, out_channels, kernel_size, config, vb.clone())?;
    let bias = vb.get_with_hints(out_channels, "bias", Init::Uniform { lo: -bound, up: bound })?;
    Ok(Conv2d { bias: Some(bias), ..layer })
}

/// A convolution with a square kernel and no bias; parameter `weight`.
pub fn conv2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: Conv2dConfig,
    vb: VarBuilder,
) -> Result<Conv2d> {
    let groups = config.groups.max(1);
    let shape = (out_channels, in_channels / groups, kernel_size, kernel_size);
    let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
    let weight = vb.get_with_hints(shape, "weight", init)?;
    Ok(Conv2d::new(weight, None, config))
}
