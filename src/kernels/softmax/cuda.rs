//! Softmax on CUDA: one launch of `softmax.cu` for each pass, with a warp for a short row and a block for a long one.
//!
//! Kernels write the dtype of their input or that of the arithmetic. Another dtype takes a second launch, a cast.

use candle_core::{D, DType, Result, Tensor};

use crate::kernels::cuda::{Gpu, Grid, Source, suffix};
use crate::kernels::elementwise::cuda::in_dtype;

static SOURCE: Source = Source { name: "softmax", code: include_str!("softmax.cu") };

/// `name` of the rows of `x`, or of a result and its gradient, contiguous and of one dtype, in `out`.
pub(super) fn rows(
    gpu: &Gpu,
    name: &'static str,
    inputs: &[&Tensor],
    out: DType,
) -> Result<Tensor> {
    let x = inputs[0];
    in_dtype(x.dtype(), out, |out| {
        let y = gpu.empty(x.shape(), out)?;
        let columns = x.dim(D::Minus1)?;
        let rows = x.elem_count() / columns.max(1);
        let (grid, team) = Grid::rows(rows, columns);
        let name = [name, suffix(x.dtype())?, suffix(out)?];
        let mut launch = gpu.launch(&SOURCE, name)?.write_new(&y)?;
        for input in inputs {
            launch = launch.read(input)?;
        }
        // All have `rows` rows of `columns`, and the kernel reaches no others.
        launch.size(rows).size(columns).int(team).run(grid)?;
        Ok(y)
    })
}
