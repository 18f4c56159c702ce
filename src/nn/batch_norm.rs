//! Batch normalisation with running statistics.

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{Result, Tensor, Var};
use candle_nn::{BatchNormConfig, Init, ModuleT, VarBuilder};

use crate::autograd::{self, version};
use crate::error::ArgumentError;
use crate::kernels::accumulator;
use crate::kernels::batch_norm::Affine;
use crate::kernels::tensors::format::Format;
use crate::{autocast, kernels, ops};

/// [`ops::batch_norm`] with its parameters `weight` and `bias`, and the running averages
/// `running_mean` and `running_var` that evaluation uses.
///
/// # Precision
///
/// Input and output in any floating-point dtype. Parameters made by [`batch_norm`] and running
/// statistics are `F32` whatever the builder's dtype (`F64` in a builder of `F64`): a variance
/// underflows in `F16`, and `(c)` numbers save nothing.
///
/// candle_nn's fails in 16 bits, in training or in evaluation.
///
/// # References
///
/// `torch.nn.BatchNorm1d`, `BatchNorm2d`, `BatchNorm3d`.
#[derive(Clone, Debug)]
pub struct BatchNorm {
    running_mean: Var,
    running_var: Var,
    weight_and_bias: Option<(Tensor, Tensor)>,
    eps: f64,
    momentum: f64,
    format: Format,
    ranks: Option<Arc<dyn OverRanks>>,
}

/// Normalises by the statistics of the batches of all ranks.
pub(crate) trait OverRanks: Debug + Send + Sync {
    /// As [`ops::batch_norm`].
    fn batch_norm(
        &self,
        x: &Tensor,
        affine: Affine<'_>,
        eps: f64,
        format: Format,
    ) -> Result<(Tensor, ops::OfBatch)>;
}

impl BatchNorm {
    /// A layer of given parameters and statistics. Statistics that are variables are updated in
    /// place; others are copied.
    ///
    /// # Errors
    ///
    /// Shapes that are not `(num_features)`; a setting outside its range.
    pub fn new(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: f64,
    ) -> Result<Self> {
        let config = BatchNormConfig { eps, ..Default::default() };
        Self::from_parts(num_features, running_mean, running_var, Some((weight, bias)), config)
    }

