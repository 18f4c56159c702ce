//! Variances, norms, and logarithms of sums of exponentials.

use candle_core::shape::Dims;
use candle_core::{DType, Device, Result, Tensor};

use super::check::{check_operand, shape_error};
use super::reduce::{kept, without};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::activation::{self, Pointwise};
use crate::kernels::{self, accumulator, elementwise, reduce};

/// The variance of all elements, with Bessel's correction: divided by their number less one.
///
/// # Shapes
///
/// Any, with at least two elements → `()`.
///
/// # Precision
///
/// Under autocast `F32` in and out; outside, the dtype of `x`. The mean, and then what its rounding to `F32` has left, are
/// subtracted in `F32` before the squares, which are added up as by [`sum`](super::sum). The gradient is computed in `F32`
/// from `x` and both, and rounded once. PyTorch leaves the variance of 16-bit inputs in 16 bits, even under autocast.
///
/// The standard deviation is `ops::sqrt(&ops::var(x)?)`, whose gradient is infinite or NaN where all elements are equal.
///
/// # Errors
///
/// Fewer than two elements.
///
/// # References
///
/// `torch.var`.
pub fn var(x: &Tensor) -> Result<Tensor> {
    apply(Statistic { kind: Kind::Var, to: Vec::new() }, &[x])
}

/// The variances over `dims`, which are removed from the result.
///
/// # Shapes
///
/// Any → the dimensions that are not in `dims`. There are at least two elements for each variance.
///
/// # Precision
///
/// As [`var`].
///
/// # Errors
///
/// A dimension that there is not, or twice; fewer than two elements for each variance.
///
/// # Examples
///
/// ```
/// use candle_amp::{Autocast, ops};
/// use candle_core::{DType, Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 3.0], [-300.0, 300.0]], &Device::Cpu)?.to_dtype(DType::F16)?;
/// let var = Autocast::new(DType::F16).scope(|| ops::var_dims(&x, 1))?;
/// assert_eq!(var.to_vec1::<f32>()?, [2.0, 180_000.0]); // candle's squares overflow F16
/// assert!(ops::var_dims(&x, ()).is_err(), "the variance of one element");
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.var` with `dim`; `candle_core::Tensor::var`.
pub fn var_dims(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    without(x, dims, |x, dims| over(Kind::Var, x, dims))
}

/// [`var_dims`] with 1 in place of each of `dims`.
///
/// # Errors
///
/// As there.
///
/// # References
///
/// `torch.var` with `keepdim`.
pub fn var_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    over(Kind::Var, x, &dims.to_indexes(x.shape(), "var_keepdim")?)
}

/// The L2 norm of all elements: the square root of the sum of their squares.
///
/// # Shapes
///
/// Any → `()`.
///
/// # Precision
///
/// Under autocast `F32` in and out; outside, the dtype of `x`. Squares in `F32`, of `x` divided by its largest magnitude so
/// that none overflows or vanishes, added up as by [`sum`](super::sum). The gradient is `x / norm`, computed in `F32` and rounded once, and 0 where the norm is 0.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor, Var};
///
/// let x = Tensor::new(&[300f32, -400.0], &Device::Cpu)?.to_dtype(DType::F16)?;
/// assert_eq!(ops::norm(&x)?.to_dtype(DType::F32)?.to_scalar::<f32>()?, 500.0); // candle's is infinite
///
/// let zero = Var::zeros(2, DType::F32, &Device::Cpu)?;
/// let grads = ops::norm(&zero)?.backward()?;
/// assert_eq!(grads.get(&zero).unwrap().to_vec1::<f32>()?, [0.0, 0.0]); // candle's is NaN
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.linalg.vector_norm`; `candle_core::Tensor::norm`.
pub fn norm(x: &Tensor) -> Result<Tensor> {
    apply(Statistic { kind: Kind::Norm, to: Vec::new() }, &[x])
}

/// The L2 norms over `dims`, which are removed from the result.
///
/// # Shapes
///
/// Any → the dimensions that are not in `dims`.
///
/// # Precision
///
/// As [`norm`].
///
/// # Errors
///
/// A dimension that there is not, or twice.
///
/// # References
///
/// `torch.linalg.vector_norm` with `dim`.
pub fn norm_dims(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    without(x, dims, |x, dims| over(Kind::Norm, x, dims))
}

