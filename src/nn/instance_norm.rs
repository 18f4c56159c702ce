//! Instance norm.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::error::ArgumentError;
use crate::ops;

/// Settings of [`InstanceNorm`]; PyTorch's defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct InstanceNormConfig {
    /// What is added to the variance before the root. Default `1e-5`.
    pub eps: f64,
    /// Whether there are parameters `weight` and `bias`. Default `false`.
    pub affine: bool,
}

impl Default for InstanceNormConfig {
    fn default() -> Self {
        Self { eps: 1e-5, affine: false }
    }
}

/// Normalises each channel of each sample by its own mean and variance: [`ops::group_norm`] of groups of one channel.
///
/// For sequences `(n, c, l)`, images `(n, c, h, w)` and any further dimensions. Training and evaluation are the same:
/// PyTorch's running statistics, which are off by default there, are left out.
///
/// # Precision
///
/// That of [`ops::group_norm`].
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{self, InstanceNormConfig, Module};
/// use candle_core::{DType, Device, Tensor};
///
/// let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let norm = nn::instance_norm(2, InstanceNormConfig { affine: true, ..Default::default() }, vb)?;
/// let x = Tensor::rand(0f32, 1., (1, 2, 4, 4), &Device::Cpu)?;
/// let difference = (norm.forward(&x)? - norm.forward(&(&x + 3.0)?)?)?.abs()?.max_all()?;
/// assert!(difference.to_scalar::<f32>()? < 1e-4);
/// assert!(norm.forward(&x.narrow(2, 0, 1)?.narrow(3, 0, 1)?).is_err()); // one pixel has no variance
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.InstanceNorm1d`, `InstanceNorm2d` and `InstanceNorm3d`.
#[doc(alias = "InstanceNorm1d")]
#[doc(alias = "InstanceNorm2d")]
#[doc(alias = "InstanceNorm3d")]
#[derive(Clone, Debug)]
pub struct InstanceNorm {
    num_features: usize,
    weight_and_bias: Option<(Tensor, Tensor)>,
    eps: f64,
}

impl InstanceNorm {
    /// A layer for `num_features` channels without parameters.
    pub fn new(num_features: usize, eps: f64) -> Self {
        Self { num_features, weight_and_bias: None, eps }
    }

    /// Weight and bias, `(c)` each, where there are any.
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }
}

impl Module for InstanceNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let fits = match x.dims() {
            [_, c, rest @ ..] => *c == self.num_features && rest.iter().product::<usize>() > 1,
            _ => false,
        };
        if !fits {
            let expected =
                format!("(n, {}, …), more than one element a channel", self.num_features);
            let (op, got) = ("instance_norm", x.shape().clone());
            return Err(ArgumentError::Shape { op, name: "x", got, expected }.into());
        }
        let (weight, bias) = self.weight_and_bias().unzip();
        ops::group_norm(x, self.num_features, weight, bias, self.eps)
    }
}

/// Instance norm over `num_features` channels; with `affine`, parameters `weight` and `bias`.
///
/// # Errors
///
/// Those of the builder.
pub fn instance_norm(
    num_features: usize,
    config: InstanceNormConfig,
    vb: VarBuilder,
) -> Result<InstanceNorm> {
    let get = |name, value| vb.get_with_hints(num_features, name, Init::Const(value));
    let weight_and_bias = match config.affine {
        true => Some((get("weight", 1.0)?, get("bias", 0.0)?)),
        false => None,
    };
    Ok(InstanceNorm { num_features, weight_and_bias, eps: config.eps })
}
