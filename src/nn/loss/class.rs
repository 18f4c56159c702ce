//! Losses of classes.

use candle_core::{Result, Tensor};

use crate::ops::{
    ClassSettings, Reduction, cross_entropy_with, linear_cross_entropy_with, nll_with,
};

/// [`ops::cross_entropy`](crate::ops::cross_entropy) with class weights, an `ignore_index` and other reductions.
///
/// # Shapes
///
/// `logits (n, classes, …)`, `targets (n, …)` → `()`, or with [`Reduction::None`] that of `targets`. `weight (classes)`.
///
/// # Precision
///
/// As [`ops::cross_entropy`](crate::ops::cross_entropy). A `weight` of any floating-point dtype is read in that of the
/// arithmetic, in a scope too. The loss of a row whose target is ignored is 0, and so is its gradient, whatever its
/// logits: NaN also.
///
/// # Errors
///
/// As [`ops::cross_entropy`](crate::ops::cross_entropy). A `weight` that is tracked, because it gets no gradient. A mean
/// where every row is ignored; on CUDA, where targets are not checked, as that would synchronise, it is NaN, as in PyTorch.
///
/// # Examples
///
/// Padded sentences, and a rare class that counts threefold:
///
/// ```
/// use candle_amp::nn::CrossEntropyLoss;
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let logits = Tensor::zeros((2, 3, 4), candle_core::DType::F32, &Device::Cpu)?; // 3 classes, 2 sentences of 4 words
/// let targets = Tensor::new(&[[0i64, 1, 2, -100], [2, 2, -100, -100]], &Device::Cpu)?;
/// assert!(ops::cross_entropy(&logits, &targets).is_err()); // -100 is no class
///
/// let weight = Tensor::new(&[1f32, 1.0, 3.0], &Device::Cpu)?;
/// let loss = CrossEntropyLoss { ignore_index: Some(-100), weight: Some(weight), ..Default::default() };
/// let mean = loss.forward(&logits, &targets)?.to_scalar::<f32>()?;
/// assert!((mean - 3f32.ln()).abs() < 1e-6); // the sum, 11 ln 3, over the weights of 5 words
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.CrossEntropyLoss`, without targets that are probabilities. Its `ignore_index` is -100 unless said otherwise;
/// here it is none.
#[derive(Clone, Debug, Default)]
pub struct CrossEntropyLoss {
    /// How much each class counts, `(classes)`; alike without.
    pub weight: Option<Tensor>,
    /// The target of rows that do not count: a class, or none, such as -100.
    pub ignore_index: Option<i64>,
    /// How much of the target is spread over all classes, from 0 to 1.
    pub label_smoothing: f64,
    /// What becomes of the losses.
    pub reduction: Reduction,
}

impl CrossEntropyLoss {
    /// The loss of `logits` with the classes `targets`.
    ///
    /// # Errors
    ///
    /// [Above](Self#errors).
    pub fn forward(&self, logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        cross_entropy_with(logits, targets, self.settings())
    }

    /// The loss of the logits `x · weightᵀ + bias`, the head of a language model:
    /// [`ops::linear_cross_entropy`](crate::ops::linear_cross_entropy) with these settings. `weight` is the head's; that of
    /// the classes is a field.
    ///
    /// # Shapes
    ///
    /// `x (…, k)`, `weight (classes, k)`, `bias (classes)`, `targets` as `x` without `k` → `()`, or with
    /// [`Reduction::None`] that of `targets`.
    ///
    /// # Errors
    ///
    /// [Above](Self#errors), and as [`ops::linear_cross_entropy`](crate::ops::linear_cross_entropy).
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_amp::nn::CrossEntropyLoss;
    /// use candle_core::{DType, Device, Tensor};
    ///
    /// let x = Tensor::ones((1, 3, 8), DType::BF16, &Device::Cpu)?;
    /// let table = Tensor::zeros((50257, 8), DType::BF16, &Device::Cpu)?;
    /// let next = Tensor::new(&[[1i64, 50256, -100]], &Device::Cpu)?;
    /// let loss = CrossEntropyLoss { ignore_index: Some(-100), ..Default::default() };
    /// let loss = loss.forward_linear(&x, &table, None, &next)?;
    /// assert!((loss.to_scalar::<f32>()? - 50257f32.ln()).abs() < 1e-5); // of two words
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_linear(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        targets: &Tensor,
    ) -> Result<Tensor> {
        linear_cross_entropy_with(x, weight, bias, targets, self.settings())
    }

    fn settings(&self) -> ClassSettings {
        let Self { weight, ignore_index, label_smoothing, reduction } = self.clone();
        ClassSettings { weight, ignore_index, label_smoothing, reduction }
    }
}

/// [`ops::nll`](crate::ops::nll) with class weights, an `ignore_index` and other reductions.
///
/// # Shapes, precision, errors
///
/// As [`CrossEntropyLoss`], of log-probabilities, as [`ops::log_softmax`](crate::ops::log_softmax) gives them.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{NllLoss, Reduction};
/// use candle_core::{Device, Tensor};
///
/// let log_probs = Tensor::new(&[[0.25f32, 0.75], [0.5, 0.5]], &Device::Cpu)?.log()?;
/// let targets = Tensor::new(&[1i64, -100], &Device::Cpu)?;
/// let loss = NllLoss { ignore_index: Some(-100), reduction: Reduction::None, ..Default::default() };
/// let each = loss.forward(&log_probs, &targets)?.to_vec1::<f32>()?;
/// assert!((each[0] + 0.75f32.ln()).abs() < 1e-6 && each[1] == 0.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.NLLLoss`.
#[derive(Clone, Debug, Default)]
pub struct NllLoss {
    /// How much each class counts, `(classes)`; alike without.
    pub weight: Option<Tensor>,
    /// The target of rows that do not count: a class, or none, such as -100.
    pub ignore_index: Option<i64>,
    /// What becomes of the losses.
    pub reduction: Reduction,
}

impl NllLoss {
    /// The loss of `log_probs` with the classes `targets`.
    ///
    /// # Errors
    ///
    /// Those of [`CrossEntropyLoss`].
    pub fn forward(&self, log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let Self { weight, ignore_index, reduction } = self.clone();
        let settings = ClassSettings { weight, ignore_index, label_smoothing: 0.0, reduction };
        nll_with(log_probs, targets, settings)
    }
}
