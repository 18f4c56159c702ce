//! The matrix product out of candle's operators.

use candle_core::{DType, Result, Tensor};

use super::operand::arithmetic;

/// See [`super::gemm`].
pub(super) fn gemm(
    lhs: &Tensor,
    rhs: &Tensor,
    bias: Option<&Tensor>,
    out: DType,
) -> Result<Tensor> {
    let wide = arithmetic([Some(lhs), Some(rhs), bias]);
    let widen = |tensor: &Tensor| tensor.detach().to_dtype(wide)?.contiguous();
    let (lhs, rhs) = (widen(lhs)?, widen(rhs)?);
    let product = if lhs.elem_count() == 0 || rhs.elem_count() == 0 {
        let mut shape = lhs.dims().to_vec();
        shape[lhs.rank() - 1] = rhs.dims()[rhs.rank() - 1];
        Tensor::zeros(shape, wide, lhs.device())?
    } else {
        lhs.matmul(&rhs)?
    };
    let sum = match bias {
        Some(bias) => product.broadcast_add(&widen(bias)?)?,
        None => product,
    };
    sum.to_dtype(out)
}
