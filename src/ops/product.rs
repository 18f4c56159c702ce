//! Matrix products.

use candle_core::{DType, Result, Tensor};

use super::{check_dims, check_operand, reads_other_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::kernels;

/// The matrix product of `lhs` and `rhs`.
///
/// # Shapes
///
/// `(…, m, k) × (…, k, n) → (…, m, n)`, leading dimensions equal. Transposed operands are read in
/// place.
///
/// # Precision
///
/// Under autocast both are cast to the compute dtype. Products and sums in `F32`, rounded once to
/// the inputs' dtype, which both must share. Gradients likewise, in the dtypes of the operands as
/// given. Accumulates in `F32` over all of `k`.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor};
///
/// let ones = |shape| Tensor::ones(shape, DType::F16, &Device::Cpu);
/// let sum = ops::matmul(&ones((1, 4096))?, &ones((4096, 1))?)?;
/// assert_eq!(sum.to_dtype(DType::F32)?.to_vec2::<f32>()?, [[4096.0]]); // candle says 2048
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.matmul`, without broadcasting.
pub fn matmul(lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    apply(Matmul, &[lhs, rhs])
}

struct Matmul;

impl Operator for Matmul {
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        Op::Matmul
    }

    fn reads(&self, input: usize, wanted: &[bool]) -> bool {
        reads_other_operand(input, wanted)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (lhs, rhs) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), lhs, "lhs", lhs, false)?;
        check_operand(self.op(), lhs, "rhs", rhs, true)?;
        let fits = || {
            let (batch, [_, k]) = lhs.dims().split_last_chunk::<2>()?;
            let (rhs_batch, [rhs_k, _]) = rhs.dims().split_last_chunk::<2>()?;
            Some(batch == rhs_batch && k == rhs_k)
        };
        if fits() != Some(true) {
            let expected = format!("(…, k, n) to fit lhs, (…, m, k) = {:?}", lhs.shape());
            return shape_error(self.op(), "rhs", rhs, expected);
        }
        let y = kernels::gemm::gemm(lhs, rhs, None, lhs.dtype())?;
        Ok((y, (lhs.clone(), rhs.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (lhs, rhs) = ctx.saved;
        let last = lhs.rank() - 1;
        let dlhs = ctx.wants[0].map(|dtype| {
            let rhs = rhs.transpose(last - 1, last)?;
            kernels::gemm::gemm(ctx.gradient, &rhs, None, dtype).map(Gradient::owned)
        });
        let drhs = ctx.wants[1].map(|dtype| {
            let lhs = lhs.transpose(last - 1, last)?;
            kernels::gemm::gemm(&lhs, ctx.gradient, None, dtype).map(Gradient::owned)
        });
        Ok(vec![dlhs.transpose()?, drhs.transpose()?])
    }
}

/// `x · weightᵀ + bias`.
///
/// # Shapes
///
/// `x (…, k)`, `weight (n, k)`, `bias (n)` → `(…, n)`.
///
/// # Precision
///
/// Under autocast all are cast to the compute dtype. Outside, `x` and `weight` share a dtype;
/// `bias` may have any. Products, sums and the bias are added up in `F32`, rounded once to the
/// dtype of `x`. The gradients of weight and bias are accumulated in `F32` over all rows.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit.
///
/// # References
///
/// `torch.nn.functional.linear`.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    match bias {
        Some(bias) => apply(Linear, &[x, weight, bias]),
        None => apply(Linear, &[x, weight]),
    }
}

struct Linear;

/// `x` with all leading dimensions in one.
pub(super) fn rows(x: &Tensor) -> Result<Tensor> {
    x.reshape(((), x.dim(candle_core::D::Minus1)?))
}

impl Operator for Linear {
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        Op::Linear
    }

    fn reads(&self, input: usize, wanted: &[bool]) -> bool {
        reads_other_operand(input, wanted)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (x, weight, bias) = (&inputs[0], &inputs[1], inputs.get(2));
        let n = outputs(self.op(), x, weight, bias)?;
        let y = kernels::gemm::gemm(&rows(x)?, &weight.t()?, bias, x.dtype())?;
        let mut dims = x.dims().to_vec();
        dims[x.rank() - 1] = n;
        Ok((y.reshape(dims)?, (x.clone(), weight.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (x, weight) = ctx.saved;
        let bias = ctx.wants.get(2).copied().flatten();
        let wants = [ctx.wants[0], ctx.wants[1], bias];
        let gradients = gradients(x, weight, &rows(ctx.gradient)?, wants)?;
        Ok(gradients.into_iter().take(ctx.wants.len()).map(|dx| dx.map(Gradient::owned)).collect())
    }
}

/// How many outputs `x · weightᵀ + bias` has.
pub(super) fn outputs(op: Op, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<usize> {
    check_operand(op, x, "x", x, false)?;
    check_operand(op, x, "weight", weight, true)?;
    let (Some(k), &[n, weight_k]) = (x.dims().last(), weight.dims()) else {
        return shape_error(op, "weight", weight, "(n, k)".into());
    };
    if *k != weight_k {
        let expected = format!("(n, {k}) for x of shape {:?}", x.shape());
        return shape_error(op, "weight", weight, expected);
    }
    if let Some(bias) = bias {
        check_operand(op, x, "bias", bias, false)?;
        check_dims(op, "bias", bias, &[n])?;
    }
    Ok(n)
}

/// The gradients of `x`, `weight` and a bias, from that of the outputs, `(rows, n)`.
pub(super) fn gradients(
    x: &Tensor,
    weight: &Tensor,
    gradient: &Tensor,
    wants: [Option<DType>; 3],
) -> Result<[Option<Tensor>; 3]> {
    let dx = wants[0]
        .map(|dtype| kernels::gemm::gemm(gradient, weight, None, dtype)?.reshape(x.shape()));
    let dweight = wants[1].map(|dtype| kernels::gemm::gemm(&gradient.t()?, &rows(x)?, None, dtype));
    let dbias = wants[2].map(|dtype| kernels::reduce::sum_to_channel(gradient, 1, dtype));
    Ok([dx.transpose()?, dweight.transpose()?, dbias.transpose()?])
}
