//! Linear layers.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::ops;

/// [`ops::linear`] with its weight `(out, in)` and bias `(out)`.
///
/// # Errors
///
/// Of `forward`: those of [`ops::linear`].
///
/// # References
///
/// `torch.nn.Linear`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// A layer of given parameters.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// The weight, `(out, in)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `(out)`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::linear(x, &self.weight, self.bias.as_ref())
    }
}

/// A linear layer with bias; parameters `weight` and `bias`.
///
/// # Initial values
///
/// candle_nn's: the weight is normal, of standard deviation `sqrt(2 / in_dim)`, and the bias uniform within
/// `1 / sqrt(in_dim)` of 0. PyTorch's weight is as its bias.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
///
/// # Examples
///
/// Any number of leading dimensions. Dtypes differ only within a scope:
///
/// ```
/// use candle_amp::{Autocast, nn};
/// use candle_core::{DType, Device, Module, Tensor};
///
/// let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let layer = nn::linear(4, 2, vb)?;
/// let x = Tensor::ones((3, 5, 4), DType::BF16, &Device::Cpu)?;
/// assert!(layer.forward(&x).is_err()); // the weight is F32
/// let y = Autocast::new(DType::BF16).scope(|| layer.forward(&x))?;
/// assert_eq!((y.dims3()?, y.dtype()), ((3, 5, 2), DType::BF16));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    linear_b(in_dim, out_dim, true, vb)
}

/// A linear layer without bias; parameter `weight`, with the initial values of [`linear`].
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    linear_b(in_dim, out_dim, false, vb)
}

/// A linear layer, with bias or without; otherwise as [`linear`].
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
pub fn linear_b(in_dim: usize, out_dim: usize, bias: bool, vb: VarBuilder) -> Result<Linear> {
    let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", init)?;
    let bound = 1.0 / (in_dim as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    let bias = bias.then(|| vb.get_with_hints(out_dim, "bias", init)).transpose()?;
    Ok(Linear::new(weight, bias))
}

/// As [`linear_b`], with PyTorch's initial values, for layers that candle_nn has not.
pub(super) fn pytorch_linear(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    vb: VarBuilder,
) -> Result<Linear> {
    let bound = 1.0 / (in_dim.max(1) as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    let weight = vb.get_with_hints((out_dim, in_dim), "weight", init)?;
    let bias = bias.then(|| vb.get_with_hints(out_dim, "bias", init)).transpose()?;
    Ok(Linear::new(weight, bias))
}
