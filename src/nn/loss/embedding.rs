//! Losses that compare embeddings, `F32` inside (`F64` for `F64`).

use candle_core::{D, DType, Result, Tensor};

use crate::Autocast;
use crate::error::ArgumentError;
use crate::kernels::accumulator;
use crate::ops::{self, Reduction};

/// One minus the cosine of the angle between two embeddings whose target is 1, and the cosine less `margin`, at least 0,
/// where it is -1.
///
/// # Shapes
///
/// Both embeddings `(…, d)`, of one shape, `target (…)` → `()`, or with [`Reduction::None`] that of `target`.
///
/// # Precision
///
/// 16-bit embeddings are cast to `F32`, in a scope or not; the loss is `F32` (`F64` for `F64`). As in PyTorch, 1e-12 is
/// added to the sum of squares of each embedding, so that the loss and the gradients of zeros are finite. `target`, in any
/// dtype, gets no gradient; an example whose target is neither 1 nor -1 has a loss of 0.
///
/// # Errors
///
/// Shapes, dtypes or devices that differ.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::{CosineEmbeddingLoss, Reduction};
/// use candle_core::{DType, Device, Tensor};
///
/// // Their squares overflow F16.
/// let x = Tensor::new(&[[300f32, 0.0], [300.0, 0.0]], &Device::Cpu)?.to_dtype(DType::F16)?;
/// let y = Tensor::new(&[[300f32, 0.0], [0.0, 300.0]], &Device::Cpu)?.to_dtype(DType::F16)?;
/// let loss = CosineEmbeddingLoss { reduction: Reduction::None, ..Default::default() };
/// let each = loss.forward(&x, &y, &Tensor::new(&[1i64, -1], &Device::Cpu)?)?.to_vec1::<f32>()?;
/// assert!(each[0].abs() < 1e-6 && each[1] == 0.0); // as alike as they are to be, and as different
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.CosineEmbeddingLoss`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CosineEmbeddingLoss {
    /// The cosine up to which embeddings that are to differ cost nothing: 0 unless said otherwise, at most 1.
    pub margin: f64,
    /// What becomes of the losses.
    pub reduction: Reduction,
}

impl CosineEmbeddingLoss {
    /// The loss of pairs of embeddings that are to be alike, where `target` is 1, or to differ, where it is -1.
    ///
    /// # Errors
    ///
    /// [Above](Self#errors).
    pub fn forward(&self, input1: &Tensor, input2: &Tensor, target: &Tensor) -> Result<Tensor> {
        const OP: &str = "cosine_embedding_loss";
        let dims = embeddings(OP, input1, "input2", input2)?;
        check_dims(OP, "target", target, dims)?;
        let (a, b) = (wide(input1)?, wide(input2)?);
        let target = target.detach().to_dtype(DType::F32)?;
        Autocast::disabled().scope(|| {
            let dot = |a: &Tensor, b: &Tensor| ops::sum_dims(&ops::mul(a, b)?, D::Minus1);
            let inverse = |x: &Tensor| ops::rsqrt(&ops::affine(&dot(x, x)?, 1.0, 1e-12)?);
            let cosine = ops::mul(&ops::mul(&dot(&a, &b)?, &inverse(&a)?)?, &inverse(&b)?)?;
            let alike = ops::affine(&cosine, -1.0, 1.0)?;
            let apart = above_zero(&ops::affine(&cosine, 1.0, -self.margin)?)?;
            let zero = Tensor::zeros((), cosine.dtype(), cosine.device())?;
            let losses = ops::where_cond(&target.eq(-1f32)?, &apart, &zero)?;
            reduced(&ops::where_cond(&target.eq(1f32)?, &alike, &losses)?, self.reduction)
        })
    }
}

/// How much closer `margin` wants an anchor to be to its positive than to its negative, in Euclidean distance; at least 0.
///
/// # Shapes
///
/// All three `(…, d)`, of one shape → `()`, or with [`Reduction::None`] `(…)`.
///
/// # Precision
///
/// As [`CosineEmbeddingLoss`]. As in PyTorch, 1e-6 is added to each difference, so that the gradients of equal embeddings
/// are finite.
///
/// # Errors
///
/// Shapes, dtypes or devices that differ.
///
/// # Examples
///
/// ```
/// use candle_amp::nn::TripletMarginLoss;
/// use candle_core::{Device, Tensor};
///
/// let at = |x: f32| Tensor::new(&[[x, 0.0]], &Device::Cpu);
/// let loss = TripletMarginLoss::default(); // a margin of 1
/// assert_eq!(loss.forward(&at(0.0)?, &at(1.0)?, &at(5.0)?)?.to_scalar::<f32>()?, 0.0);
/// let near = loss.forward(&at(0.0)?, &at(1.0)?, &at(1.5)?)?.to_scalar::<f32>()?;
/// assert!((near - 0.5).abs() < 1e-5); // 1 - 1.5 + 1
/// let swapped = TripletMarginLoss { swap: true, ..loss };
/// let nearer = swapped.forward(&at(0.0)?, &at(1.0)?, &at(1.5)?)?.to_scalar::<f32>()?;
/// assert!((nearer - 1.5).abs() < 1e-5); // 1 - 0.5 + 1: the negative is closer to the positive
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.TripletMarginLoss` of `p = 2`.
#[derive(Clone, Copy, Debug)]
pub struct TripletMarginLoss {
    /// How much closer the positive is to be; 1 unless said otherwise.
    pub margin: f64,
    /// Whether the negative's distance is that from anchor or positive, whichever is less.
    pub swap: bool,
    /// What becomes of the losses.
    pub reduction: Reduction,
}

impl Default for TripletMarginLoss {
    fn default() -> Self {
        Self { margin: 1.0, swap: false, reduction: Reduction::default() }
    }
}

impl TripletMarginLoss {
    /// The loss of anchors, each with an embedding that is to be close and one that is to be far.
    ///
    /// # Errors
    ///
    /// [Above](Self#errors); a `margin` that is not above 0.
    pub fn forward(&self, anchor: &Tensor, positive: &Tensor, negative: &Tensor) -> Result<Tensor> {
        const OP: &str = "triplet_margin_loss";
        if !(self.margin > 0.0 && self.margin.is_finite()) {
            let (name, got, expected) = ("margin", self.margin, "a finite number above 0");
            return Err(ArgumentError::Setting { name, got, expected }.into());
        }
        embeddings(OP, anchor, "positive", positive)?;
        embeddings(OP, anchor, "negative", negative)?;
        let (anchor, positive, negative) = (wide(anchor)?, wide(positive)?, wide(negative)?);
        Autocast::disabled().scope(|| {
            let distance = |a: &Tensor, b: &Tensor| {
                let difference = ops::affine(&ops::sub(a, b)?, 1.0, 1e-6)?;
                ops::sqrt(&ops::sum_dims(&ops::square(&difference)?, D::Minus1)?)
            };
            let (near, mut far) = (distance(&anchor, &positive)?, distance(&anchor, &negative)?);
            if self.swap {
                far = ops::minimum(&far, &distance(&positive, &negative)?)?;
            }
            let losses = ops::affine(&ops::sub(&near, &far)?, 1.0, self.margin)?;
            reduced(&above_zero(&losses)?, self.reduction)
        })
    }
}

/// In the dtype of the arithmetic.
fn wide(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(accumulator(x.dtype()))
}

fn above_zero(x: &Tensor) -> Result<Tensor> {
    ops::clamp(x, 0.0, f64::INFINITY)
}

fn reduced(losses: &Tensor, reduction: Reduction) -> Result<Tensor> {
    match reduction {
        Reduction::Mean => ops::mean(losses),
        Reduction::Sum => ops::sum(losses),
        Reduction::None => Ok(losses.clone()),
    }
}

/// Two tensors of one shape and dtype: all dimensions but the last.
fn embeddings<'a>(
    op: &'static str,
    first: &'a Tensor,
    name: &'static str,
    second: &Tensor,
) -> Result<&'a [usize]> {
    check_dims(op, name, second, first.dims())?;
    if second.dtype() != first.dtype() {
        let expected = format!("{:?} as the first argument: cast one", first.dtype());
        return Err(ArgumentError::DType { op, name, got: second.dtype(), expected }.into());
    }
    match first.dims() {
        [dims @ .., _] if first.elem_count() > 0 => Ok(dims),
        _ => {
            let (got, expected) =
                (second.shape().clone(), "(…, d), of at least one element".into());
            Err(ArgumentError::Shape { op, name, got, expected }.into())
        }
    }
}

fn check_dims(op: &'static str, name: &'static str, got: &Tensor, dims: &[usize]) -> Result<()> {
    if got.dims() == dims {
        return Ok(());
    }
    let (got, expected) = (got.shape().clone(), format!("{dims:?}"));
    Err(ArgumentError::Shape { op, name, got, expected }.into())
}
