//! On CUDA: one launch each.

use candle_core::{DType, Result, Tensor};

use super::{Grid, Rule};
use crate::kernels::cuda::{self, Gpu, Launch, Source};
use crate::kernels::elementwise::portable::arithmetic;

static SOURCE: Source = Source { name: "resample", code: include_str!("resample.cu") };

type Dims = (usize, usize, usize, usize);

/// `x` is contiguous, and as high and wide as `grid` was made for.
pub(super) fn forward(gpu: &Gpu, x: &Tensor, grid: &Grid) -> Result<Tensor> {
    let (n, c, h, w) = x.dims4()?;
    let (oh, ow) = grid.size();
    let y = gpu.empty((n, c, oh, ow), x.dtype())?;
    let kernel = gpu.launch(&SOURCE, &format!("forward_{}", x.dtype().as_str()))?;
    run(kernel.read(x)?.write(&y)?, (n, c, h, w), grid, y.elem_count())?;
    Ok(y)
}

/// `grad` is contiguous, and as large as the result of [`forward`] for `dims`.
pub(super) fn backward(
    gpu: &Gpu,
    grad: &Tensor,
    dims: Dims,
    grid: &Grid,
    out: DType,
) -> Result<Tensor> {
    let dtype = if out == grad.dtype() { out } else { arithmetic(grad.dtype()) };
    let dx = gpu.empty(dims, dtype)?;
    let name = format!("backward_{}_{}", grad.dtype().as_str(), dtype.as_str());
    let kernel = gpu.launch(&SOURCE, &name)?.read(grad)?.write(&dx)?;
    run(kernel, dims, grid, dx.elem_count())?;
    dx.to_dtype(out)
}

/// A thread for each of `count` elements, which are those of the output, or of the input. It reads
/// its plane on the other side, where places are cut to what is there.
fn run(kernel: Launch, (n, c, h, w): Dims, grid: &Grid, count: usize) -> Result<()> {
    const THREADS: usize = 256;
    let (oh, ow) = grid.size();
    let (Rule { steps: (down, across), centre }, linear) = match *grid {
        Grid::Nearest { rule, .. } => (rule, 0),
        Grid::Linear { rule, .. } => (rule, 1),
    };
    let kernel = [n * c, h, w, oh, ow].into_iter().fold(kernel, Launch::size);
    let kernel = kernel.double(down).double(across).double(centre).int(linear);
    let blocks = count.div_ceil(THREADS).min(i32::MAX as usize);
    kernel.run(cuda::Grid { blocks: [blocks, 1, 1], threads: THREADS, shared: 0 })
}
