//! Interpolation on CUDA: one launch of `interpolate.cu` for each pass, with a thread for each pixel that it writes.
//!
//! Both passes gather. In backward, the thread of an input pixel adds up the gradients of the output pixels made of it,
//! weighted if bilinear. So it needs no atomics, and each sum has one order. Threads compute positions from the grid's
//! [`Rule`], so the host's lists of rows and columns are not copied to the GPU.
//!
//! Backward writes the dtype of the gradient or that of the arithmetic. Another dtype takes a second launch, a cast.

use candle_core::{DType, Result, Tensor};

use super::sampling_grid::{Dims4, Rule, SamplingGrid};
use crate::kernels::accumulator;
use crate::kernels::cuda::{self, Gpu, Launch, Source, suffix};
use crate::kernels::in_dtype;

static SOURCE: Source = Source { name: "interpolate", code: include_str!("interpolate.cu") };

/// `x` is contiguous, and as high and wide as `grid` was made for.
pub(super) fn forward(gpu: &Gpu, x: &Tensor, grid: &SamplingGrid) -> Result<Tensor> {
    let (n, c, h, w) = x.dims4()?;
    let (oh, ow) = grid.size();
    let y = gpu.empty((n, c, oh, ow), x.dtype())?;
    let kernel = gpu.launch(&SOURCE, ["forward", suffix(x.dtype())?])?;
    run(kernel.read(x)?.write_new(&y)?, (n, c, h, w), grid, y.elem_count())?;
    Ok(y)
}

/// `grad` is contiguous, and as large as the result of [`forward`] for `dims`.
pub(super) fn backward(
    gpu: &Gpu,
    grad: &Tensor,
    dims: Dims4,
    grid: &SamplingGrid,
    out: DType,
) -> Result<Tensor> {
    let dtype = if out == grad.dtype() { out } else { accumulator(grad.dtype()) };
    let dx = gpu.empty(dims, dtype)?;
    let name = ["backward", suffix(grad.dtype())?, suffix(dtype)?];
    let kernel = gpu.launch(&SOURCE, name)?.read(grad)?.write_new(&dx)?;
    run(kernel, dims, grid, dx.elem_count())?;
    in_dtype(&dx, out)
}

/// A thread for each of `count` elements, which are those of the output, or of the input. It reads
/// its plane on the other side, where places are cut to what is there.
fn run(kernel: Launch, (n, c, h, w): Dims4, grid: &SamplingGrid, count: usize) -> Result<()> {
    let (oh, ow) = grid.size();
    let (Rule { steps: (down, across), centre }, linear) = match *grid {
        SamplingGrid::Nearest { rule, .. } => (rule, 0),
        SamplingGrid::Linear { rule, .. } => (rule, 1),
    };
    let kernel = kernel.sizes(&[n * c, h, w, oh, ow]);
    let kernel = kernel.double(down).double(across).double(centre).int(linear);
    kernel.run(cuda::Grid::over(count, 1))
}
