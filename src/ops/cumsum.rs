//! Cumulative sums.

use candle_core::shape::Dim;
use candle_core::{Result, Tensor};

use super::check::check_operand;
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels::cumsum as kernel;

/// The sums of the elements of `x` up to each one along `dim`.
///
/// # Shapes
///
/// Any of one dimension or more → the same.
///
/// # Precision
///
/// Under autocast `F32` in and out; outside, the dtype of `x`. Added up in `F64`, forward and backward; each sum is rounded
/// to `F32`, except in `F64`, and then to its dtype. On a device other than a CPU or CUDA, `F32` sums of what is not `F64`. An
/// infinity or NaN affects only the sums from its position on. The `cumsum` of candle multiplies by a triangle of ones, which
/// gives NaN before an infinity as well, and takes memory for the square of the length.
///
/// # Errors
///
/// A dimension that there is not.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32, 2.0, f32::INFINITY], [4.0, 5.0, 6.0]], &Device::Cpu)?;
/// let sums = ops::cumsum(&x, 1)?.to_vec2::<f32>()?;
/// assert_eq!(sums, [[1.0, 3.0, f32::INFINITY], [4.0, 9.0, 15.0]]); // candle's `cumsum` starts with NaN
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.cumsum`; `candle_core::Tensor::cumsum`.
pub fn cumsum<D: Dim>(x: &Tensor, dim: D) -> Result<Tensor> {
    let dim = dim.to_index(x.shape(), "cumsum")?;
    apply(Cumsum { dim }, &[x])
}

struct Cumsum {
    dim: usize,
}

impl Operator for Cumsum {
    type Saved = ();

    fn op(&self) -> Op {
        Op::Cumsum
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        Ok((kernel::cumsum(x, self.dim, false, x.dtype())?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let dx = ctx.wants[0].map(|out| kernel::cumsum(ctx.gradient, self.dim, true, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}
