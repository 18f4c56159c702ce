//! Sums.

use candle_core::{Result, Shape, Tensor};

use super::{arithmetic, check_operand, shape_error};
use crate::Op;
use crate::kernels::{self, reduce};
use crate::operator::{Backward, Gradient, Operator, apply};

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
    apply(Sum { mean: false }, &[x])
}

/// The mean of all elements.
///
/// # Shapes
///
/// Any, with at least one element → `()`.
///
/// # Precision
///
/// As [`sum`]. PyTorch leaves the mean of half inputs in half, even under autocast.
///
/// # References
///
/// `torch.mean`.
pub fn mean(x: &Tensor) -> Result<Tensor> {
    apply(Sum { mean: true }, &[x])
}

struct Sum {
    mean: bool,
}

impl Sum {
    fn factor(&self, shape: &Shape) -> f64 {
        if self.mean { 1.0 / shape.elem_count() as f64 } else { 1.0 }
    }
}

impl Operator for Sum {
    /// The shape of the input.
    type Saved = Shape;

    fn op(&self) -> Op {
        if self.mean { Op::Mean } else { Op::Sum }
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Shape)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        if self.mean && x.elem_count() == 0 {
            return shape_error(self.op(), "x", x, "at least one element".into());
        }
        let sum = reduce::sum_all(x, arithmetic(x.dtype()))?;
        let sum = if self.mean { sum.affine(self.factor(x.shape()), 0.0)? } else { sum };
        Ok((kernels::cast(&sum, x.dtype())?, x.shape().clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Shape>) -> Result<Vec<Option<Gradient>>> {
        let Some(dtype) = ctx.wants[0] else { return Ok(vec![None]) };
        let gradient = kernels::cast(ctx.gradient, arithmetic(dtype))?;
        let gradient = gradient.affine(self.factor(ctx.saved), 0.0)?;
        let spread = kernels::cast(&gradient, dtype)?.broadcast_as(ctx.saved)?;
        Ok(vec![Some(Gradient::shared(spread))])
    }
}
