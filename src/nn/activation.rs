//! Activations as layers.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::ops;

/// An activation by name, as model configurations have it.
///
/// ```
/// use candle_amp::nn::{Activation, Module};
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[-1f32, 2.0], &Device::Cpu)?;
/// assert_eq!(Activation::Relu.forward(&x)?.to_vec1::<f32>()?, [0.0, 2.0]);
/// let theirs = candle_nn::Activation::Silu;
/// assert_eq!(Activation::from(theirs), Activation::Silu);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "lowercase")
)]
pub enum Activation {
    /// [`ops::gelu_erf`].
    #[default]
    Gelu,
    /// [`ops::gelu_tanh`].
    #[cfg_attr(feature = "serde", serde(alias = "gelu_new"))]
    NewGelu,
    /// [`ops::relu`].
    Relu,
    /// [`ops::relu2`].
    Relu2,
    /// [`ops::relu6`].
    Relu6,
    /// [`ops::silu`].
    Silu,
    /// [`ops::sigmoid`].
    Sigmoid,
    /// [`ops::hard_sigmoid`].
    HardSigmoid,
    /// [`ops::swiglu`].
    Swiglu,
    /// [`ops::silu`].
    Swish,
    /// [`ops::mish`].
    Mish,
    /// [`ops::hard_swish`].
    HardSwish,
    /// [`ops::elu`] of this `alpha`.
    Elu(f64),
    /// [`ops::leaky_relu`] of this slope.
    LeakyRelu(f64),
    /// [`ops::gelu_tanh`].
    #[cfg_attr(feature = "serde", serde(alias = "gelu_pytorch_tanh"))]
    GeluPytorchTanh,
}

impl Module for Activation {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match *self {
            Self::Gelu => ops::gelu_erf(x),
            Self::NewGelu | Self::GeluPytorchTanh => ops::gelu_tanh(x),
            Self::Relu => ops::relu(x),
            Self::Relu2 => ops::relu2(x),
            Self::Relu6 => ops::relu6(x),
            Self::Silu | Self::Swish => ops::silu(x),
            Self::Sigmoid => ops::sigmoid(x),
            Self::HardSigmoid => ops::hard_sigmoid(x),
            Self::Swiglu => ops::swiglu(x),
            Self::Mish => ops::mish(x),
            Self::HardSwish => ops::hard_swish(x),
            Self::Elu(alpha) => ops::elu(x, alpha),
            Self::LeakyRelu(slope) => ops::leaky_relu(x, slope),
        }
    }
}

impl From<candle_nn::Activation> for Activation {
    fn from(theirs: candle_nn::Activation) -> Self {
        use candle_nn::Activation as Theirs;
        match theirs {
            Theirs::Gelu => Self::Gelu,
            Theirs::NewGelu => Self::NewGelu,
            Theirs::Relu => Self::Relu,
            Theirs::Relu2 => Self::Relu2,
            Theirs::Relu6 => Self::Relu6,
            Theirs::Silu => Self::Silu,
            Theirs::Sigmoid => Self::Sigmoid,
            Theirs::HardSigmoid => Self::HardSigmoid,
            Theirs::Swiglu => Self::Swiglu,
            Theirs::Swish => Self::Swish,
            Theirs::Mish => Self::Mish,
            Theirs::HardSwish => Self::HardSwish,
            Theirs::Elu(alpha) => Self::Elu(alpha),
            Theirs::LeakyRelu(slope) => Self::LeakyRelu(slope),
            Theirs::GeluPytorchTanh => Self::GeluPytorchTanh,
        }
    }
}

/// [`ops::prelu`] with its weight, of one element or one per channel.
#[derive(Clone, Debug)]
pub struct PReLU {
    weight: Tensor,
    is_scalar: bool,
}

impl PReLU {
    /// A layer of a given weight: of one element where `is_scalar` is set.
    pub fn new(weight: Tensor, is_scalar: bool) -> Self {
        Self { weight, is_scalar }
    }

    /// The slope below 0, `(1)` or `(c)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Whether all channels share one slope.
    pub fn is_scalar(&self) -> bool {
        self.is_scalar
    }
}

impl Module for PReLU {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::prelu(x, &self.weight)
    }
}

/// A layer of a slope for each of `num_channels`, or of one for all; parameter `weight`.
pub fn prelu(num_channels: Option<usize>, vb: VarBuilder) -> Result<PReLU> {
    let weight = vb.get_with_hints(num_channels.unwrap_or(1), "weight", Init::Const(0.25))?;
    Ok(PReLU::new(weight, num_channels.is_none()))
}
