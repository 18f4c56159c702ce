//! Softmax and its logarithm.

use candle_core::shape::Dim;
use candle_core::{Result, Tensor};

use super::check_operand;
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::softmax as kernel;

/// `exp(x) / sum(exp(x))` along `dim`.
///
/// # Precision
///
/// Exponentials and sum in `F32`, rounded once to the dtype of `x`, so that 16-bit probabilities sum
/// to 1 however many there are. Under PyTorch's lists, `F32` in and out.
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
/// # Precision
///
/// Under autocast `F32` in and out; outside, computed in `F32` and rounded once to the dtype of
/// `x`.
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

impl Softmax {
    /// Runs a kernel over the last dimension on `dim`.
    fn along(
        &self,
        tensors: &[&Tensor],
        kernel: impl Fn(&[Tensor]) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let last = tensors[0].rank() - 1;
        let turned =
            tensors.iter().map(|t| t.transpose(self.dim, last)).collect::<Result<Vec<_>>>()?;
        kernel(&turned)?.transpose(self.dim, last)?.contiguous()
    }
}

impl Operator for Softmax {
    type Saved = ();
    const KEEPS_OUTPUT: bool = true;

    fn op(&self) -> Op {
        if self.log { Op::LogSoftmax } else { Op::Softmax }
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let kernel = if self.log { kernel::log_softmax } else { kernel::softmax };
        Ok((self.along(&[x], |t| kernel(&t[0], x.dtype()))?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let Some(dtype) = ctx.wants[0] else { return Ok(vec![None]) };
        let dx = self.along(&[ctx.kept_output()?, ctx.gradient], |t| match self.log {
            true => kernel::log_softmax_backward(&t[0], &t[1], dtype),
            false => kernel::softmax_backward(&t[0], &t[1]),
        })?;
        Ok(vec![Some(Gradient::owned(dx))])
    }
}