/// [`norm_dims`] with 1 in place of each of `dims`, to divide `x` by.
///
/// # Errors
///
/// As there.
///
/// # References
///
/// `torch.linalg.vector_norm` with `keepdim`.
pub fn norm_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    over(Kind::Norm, x, &dims.to_indexes(x.shape(), "norm_keepdim")?)
}

/// `ln(sum(exp(x)))` over `dims`, which are removed from the result.
///
/// # Shapes
///
/// Any → the dimensions that are not in `dims`. There is at least one element for each result.
///
/// # Precision
///
/// Under autocast `F32` in and out; outside, computed in `F32` and rounded once to the dtype of `x`. The largest element is
/// subtracted first, so that no exponential overflows. The gradient is the softmax of `x`, in `F32`, rounded once. Elements
/// that are all -∞ give -∞ and gradients of 0, where PyTorch's are NaN.
///
/// # Errors
///
/// A dimension that there is not, or twice; no element for a result.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Var};
///
/// const LEAST: f32 = f32::NEG_INFINITY;
/// let x = Var::new(&[[1000f32, 1000.0], [LEAST, LEAST]], &Device::Cpu)?;
/// let y = ops::log_sum_exp(&x, 1)?;
/// assert_eq!(y.to_vec1::<f32>()?, [1000.0 + 2f32.ln(), LEAST]); // candle's second is NaN
/// let grads = ops::sum(&y)?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>()?, [[0.5, 0.5], [0.0, 0.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.logsumexp`; `candle_core::Tensor::log_sum_exp`.
pub fn log_sum_exp(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    without(x, dims, |x, dims| over(Kind::LogSumExp, x, dims))
}

fn over(kind: Kind, x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    apply(Statistic { kind, to: kept(x, dims) }, &[x])
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Var,
    Norm,
    LogSumExp,
}

struct Statistic {
    kind: Kind,
    /// The shape of the result: 1 for what is reduced, or nothing, for all.
    to: Vec<usize>,
}

/// What gradients are made of: `offset` and `divisor` have the shape of the result, and are not rounded to its dtype.
struct Saved {
    x: Tensor,
    /// What is subtracted from `x`, or what it is divided by: see [`Statistic::terms`].
    offset: Option<Tensor>,
    /// Of a variance, what rounding has left of the mean, to be subtracted too: where elements are far from 0 and close
    /// together, that is as large as their distances.
    rest: Option<Tensor>,
    /// What the gradient is divided by.
    divisor: Option<Tensor>,
}

impl Statistic {
    /// The number of elements of each result.
    fn count(&self, x: &Tensor) -> usize {
        let results: usize = self.to.iter().product();
        x.elem_count().checked_div(results).unwrap_or(usize::MAX)
    }

    /// The largest magnitude of the elements of each result, or 1 where that is 0 or not finite.
    fn magnitude(&self, x: &Tensor) -> Result<Tensor> {
        let max = self.finite_maximum(&x.abs()?)?;
        elementwise::where_cond(&max.eq(&max.zeros_like()?)?, &max.ones_like()?, &max)
    }

    /// The largest of the elements of each result, or 0 where that is not finite.
    fn finite_maximum(&self, x: &Tensor) -> Result<Tensor> {
        finite_or_zero(&self.maximum(x)?)
    }

    /// The same, but the largest number where that is ∞: beside it, the exponentials of all others are 0.
    fn nearly_maximum(&self, x: &Tensor) -> Result<Tensor> {
        let max = self.maximum(x)?;
        let largest = if x.dtype() == DType::F64 { f64::MAX } else { f32::MAX.into() };
        // On the host first: Metal has no F64.
        let largest =
            Tensor::new(largest, &Device::Cpu)?.to_dtype(x.dtype())?.to_device(x.device())?;
        let largest = largest.broadcast_as(max.shape())?.contiguous()?;
        elementwise::where_cond(&max.eq(f64::INFINITY)?, &largest, &finite_or_zero(&max)?)
    }

    fn maximum(&self, x: &Tensor) -> Result<Tensor> {
        let mut max = if self.to.is_empty() { x.flatten_all()?.max(0)? } else { x.clone() };
        for (dim, &size) in self.to.iter().enumerate() {
            if size != max.dims()[dim] {
                max = max.max_keepdim(dim)?;
            }
        }
        Ok(max)
    }

