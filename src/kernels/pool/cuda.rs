//! On CUDA: one launch each.

use candle_core::{DType, Result, Tensor};

use super::Window;
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, suffix};
use crate::kernels::elementwise::portable::arithmetic;
use crate::kernels::in_dtype;

type Dims = (usize, usize, usize, usize);

static SOURCE: Source = Source { name: "pool", code: include_str!("pool.cu") };

pub(super) fn max_forward(gpu: &Gpu, x: &Tensor, window: Window) -> Result<(Tensor, Tensor)> {
    let dims = x.dims4()?;
    let (n, c, h, w) = dims;
    let (oh, ow) = window.out_size((h, w));
    let y = gpu.empty((n, c, oh, ow), x.dtype())?;
    let index = gpu.empty((n, c, oh, ow), DType::U32)?;
    let kernel = gpu.launch(&SOURCE, &format!("max_forward_{}", suffix(x.dtype())?))?;
    run(kernel.read(x)?.write(&y)?.write(&index)?, dims, window, n * c * oh * ow)?;
    Ok((y, index))
}

/// `grad` and `index` are contiguous, and as large as [`max_forward`]'s results for `dims`.
pub(super) fn max_backward(
    gpu: &Gpu,
    grad: &Tensor,
    index: &Tensor,
    dims: Dims,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    let dx = gradient(gpu, grad, dims, out)?;
    let kernel = launch(gpu, "max_backward", grad, &dx)?.read(grad)?.read(index)?.write(&dx)?;
    run(kernel, dims, window, dx.elem_count())?;
    in_dtype(&dx, out)
}

pub(super) fn avg_forward(gpu: &Gpu, x: &Tensor, window: Window) -> Result<Tensor> {
    let dims = x.dims4()?;
    let (n, c, h, w) = dims;
    let (oh, ow) = window.out_size((h, w));
    let y = gpu.empty((n, c, oh, ow), x.dtype())?;
    let kernel = gpu.launch(&SOURCE, &format!("avg_forward_{}", suffix(x.dtype())?))?;
    run(kernel.read(x)?.write(&y)?, dims, window, y.elem_count())?;
    Ok(y)
}

/// `grad` is contiguous, and as large as [`avg_forward`]'s result for `dims`.
pub(super) fn avg_backward(
    gpu: &Gpu,
    grad: &Tensor,
    dims: Dims,
    window: Window,
    out: DType,
) -> Result<Tensor> {
    let dx = gradient(gpu, grad, dims, out)?;
    let kernel = launch(gpu, "avg_backward", grad, &dx)?.read(grad)?.write(&dx)?;
    run(kernel, dims, window, dx.elem_count())?;
    in_dtype(&dx, out)
}

pub(super) fn global_avg_forward(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let (n, c, h, w) = x.dims4()?;
    let y = gpu.empty((n, c), x.dtype())?;
    let kernel = gpu.launch(&SOURCE, &format!("global_avg_forward_{}", suffix(x.dtype())?))?;
    kernel.read(x)?.write(&y)?.size(h * w).run(planes(n * c, h * w))?;
    Ok(y)
}

/// `grad` is contiguous and has an element for every plane of `dims`.
pub(super) fn global_avg_backward(
    gpu: &Gpu,
    grad: &Tensor,
    dims: Dims,
    out: DType,
) -> Result<Tensor> {
    let (n, c, h, w) = dims;
    let dx = gradient(gpu, grad, dims, out)?;
    let kernel = launch(gpu, "global_avg_backward", grad, &dx)?.read(grad)?.write(&dx)?;
    kernel.size(h * w).run(planes(n * c, h * w))?;
    in_dtype(&dx, out)
}

/// In `out`, or where no kernel writes that, in the dtype of the arithmetic, to be rounded after.
fn gradient(gpu: &Gpu, grad: &Tensor, dims: Dims, out: DType) -> Result<Tensor> {
    let dtype = if out == grad.dtype() { out } else { arithmetic(grad.dtype()) };
    gpu.empty(dims, dtype)
}

fn launch(gpu: &Gpu, name: &str, grad: &Tensor, dx: &Tensor) -> Result<Launch> {
    let name = format!("{name}_{}_{}", suffix(grad.dtype())?, suffix(dx.dtype())?);
    gpu.launch(&SOURCE, &name)
}

/// A thread for each of `count` elements, which are those of the output, or of the input. It reads
/// the elements of its plane on the other side: windows and padding are cut to what is there.
fn run(kernel: Launch, (n, c, h, w): Dims, window: Window, count: usize) -> Result<()> {
    let (oh, ow) = window.out_size((h, w));
    let Window { kernel: (kh, kw), stride: (sh, sw), padding: (ph, pw), .. } = window;
    let sizes = [n * c, h, w, oh, ow, kh, kw, sh, sw, ph, pw];
    kernel.sizes(&sizes).run(Grid::over(count, 1))
}

/// A block for every plane, of as many threads as keep busy.
fn planes(count: usize, area: usize) -> Grid {
    let threads = (area / 8).next_power_of_two().clamp(32, 512);
    Grid::flat(count, threads)
}