    /// As [`new`](Self::new), without weight and bias.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn new_no_bias(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        eps: f64,
    ) -> Result<Self> {
        let config = BatchNormConfig { eps, ..Default::default() };
        Self::from_parts(num_features, running_mean, running_var, None, config)
    }

    fn from_parts(
        num_features: usize,
        running_mean: Tensor,
        running_var: Tensor,
        weight_and_bias: Option<(Tensor, Tensor)>,
        config: BatchNormConfig,
    ) -> Result<Self> {
        let BatchNormConfig { eps, momentum, remove_mean, .. } = config;
        let setting =
            |name, got, expected| Err(ArgumentError::Setting { name, got, expected }.into());
        if !(eps >= 0.0 && eps.is_finite()) {
            return setting("eps", eps, "a finite number, not below zero");
        }
        if !(0.0..=1.0).contains(&momentum) {
            return setting("momentum", momentum, "a number from 0 to 1");
        }
        if !remove_mean {
            return setting("remove_mean", 0.0, "true: batch norm without its mean is not built");
        }
        let affine = weight_and_bias.iter().flat_map(|(w, b)| [("weight", w), ("bias", b)]);
        let statistics = [("running_mean", &running_mean), ("running_var", &running_var)];
        for (name, tensor) in affine.chain(statistics) {
            if tensor.dims() != [num_features] {
                let (got, expected) = (tensor.shape().clone(), format!("[{num_features}]"));
                return Err(ArgumentError::Shape { op: "batch_norm", name, got, expected }.into());
            }
        }
        Ok(Self {
            running_mean: Var::from_tensor(&running_mean)?,
            running_var: Var::from_tensor(&running_var)?,
            weight_and_bias,
            eps,
            momentum,
            format: Format::ChannelsFirst,
            ranks: None,
        })
    }

    /// The layer for tensors `(n, …, c)`: the operators of [`ops::channels_last`]. Parameters and
    /// statistics are the same.
    pub fn channels_last(self) -> Self {
        Self { format: Format::ChannelsLast, ..self }
    }

    /// The layer that normalises by the batches of all `ranks` in training.
    pub(crate) fn over_ranks(self, ranks: Arc<dyn OverRanks>) -> Self {
        Self { ranks: Some(ranks), ..self }
    }

    /// The running average of the mean, `(c)`.
    pub fn running_mean(&self) -> &Tensor {
        &self.running_mean
    }

    /// The running average of the unbiased variance, `(c)`.
    pub fn running_var(&self) -> &Tensor {
        &self.running_var
    }

    /// What is added to the variance before the root.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// How much of each batch goes into the running averages.
    pub fn momentum(&self) -> f64 {
        self.momentum
    }

    /// Weight and bias, where there are any.
    pub fn weight_and_bias(&self) -> Option<(&Tensor, &Tensor)> {
        self.weight_and_bias.as_ref().map(|(weight, bias)| (weight, bias))
    }

    /// Normalises by the batch, and updates the running averages; not where a
    /// [`checkpoint`](crate::autograd::checkpoint) recomputes.
    ///
    /// # Errors
    ///
    /// Those of [`ops::batch_norm`]; the averages are untouched then.
    pub fn forward_train(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.weight_and_bias().unzip();
        let affine = Affine { weight, bias };
        let (y, statistics) = match &self.ranks {
            Some(ranks) => ranks.batch_norm(x, affine, self.eps, self.format)?,
            None => ops::batch_norm_of(self.format, x, affine, self.eps)?,
        };
        self.remember(&statistics)?;
        Ok(y)
    }

    /// The layer, `residual` added where there is one, and a relu: [`ops::batch_norm_relu`] where
    /// `train`, else, and where ranks share their statistics, operators one after the other.
    ///
    /// # Errors
    ///
    /// Those of [`ops::batch_norm_relu`]; the averages are untouched then.
    pub fn forward_relu_t(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
        train: bool,
    ) -> Result<Tensor> {
        if train && self.ranks.is_none() {
            let (weight, bias) = self.weight_and_bias().unzip();
            let affine = Affine { weight, bias };
            let (y, statistics) =
                ops::batch_norm_relu_of(self.format, x, affine, residual, self.eps)?;
            self.remember(&statistics)?;
            return Ok(y);
        }
        let y = self.forward_t(x, train)?;
        match residual {
            Some(residual) => ops::add_relu(&y, residual),
            None => ops::relu(&y),
        }
    }

    /// The layer and a relu6. In training this is [`ops::batch_norm_relu6`]; in evaluation, and where ranks share their
    /// statistics, it is two operators.
    ///
    /// # Errors
    ///
    /// Those of [`ops::batch_norm_relu6`]; the averages are untouched then.
    pub fn forward_relu6_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if !train || self.ranks.is_some() {
            return ops::relu6(&self.forward_t(x, train)?);
        }
        let (weight, bias) = self.weight_and_bias().unzip();
        let affine = Affine { weight, bias };
        let (y, statistics) = ops::batch_norm_relu6_of(self.format, x, affine, self.eps)?;
        self.remember(&statistics)?;
        Ok(y)
    }

    /// Updates the running averages.
    fn remember(&self, of: &ops::OfBatch) -> Result<()> {
        if autograd::is_recomputing() {
            return Ok(());
        }
        let count = of.count as f64;
        let unbiased = self.momentum * count / (count - 1.0);
        let running = [&self.running_mean, &self.running_var];
        let (kept, weights) = (1.0 - self.momentum, [self.momentum, unbiased]);
        let averaged = kernels::batch_norm::average(running, &of.statistics, kept, weights);
        // On an error too: one of the two may have been written.
        version::written(running.map(Var::as_tensor));
        autocast::forget_casts(running.map(Var::as_tensor));
        averaged
    }

    /// Normalises by the running averages.
    ///
    /// # Errors
    ///
    /// Those of [`ops::batch_norm_eval`].
    pub fn forward_eval(&self, x: &Tensor) -> Result<Tensor> {
        let (weight, bias) = self.weight_and_bias().unzip();
        let normalise = match self.format {
            Format::ChannelsFirst => ops::batch_norm_eval,
            Format::ChannelsLast => ops::channels_last::batch_norm_eval,
        };
        normalise(x, &self.running_mean, &self.running_var, weight, bias, self.eps)
    }
}

impl ModuleT for BatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if train { self.forward_train(x) } else { self.forward_eval(x) }
    }
}

/// Batch norm over `num_features` channels; variables `weight`, `bias` (unless the configuration
/// says otherwise), `running_mean` and `running_var`, `F32` even in a 16-bit builder. Initial weights and variances are 1,
/// biases and means 0.
///
/// # Errors
///
/// A setting outside its range; those of the builder.
///
/// # Examples
///
/// ```
/// use candle_amp::nn;
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{ModuleT, VarMap};
///
/// let varmap = VarMap::new();
/// let vb = nn::var_builder(&varmap, DType::BF16, &Device::Cpu);
/// let norm = nn::batch_norm(3, 1e-5, vb)?;
/// let x = Tensor::new(&[[1f32, 2., 3.], [4., 6., 8.]], &Device::Cpu)?.to_dtype(DType::BF16)?;
/// assert_eq!(norm.forward_t(&x, true)?.dtype(), DType::BF16);
/// assert_eq!(norm.running_mean().to_vec1::<f32>()?, [0.25, 0.4, 0.55]); // a tenth of the mean
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn batch_norm<C: Into<BatchNormConfig>>(
    num_features: usize,
    config: C,
    vb: VarBuilder,
) -> Result<BatchNorm> {
    let config = config.into();
    let dtype = accumulator(vb.dtype());
    let get = |name, value| vb.get_with_hints_dtype(num_features, name, Init::Const(value), dtype);
    let affine = match config.affine {
        true => Some((get("weight", 1.0)?, get("bias", 0.0)?)),
        false => None,
    };
    let (mean, var) = (get("running_mean", 0.0)?, get("running_var", 1.0)?);
    BatchNorm::from_parts(num_features, mean, var, affine, config)
}
