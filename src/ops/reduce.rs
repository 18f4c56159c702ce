//! Sums.

use candle_core::shape::Dims;
use candle_core::{Result, Shape, Tensor};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::accumulator;
use crate::kernels::{self, reduce};

/// The sum of all elements.
///
/// # Shapes
///
/// Any → `()`.
///
/// # Precision
///
/// Under autocast `F32` in and out; outside, the dtype of `x`. Summed in blocks, in `F32`, and the
/// blocks in `F64`; rounded to `F32`, and from there to the dtype of the result.
///
/// # References
///
/// `torch.sum`.
pub fn sum(x: &Tensor) -> Result<Tensor> {
    apply(Sum { mean: false, to: Vec::new() }, &[x])
}

/// The mean of all elements.
///
/// # Shapes
///
/// Any, with at least one element → `()`.
///
/// # Precision
///
/// As [`sum`], and divided in `F64` before it is rounded; on Metal in `F32`, after. PyTorch leaves the mean of 16-bit inputs in 16 bits, even under autocast.
///
/// # References
///
/// `torch.mean`.
pub fn mean(x: &Tensor) -> Result<Tensor> {
    apply(Sum { mean: true, to: Vec::new() }, &[x])
}

/// The sums over `dims`, which the result lacks.
///
/// # Shapes
///
/// Any → the dimensions that are not summed over, in their order. `dims` is one of them, several as a tuple or a
/// slice, or `D::Minus1`.
///
/// # Precision
///
/// As [`sum`]. candle adds up 16-bit numbers in 16 bits, on a CPU as on CUDA.
///
/// # Errors
///
/// A dimension that `x` lacks, or one named twice.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{D, DType, Device, Tensor};
///
/// let ones = Tensor::ones((2, 4096), DType::F16, &Device::Cpu)?;
/// assert_eq!(ops::sum_dims(&ones, D::Minus1)?.to_dtype(DType::F32)?.to_vec1::<f32>()?, [4096.0; 2]);
/// assert_eq!(ones.sum(1)?.to_dtype(DType::F32)?.to_vec1::<f32>()?, [2048.0; 2]); // candle's
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.sum` with `dim`.
pub fn sum_dims(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    without(x, dims, sum_to)
}

/// [`sum_dims`] with 1 in place of each of `dims`.
///
/// # Errors
///
/// As there.
///
/// # References
///
/// `torch.sum` with `keepdim`.
pub fn sum_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    sum_to(x, &dims.to_indexes(x.shape(), "sum_keepdim")?)
}

/// The means over `dims`, which the result has not.
///
/// # Shapes
///
/// As [`sum_dims`]; at least one element for each mean.
///
/// # Precision
///
/// As [`sum`]. PyTorch leaves the mean of 16-bit inputs in 16 bits, even under autocast.
///
/// # Errors
///
/// As [`sum_dims`]; the mean of nothing.
///
/// # Examples
///
/// The average over the tokens of each text, for a classifier:
///
/// ```
/// use candle_amp::{Autocast, ops};
/// use candle_core::{DType, Device, Tensor};
///
/// let tokens = Tensor::ones((2, 4096, 8), DType::F16, &Device::Cpu)?;
/// let pooled = Autocast::new(DType::F16).scope(|| ops::mean_dims(&tokens, 1))?;
/// assert_eq!((pooled.dims(), pooled.dtype()), (&[2, 8][..], DType::F32));
/// assert_eq!(pooled.to_vec2::<f32>()?, [[1.0; 8]; 2]); // candle's `mean` says 0.5
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.mean` with `dim`.
pub fn mean_dims(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    without(x, dims, mean_to)
}

/// [`mean_dims`] with 1 in place of each of `dims`.
///
/// # Errors
///
/// As there.
///
/// # References
///
/// `torch.mean` with `keepdim`.
pub fn mean_keepdim(x: &Tensor, dims: impl Dims) -> Result<Tensor> {
    mean_to(x, &dims.to_indexes(x.shape(), "mean_keepdim")?)
}

fn sum_to(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    apply(Sum { mean: false, to: kept(x, dims) }, &[x])
}

fn mean_to(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    apply(Sum { mean: true, to: kept(x, dims) }, &[x])
}

/// The shape of `x` with 1 for each of `dims`.
pub(super) fn kept(x: &Tensor, dims: &[usize]) -> Vec<usize> {
    let size = |(dim, &size): (usize, &usize)| if dims.contains(&dim) { 1 } else { size };
    x.dims().iter().enumerate().map(size).collect()
}

/// `reduce` over `dims`, and the result without them.
pub(super) fn without(
    x: &Tensor,
    dims: impl Dims,
    reduce: fn(&Tensor, &[usize]) -> Result<Tensor>,
) -> Result<Tensor> {
    let dims = dims.to_indexes(x.shape(), "reduce")?;
    let rest = x.dims().iter().enumerate().filter(|(dim, _)| !dims.contains(dim));
    let rest: Vec<usize> = rest.map(|(_, &size)| size).collect();
    reduce(x, &dims)?.reshape(rest)
}

struct Sum {
    mean: bool,
    /// The shape of the result: 1 for what is summed over, or nothing, for all.
    to: Vec<usize>,
}

impl Sum {
    fn factor(&self, shape: &Shape) -> f64 {
        let results: usize = self.to.iter().product();
        if self.mean { results as f64 / shape.elem_count() as f64 } else { 1.0 }
    }
}

impl Operator for Sum {
    /// The shape of the input.
    type Saved = Shape;

    fn op(&self) -> Op {
        if self.mean { Op::Mean } else { Op::Sum }
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Shape)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        if self.mean && x.elem_count() == 0 && !self.to.contains(&0) {
            return shape_error(self.op(), "x", x, "at least one element for each mean".into());
        }
        let results: usize = self.to.iter().product();
        let y = match self.mean && results > 0 {
            true => reduce::mean_to(x, &self.to, x.elem_count() / results)?,
            false => reduce::sum_to(x, &self.to, accumulator(x.dtype()))?,
        };
        Ok((kernels::cast(&y, x.dtype())?, x.shape().clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Shape>) -> Result<Vec<Option<Gradient>>> {
        let Some(dtype) = ctx.wants[0] else { return Ok(vec![None]) };
        let gradient = kernels::cast(ctx.gradient, accumulator(dtype))?;
        let gradient = gradient.affine(self.factor(ctx.saved), 0.0)?;
        let spread = kernels::cast(&gradient, dtype)?.broadcast_as(ctx.saved)?;
        Ok(vec![Some(Gradient::shared(spread))])
    }
}