    /// What is added up, or its square: `x` less its mean for a variance, the exponential of `x` less its maximum; for
    /// a norm `x` divided by its largest magnitude, so that no square overflows or vanishes.
    fn terms(&self, x: &Tensor, offset: Option<&Tensor>, rest: Option<&Tensor>) -> Result<Tensor> {
        let wide = kernels::cast(x, accumulator(x.dtype()))?;
        let Some(offset) = offset else { return Ok(wide) };
        let offset = offset.broadcast_as(x.shape())?;
        match self.kind {
            Kind::Var => {
                let distances = elementwise::sub(&wide, &offset)?;
                match rest {
                    Some(rest) => elementwise::sub(&distances, &rest.broadcast_as(x.shape())?),
                    None => Ok(distances),
                }
            }
            Kind::Norm => elementwise::div(&wide, &offset, wide.dtype()),
            Kind::LogSumExp => {
                activation::value(Pointwise::Exp {}, &elementwise::sub(&wide, &offset)?)
            }
        }
    }
}

fn finite_or_zero(x: &Tensor) -> Result<Tensor> {
    elementwise::where_cond(&x.abs()?.lt(f64::INFINITY)?, x, &x.zeros_like()?)
}

impl Operator for Statistic {
    type Saved = Saved;

    fn op(&self) -> Op {
        match self.kind {
            Kind::Var => Op::Var,
            Kind::Norm => Op::Norm,
            Kind::LogSumExp => Op::LogSumExp,
        }
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let (count, wide) = (self.count(x), accumulator(x.dtype()));
        let (least, expected) = match self.kind {
            Kind::Var => (2, "at least two elements for each variance"),
            Kind::Norm => (0, ""),
            Kind::LogSumExp => (1, "at least one element for each result"),
        };
        if count < least {
            return shape_error(self.op(), "x", x, expected.into());
        }
        let offset = match self.kind {
            Kind::Norm if x.elem_count() == 0 => None,
            Kind::Norm => Some(self.magnitude(&kernels::cast(x, wide)?)?),
            _ if x.elem_count() == 0 => Some(Tensor::zeros(self.to.as_slice(), wide, x.device())?),
            Kind::Var => Some(reduce::mean_to(x, &self.to, count)?),
            Kind::LogSumExp => Some(self.nearly_maximum(&kernels::cast(x, wide)?)?),
        };
        let rest = match self.kind {
            Kind::Var if x.elem_count() > 0 => {
                let distances = self.terms(x, offset.as_ref(), None)?;
                Some(reduce::mean_to(&distances, &self.to, count)?)
            }
            _ => None,
        };
        let terms = self.terms(x, offset.as_ref(), rest.as_ref())?;
        let terms = match self.kind {
            Kind::LogSumExp => terms,
            _ => elementwise::mul(&terms, &terms, wide)?,
        };
        let sum = reduce::sum_to(&terms, &self.to, wide)?;
        let (y, divisor) = match (self.kind, &offset) {
            (Kind::LogSumExp, Some(offset)) => ((sum.log()? + offset)?, Some(sum)),
            (Kind::Var, _) => (sum.affine(1.0 / (count - 1) as f64, 0.0)?, None),
            _ => {
                let divided = sum.sqrt()?;
                let norm = match &offset {
                    Some(magnitude) => (&divided * magnitude)?,
                    None => divided.clone(),
                };
                (norm, Some(divided))
            }
        };
        Ok((kernels::cast(&y, x.dtype())?, Saved { x: x.clone(), offset, rest, divisor }))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Some(out) = ctx.wants[0] else { return Ok(vec![None]) };
        let Saved { x, offset, rest, divisor } = ctx.saved;
        // On CUDA, candle launches no kernel over nothing.
        if x.elem_count() == 0 {
            return Ok(vec![Some(Gradient::owned(Tensor::zeros(x.shape(), out, x.device())?))]);
        }
        let gradient = kernels::cast(ctx.gradient, accumulator(x.dtype()))?;
        let factor = match divisor {
            // Nothing went into a sum of 0.
            Some(divisor) => {
                let zeros = divisor.zeros_like()?;
                elementwise::where_cond(&divisor.eq(&zeros)?, &zeros, &(gradient / divisor)?)?
            }
            None => gradient.affine(2.0 / (self.count(x).saturating_sub(1)) as f64, 0.0)?,
        };
        let terms = self.terms(x, offset.as_ref(), rest.as_ref())?;
        let dx = elementwise::mul(&terms, &factor.broadcast_as(x.shape())?, accumulator(out))?;
        Ok(vec![Some(Gradient::owned(kernels::cast(&dx, out)?))])
    }
}
