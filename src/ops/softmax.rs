//! Softmax and its logarithm.

use candle_core::shape::Dim;
use candle_core::{Result, Tensor};

use super::check::check_operand;
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::softmax as kernel;

/// `exp(x) / sum(exp(x))` along `dim`.
///
/// # Shapes
///
/// `x` of any shape → the same.
///
/// # Precision
///
/// Exponentials in `F32`. On a CPU their sum is `F32` within a block of elements and `F64` over the blocks; elsewhere it is
/// `F32`. Rounded once to the dtype of `x`, so that 16-bit probabilities sum to 1 however many there are. Under PyTorch's
/// lists, `F32` in and out.
///
/// # Errors
///
/// A dimension that there is not; an `x` of integers.
///
/// # References
///
/// `torch.softmax`.
pub fn softmax<D: Dim>(x: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "softmax")?;
    apply(Softmax { dim, log: false }, &[x])
}

/// `x - ln(sum(exp(x)))` along `dim`.
///
/// # Shapes
///
/// `x` of any shape → the same.
///
/// # Precision
///
/// Under autocast `F32` in and out; outside, computed in `F32` and rounded once to the dtype of
/// `x`. The sum is that of [`softmax`].
///
/// # Errors
///
/// As [`softmax`].
///
/// # References
///
/// `torch.log_softmax`.
pub fn log_softmax<D: Dim>(x: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "log_softmax")?;
    apply(Softmax { dim, log: true }, &[x])
}

struct Softmax {
    dim: usize,
    log: bool,
}

impl Operator for Softmax {
    type Saved = ();
    const KEEPS_OUTPUT: bool = true;

    fn op(&self) -> Op {
        if self.log { Op::LogSoftmax } else { Op::Softmax }
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let kernel = if self.log { kernel::log_softmax } else { kernel::softmax };
        Ok((kernel(x, self.dim, x.dtype())?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let Some(dtype) = ctx.wants[0] else { return Ok(vec![None]) };
        let (y, gradient) = (ctx.kept_output()?, ctx.gradient);
        let dx = match self.log {
            true => kernel::log_softmax_backward(y, gradient, self.dim, dtype)?,
            false => kernel::softmax_backward(y, gradient, self.dim)?,
        };
        Ok(vec![Some(Gradient::owned(dx))])
    }
}
