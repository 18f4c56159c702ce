//! The kernels of layer norm: a group is a row.

use candle_core::{DType, Result, Tensor};

use crate::error::bail;
use crate::kernels::cuda::Gpu;
use crate::kernels::layer_norm::cuda::{self as norm, RowShape};

fn rows(x: &Tensor, groups: usize) -> Result<RowShape> {
    let (samples, channels) = (x.dim(0)?, x.dim(1)?);
    let inner: usize = x.dims()[2..].iter().product();
    let (count, columns) = (samples * groups, channels / groups * inner);
    if u32::try_from(columns).is_err() {
        bail!("group norm of {columns} elements a group, more than 2^32 - 1")
    }
    Ok(RowShape { count, columns, groups, inner: inner.max(1) })
}

pub(super) fn forward(
    gpu: &Gpu,
    x: &Tensor,
    groups: usize,
    affine: [Option<&Tensor>; 2],
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    norm::forward(gpu, x, rows(x, groups)?, affine, eps, true)
}

pub(super) fn backward(
    gpu: &Gpu,
    tensors: [&Tensor; 3],
    groups: usize,
    weight: Option<&Tensor>,
    wants: [Option<DType>; 3],
) -> Result<[Option<Tensor>; 3]> {
    let x = tensors[0];
    let rows = rows(x, groups)?;
    let dx = wants[0].map(|out| norm::input_gradient(gpu, tensors, rows, weight, true, out, None));
    let sizes = [x.dim(0)?, x.dim(1)?, rows.inner, groups];
    let [dweight, dbias] = norm::group_parameters(gpu, tensors, sizes, [wants[1], wants[2]])?;
    Ok([dx.transpose()?, dweight, dbias])
}
