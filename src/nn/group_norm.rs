//! Group norm.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::error::ArgumentError;
use crate::ops;

/// [`ops::group_norm`] with its parameters `weight` and `bias`.
///
/// # Errors
///
/// Of `forward`: another number of channels; those of [`ops::group_norm`].
///
/// # References
///
/// `torch.nn.GroupNorm`.
#[derive(Clone, Debug)]
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
    num_channels: usize,
    num_groups: usize,
}

impl GroupNorm {
    /// A layer of given parameters.
    ///
    /// # Errors
    ///
    /// A `num_groups` that does not divide `num_channels`.
    pub fn new(
        weight: Tensor,
        bias: Tensor,
        num_channels: usize,
        num_groups: usize,
        eps: f64,
    ) -> Result<Self> {
        if num_groups == 0 || !num_channels.is_multiple_of(num_groups) {
            let (got, expected) = (num_groups as f64, "a divisor of the number of channels");
            return Err(ArgumentError::Setting { name: "num_groups", got, expected }.into());
        }
        Ok(Self { weight, bias, eps, num_channels, num_groups })
    }
}

impl Module for GroupNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if x.dims().get(1) != Some(&self.num_channels) {
            let expected = format!("(n, {}, …)", self.num_channels);
            let got = x.shape().clone();
            return Err(ArgumentError::Shape { op: "group_norm", name: "x", got, expected }.into());
        }
        ops::group_norm(x, self.num_groups, Some(&self.weight), Some(&self.bias), self.eps)
    }
}

/// Group norm over `num_channels` in `num_groups`; parameters `weight` and `bias`.
///
/// # Initial values
///
/// 1 and 0, as in PyTorch.
///
/// # Errors
///
/// A `num_groups` that does not divide `num_channels`; those of the builder.
///
/// # Examples
///
/// ```
/// use candle_amp::nn;
/// use candle_core::{DType, Device, Module, Tensor};
///
/// let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let norm = nn::group_norm(2, 4, 0.0, vb.pp("norm"))?;
/// let x = Tensor::new(&[[[1f32], [3.0], [10.0], [20.0]]], &Device::Cpu)?; // two channels per group
/// assert_eq!(norm.forward(&x)?.flatten_all()?.to_vec1::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
/// assert!(nn::group_norm(3, 4, 0.0, vb.pp("other")).is_err()); // 3 does not divide 4
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn group_norm(
    num_groups: usize,
    num_channels: usize,
    eps: f64,
    vb: VarBuilder,
) -> Result<GroupNorm> {
    let weight = vb.get_with_hints(num_channels, "weight", Init::Const(1.))?;
    let bias = vb.get_with_hints(num_channels, "bias", Init::Const(0.))?;
    GroupNorm::new(weight, bias, num_channels, num_groups, eps)
}
