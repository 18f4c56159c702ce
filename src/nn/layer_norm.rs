//! Layer norm and RMS norm.

use candle_core::{Result, Tensor};
use candle_nn::{Init, LayerNormConfig, Module, VarBuilder};

use crate::ops;

/// [`ops::layer_norm`] with its parameters `weight` and `bias`; without its mean removed,
/// [`ops::rms_norm`].
///
/// candle_nn's gives no gradient where it has a bias and a contiguous input.
///
/// # Errors
///
/// Of `forward`: those of [`ops::layer_norm`].
///
/// # References
///
/// `torch.nn.LayerNorm` over one dimension.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
}

impl LayerNorm {
    /// A layer of given parameters.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self { weight, bias: Some(bias), remove_mean: true, eps }
    }

    /// A layer without bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self { weight, bias: None, remove_mean: true, eps }
    }

    /// A layer that leaves the mean in.
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self { weight, bias: None, remove_mean: false, eps }
    }

    /// The weight, `(d)`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias, `(d)`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// What is added to the variance before the root.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Whether the mean is taken off.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::row_norm(x, Some(&self.weight), self.bias.as_ref(), self.eps, self.remove_mean)
    }
}

/// Layer norm over a last dimension of `size`; parameters `weight` and, unless the configuration
/// says otherwise, `bias`. Parameters stored as `gamma` and `beta` are found too. The initial weight is 1, the bias 0.
///
/// # Errors
///
/// Those of the builder, such as a parameter of another shape in a file.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{self, Module, VarMap};
/// use candle_core::{DType, Device, Tensor};
///
/// let vb = nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
/// let norm = nn::layer_norm(64, 1e-5, vb)?;
/// let x = Tensor::ones((2, 7, 64), DType::BF16, &Device::Cpu)?;
/// assert_eq!(norm.forward(&x)?.dtype(), DType::BF16); // candle's wants parameters in BF16 too
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn layer_norm<C: Into<LayerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder,
) -> Result<LayerNorm> {
    let LayerNormConfig { eps, remove_mean, affine } = config.into();
    let get = |name, old, value| {
        let stored_as_old = !vb.contains_tensor(name) && vb.contains_tensor(old);
        let name = if stored_as_old { old } else { name };
        vb.get_with_hints(size, name, Init::Const(value))
    };
    let weight = get("weight", "gamma", 1.0)?;
    let bias = affine.then(|| get("bias", "beta", 0.0)).transpose()?;
    Ok(LayerNorm { weight, bias, remove_mean, eps })
}

/// Layer norm without bias; parameter `weight`.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    layer_norm(size, LayerNormConfig { eps, remove_mean: true, affine: false }, vb)
}

/// [`ops::rms_norm`] with its parameter `weight`.
///
/// candle_nn's gives no gradient where its input is contiguous.
///
/// # Errors
///
/// Of `forward`: those of [`ops::rms_norm`].
///
/// # References
///
/// `torch.nn.RMSNorm` over one dimension.
#[derive(Clone, Debug)]
pub struct RmsNorm(LayerNorm);

impl RmsNorm {
    /// A layer of a given weight.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self(LayerNorm::rms_norm(weight, eps))
    }

    /// The same layer as a [`LayerNorm`] that leaves the mean in.
    pub fn into_inner(self) -> LayerNorm {
        self.0
    }

    /// The weight, `(d)`.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// What is added to the mean square before the root.
    pub fn eps(&self) -> f64 {
        self.0.eps()
    }

    /// The same as `forward`. candle_nn's own `forward` gives no gradient, and this one does.
    ///
    /// # Errors
    ///
    /// Those of [`ops::rms_norm`].
    pub fn forward_diff(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}

/// RMS norm over a last dimension of `size`; parameter `weight`.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    let config = LayerNormConfig { eps, remove_mean: false, affine: false };
    Ok(RmsNorm(layer_norm(size, config, vb)?))
}
