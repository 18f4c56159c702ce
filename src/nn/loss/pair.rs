//! Losses of an input and a target of one shape.

use candle_core::{Result, Tensor};

use crate::error::ArgumentError;
use crate::kernels::loss::Pairwise;
use crate::ops::{self, Reduction, huber_with, pair_loss, probabilities};

macro_rules! losses {
    ($($(#[$doc:meta])* $layer:ident: $loss:expr, $target:expr;)*) => { $(
        $(#[$doc])*
        ///
        /// # Shapes
        ///
        /// Both of one shape → `()`, or with [`Reduction::None`] that shape.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $layer {
            /// What becomes of the losses of the elements.
            pub reduction: Reduction,
        }

        impl $layer {
            /// The loss of `input` and `target`.
            ///
            /// # Errors
            ///
            /// Those of the operator.
            pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
                pair_loss($loss, self.reduction, input, &$target(input, target)?)
            }
        }
    )* };
}

/// A target that is taken as it is.
fn as_is(_: &Tensor, target: &Tensor) -> Result<Tensor> {
    Ok(target.clone())
}

losses! {
    /// [`ops::mse`] with other reductions.
    ///
    /// # Examples
    ///
    /// ```
    /// use candle_amp::nn::{MseLoss, Reduction};
    /// use candle_amp::Autocast;
    /// use candle_core::{DType, Device, Tensor};
    ///
    /// let x = Tensor::new(&[300f32, 1.0], &Device::Cpu)?.to_dtype(DType::F16)?;
    /// let loss = MseLoss { reduction: Reduction::None };
    /// let each = Autocast::new(DType::F16).scope(|| loss.forward(&x, &x.zeros_like()?))?;
    /// assert_eq!(each.to_vec1::<f32>()?, [90000.0, 1.0]); // infinite in F16
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # References
    ///
    /// `torch.nn.MSELoss`.
    MseLoss: Pairwise::Mse, as_is;
    /// [`ops::l1`] with other reductions.
    ///
    /// # References
    ///
    /// `torch.nn.L1Loss`.
    L1Loss: Pairwise::L1, as_is;
    /// [`ops::binary_cross_entropy`] with other reductions.
    ///
    /// # References
    ///
    /// `torch.nn.BCELoss`.
    BceLoss: Pairwise::BinaryCrossEntropy, probabilities;
}

/// [`ops::huber`] with other reductions.
///
/// # References
///
/// `torch.nn.HuberLoss`.
#[derive(Clone, Copy, Debug)]
pub struct HuberLoss {
    /// How far apart two numbers are where the square ends; 1 unless said otherwise.
    pub delta: f64,
    /// What becomes of the losses of the elements.
    pub reduction: Reduction,
}

impl Default for HuberLoss {
    fn default() -> Self {
        Self { delta: 1.0, reduction: Reduction::default() }
    }
}

impl HuberLoss {
    /// The loss of `input` and `target`.
    ///
    /// # Errors
    ///
    /// Those of [`ops::huber`].
    pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
        huber_with(input, target, self.delta, self.reduction)
    }
}

/// [`ops::huber`] of `delta = beta`, divided by `beta`, with other reductions: near 0 a parabola, beyond `beta`
/// `|input - target| - beta / 2`.
///
/// # Shapes
///
/// Both of one shape → `()`, or with [`Reduction::None`] that shape.
///
/// # References
///
/// `torch.nn.SmoothL1Loss`, whose `beta` may be 0: that is [`L1Loss`].
#[derive(Clone, Copy, Debug)]
pub struct SmoothL1Loss {
    /// How far apart two numbers are where the parabola ends; 1 unless said otherwise.
    pub beta: f64,
    /// What becomes of the losses of the elements.
    pub reduction: Reduction,
}

impl Default for SmoothL1Loss {
    fn default() -> Self {
        Self { beta: 1.0, reduction: Reduction::default() }
    }
}

impl SmoothL1Loss {
    /// The loss of `input` and `target`.
    ///
    /// # Errors
    ///
    /// Those of [`ops::huber`]; a `beta` that is not above 0.
    pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
        if !(self.beta > 0.0 && self.beta.is_finite()) {
            let expected = "a finite number above 0";
            return Err(ArgumentError::Setting { name: "beta", got: self.beta, expected }.into());
        }
        let huber = huber_with(input, target, self.beta, self.reduction)?;
        ops::affine(&huber, 1.0 / self.beta, 0.0)
    }
}

