use candle_core::{DType, Result, Tensor};

use crate::kernels::elementwise::portable::upcast;

pub(super) fn gather(ids: &Tensor, table: &Tensor) -> Result<Tensor> {
    table.index_select(ids, 0)
}

pub(super) fn scatter_add(ids: &Tensor, grad: &Tensor, rows: usize, out: DType) -> Result<Tensor> {
    let grad = upcast(grad)?.contiguous()?;
    let zeros = Tensor::zeros((rows, grad.dim(1)?), grad.dtype(), grad.device())?;
    zeros.index_add(ids, &grad, 0)?.to_dtype(out)
}
