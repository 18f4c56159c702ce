//! Linear layers.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::ops;

/// [`ops::linear`] with its weight `(out, in)` and bias `(out)`.
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
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    linear_b(in_dim, out_dim, true, vb)
}

/// A linear layer without bias.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder) -> Result<Linear> {
    linear_b(in_dim, out_dim, false, vb)
}

/// A linear layer, with bias or without.
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