/// [`ops::binary_cross_entropy_with_logit`] with weights for positive targets, and other reductions.
///
/// # Shapes
///
/// `logits` and `target` of one shape → `()`, or with [`Reduction::None`] that shape. `pos_weight` of any shape that
/// broadcasts to it: `(classes)` for `(n, classes)`.
///
/// # Precision
///
/// As [`ops::binary_cross_entropy_with_logit`], all in `F32`. With a `pos_weight`, `target` gets no gradient.
///
/// # Errors
///
/// As [`ops::binary_cross_entropy_with_logit`]; with a `pos_weight`, a tracked one, or a tracked target.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::BceWithLogitsLoss;
/// use candle_core::{Device, Tensor};
///
/// let (logits, target) = (Tensor::new(&[[0f32, 0.0]], &Device::Cpu)?, Tensor::new(&[[1u32, 0]], &Device::Cpu)?);
/// let pos_weight = Some(Tensor::new(&[3f32, 3.0], &Device::Cpu)?);
/// let loss = BceWithLogitsLoss { pos_weight, ..Default::default() }.forward(&logits, &target)?;
/// assert!((loss.to_scalar::<f32>()? - 2.0 * 2f32.ln()).abs() < 1e-6); // (3 + 1) / 2 times ln 2
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.BCEWithLogitsLoss`, without `weight`: multiply what [`Reduction::None`] gives.
#[derive(Clone, Debug, Default)]
pub struct BceWithLogitsLoss {
    /// How much more a positive target counts than a negative one.
    pub pos_weight: Option<Tensor>,
    /// What becomes of the losses of the elements.
    pub reduction: Reduction,
}

impl BceWithLogitsLoss {
    /// The loss of `logits` with the probabilities, or integers, `target`.
    ///
    /// # Errors
    ///
    /// [Above](Self#errors).
    pub fn forward(&self, logits: &Tensor, target: &Tensor) -> Result<Tensor> {
        let target = probabilities(logits, target)?;
        let Some(pos_weight) = &self.pos_weight else {
            let loss = Pairwise::BinaryCrossEntropyWithLogit;
            return pair_loss(loss, self.reduction, logits, &target);
        };
        ops::positive_weighted(logits, &target, pos_weight, self.reduction)
    }
}

/// [`ops::kl_div`] of a target that may be logarithms too, with other reductions.
///
/// The divergence of `n` distributions on average, PyTorch's `batchmean`, is the [`Reduction::Sum`] divided by `n`;
/// [`Reduction::Mean`] divides by their elements as well.
///
/// # Shapes
///
/// Both of one shape → `()`, or with [`Reduction::None`] that shape.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{KlDivLoss, Reduction};
/// use candle_amp::ops;
/// use candle_core::{D, Device, Tensor};
///
/// let student = ops::log_softmax(&Tensor::new(&[[1f32, 2.0], [0.0, 0.0]], &Device::Cpu)?, D::Minus1)?;
/// let teacher = ops::log_softmax(&Tensor::new(&[[1f32, 2.0], [0.0, 4.0]], &Device::Cpu)?, D::Minus1)?;
/// let loss = KlDivLoss { log_target: true, reduction: Reduction::Sum };
/// let distillation = (loss.forward(&student, &teacher)? / 2.0)?;
/// assert!((distillation.to_scalar::<f32>()? - 0.301526).abs() < 1e-5);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.KLDivLoss`.
#[derive(Clone, Copy, Debug, Default)]
pub struct KlDivLoss {
    /// Whether the target is given as logarithms.
    pub log_target: bool,
    /// What becomes of the losses of the elements.
    pub reduction: Reduction,
}

impl KlDivLoss {
    /// The loss of the log-probabilities `input` and `target`.
    ///
    /// # Errors
    ///
    /// Those of [`ops::kl_div`].
    pub fn forward(&self, input: &Tensor, target: &Tensor) -> Result<Tensor> {
        let loss = Pairwise::KlDiv { log_target: self.log_target };
        pair_loss(loss, self.reduction, input, target)
    }
}
