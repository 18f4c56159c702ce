//! A sequence of layers, of which some have a training mode.

use std::fmt;

use candle_core::{Result, Tensor};
use candle_nn::ModuleT;

/// A sequence of layers with a training mode: convolutions, norms, activations, dropout and pools in a row.
///
/// candle's own [`seq`](super::seq) takes only layers without a training mode. Every [`Module`](super::Module) is a
/// [`ModuleT`], so this one takes both, other sequences too.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{self, Activation, Dropout, Flatten, MaxPool2d, ModuleT, VarMap};
/// use candle_core::{DType, Device, Tensor};
///
/// let (vb, config) = (nn::var_builder(&VarMap::new(), DType::F32, &Device::Cpu), Default::default());
/// let model = nn::seq_t()
///     .add(nn::conv2d_no_bias(3, 8, 3, config, vb.pp("conv"))?.channels_last())
///     .add(nn::batch_norm(8, 1e-5, vb.pp("norm"))?.channels_last())
///     .add(Activation::Relu)
///     .add(MaxPool2d::new(2).channels_last())
///     .add(Flatten::new().channels_last())
///     .add(Dropout::new(0.5))
///     .add(nn::linear(8 * 5 * 5, 10, vb.pp("out"))?);
/// let images = Tensor::rand(0f32, 1., (4, 12, 12, 3), &Device::Cpu)?;
/// assert_eq!(model.forward_t(&images, true)?.dims(), [4, 10]);
///
/// let repeated = model.forward_t(&images, false)?; // no dropout, no batch statistics
/// assert_eq!(repeated.to_vec2::<f32>()?, model.forward_t(&images, false)?.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.Sequential`.
#[derive(Default)]
pub struct SequentialT {
    layers: Vec<Box<dyn ModuleT + Send + Sync>>,
}

/// An empty [`SequentialT`], which returns its input.
pub fn seq_t() -> SequentialT {
    SequentialT::default()
}

impl SequentialT {
    /// Appends a layer.
    #[must_use]
    #[allow(clippy::should_implement_trait)] // candle's name
    pub fn add(mut self, layer: impl ModuleT + Send + Sync + 'static) -> Self {
        self.layers.push(Box::new(layer));
        self
    }

    /// Appends a function, such as [`ops::relu`](crate::ops::relu).
    #[must_use]
    pub fn add_fn(self, f: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static) -> Self {
        self.add(candle_nn::func(f))
    }

    /// Appends a function of the input and of whether the sequence trains.
    #[must_use]
    pub fn add_fn_t(
        self,
        f: impl Fn(&Tensor, bool) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Self {
        self.add(candle_nn::func_t(f))
    }

    /// The number of layers.
    pub fn len(&self) -> usize {
        self.layers.len()
    }

    /// Whether there are no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }
}

impl ModuleT for SequentialT {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward_t(&x, train))
    }
}

impl fmt::Debug for SequentialT {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SequentialT").field("layers", &self.layers.len()).finish()
    }
}
