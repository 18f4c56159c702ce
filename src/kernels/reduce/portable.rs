use candle_core::{DType, Result, Tensor};

use crate::kernels::elementwise::portable::upcast;

pub(super) fn sum_all(x: &Tensor, out: DType) -> Result<Tensor> {
    upcast(x)?.sum_all()?.to_dtype(out)
}

pub(super) fn sum_to_channel(x: &Tensor, dim: usize, out: DType) -> Result<Tensor> {
    let rows = upcast(x)?.transpose(0, dim)?.reshape((x.dim(dim)?, ()))?;
    rows.sum(1)?.to_dtype(out)
}
