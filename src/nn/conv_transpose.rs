//! Transposed convolution layers.

use candle_core::{Result, Tensor};
use candle_nn::{ConvTranspose1dConfig, ConvTranspose2dConfig, Init, Module, VarBuilder};

use crate::kernels::format::Format;
use crate::ops;

/// candle_nn's initial values, of `fan_in` weights to an output.
fn uniform(fan_in: usize) -> Init {
    let bound = 1.0 / (fan_in as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// [`ops::conv_transpose1d`] with its weight `(c_in, c_out / groups, k)` and bias `(c_out)`.
#[derive(Clone, Debug)]
pub struct ConvTranspose1d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: ConvTranspose1dConfig,
    format: Format,
}

impl ConvTranspose1d {
    /// A layer of given parameters.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: ConvTranspose1dConfig) -> Self {
        Self { weight, bias, config, format: Format::ChannelsFirst }
    }

    /// The layer for sequences `(b, l, c)`: [`ops::channels_last::conv_transpose1d`]. The weight is the same.
    pub fn channels_last(self) -> Self {
        Self { format: Format::ChannelsLast, ..self }
    }

    /// Stride, paddings, dilation, groups.
    pub fn config(&self) -> &ConvTranspose1dConfig {
        &self.config
    }

    /// The weight, `(c_in, c_out / groups, k)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `(c_out)`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for ConvTranspose1d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let convolve = match self.format {
            Format::ChannelsFirst => ops::conv_transpose1d,
            Format::ChannelsLast => ops::channels_last::conv_transpose1d,
        };
        convolve(x, &self.weight, self.bias.as_ref(), self.config)
    }
}

/// A transposed convolution of sequences with a bias; parameters `weight` and `bias`.
pub fn conv_transpose1d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: ConvTranspose1dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose1d> {
    let layer =
        conv_transpose1d_no_bias(in_channels, out_channels, kernel_size, config, vb.clone())?;
    let init = uniform(out_channels * kernel_size);
    let bias = vb.get_with_hints(out_channels, "bias", init)?;
    Ok(ConvTranspose1d { bias: Some(bias), ..layer })
}

/// A transposed convolution of sequences with no bias; parameter `weight`.
pub fn conv_transpose1d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: ConvTranspose1dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose1d> {
    let shape = (in_channels, out_channels / config.groups.max(1), kernel_size);
    let init = uniform(out_channels * kernel_size);
    let weight = vb.get_with_hints(shape, "weight", init)?;
    Ok(ConvTranspose1d::new(weight, None, config))
}

/// [`ops::conv_transpose2d`] with its weight `(c_in, c_out, k, k)` and bias `(c_out)`.
#[derive(Clone, Debug)]
pub struct ConvTranspose2d {
    weight: Tensor,
    bias: Option<Tensor>,
    config: ConvTranspose2dConfig,
    format: Format,
}

impl ConvTranspose2d {
    /// A layer of given parameters.
    pub fn new(weight: Tensor, bias: Option<Tensor>, config: ConvTranspose2dConfig) -> Self {
        Self { weight, bias, config, format: Format::ChannelsFirst }
    }

    /// The layer for images `(b, h, w, c)`: [`ops::channels_last::conv_transpose2d`]. The weight is the same.
    pub fn channels_last(self) -> Self {
        Self { format: Format::ChannelsLast, ..self }
    }

    /// Stride, paddings, dilation.
    pub fn config(&self) -> &ConvTranspose2dConfig {
        &self.config
    }

    /// The weight, `(c_in, c_out, k, k)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `(c_out)`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for ConvTranspose2d {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let convolve = match self.format {
            Format::ChannelsFirst => ops::conv_transpose2d,
            Format::ChannelsLast => ops::channels_last::conv_transpose2d,
        };
        convolve(x, &self.weight, self.bias.as_ref(), self.config)
    }
}

/// A transposed convolution with a square kernel and a bias; parameters `weight` and `bias`.
pub fn conv_transpose2d(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: ConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose2d> {
    let layer =
        conv_transpose2d_no_bias(in_channels, out_channels, kernel_size, config, vb.clone())?;
    let init = uniform(out_channels * kernel_size * kernel_size);
    let bias = vb.get_with_hints(out_channels, "bias", init)?;
    Ok(ConvTranspose2d { bias: Some(bias), ..layer })
}

/// A transposed convolution with a square kernel and no bias; parameter `weight`.
pub fn conv_transpose2d_no_bias(
    in_channels: usize,
    out_channels: usize,
    kernel_size: usize,
    config: ConvTranspose2dConfig,
    vb: VarBuilder,
) -> Result<ConvTranspose2d> {
    let shape = (in_channels, out_channels, kernel_size, kernel_size);
    let init = uniform(out_channels * kernel_size * kernel_size);
    let weight = vb.get_with_hints(shape, "weight", init)?;
    Ok(ConvTranspose2d::new(weight, None, config))
}
