//! Pointwise operators, SwiGLU and PReLU on CUDA: one launch of `activation.cu` each.
//!
//! For a dtype, all operators share one kernel of values and one of derivatives. A launch passes the operator's number
//! and parameters. A derivative may overwrite the gradient, because each thread reads an element before it writes it.
//! The gradient of PReLU's weight takes one launch for its terms, which `reduce` adds up.

use candle_core::{DType, Result, Tensor};

use super::halves::half_dims;
use super::pointwise::Pointwise;
use crate::kernels::accumulator;
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, pack, suffix};

static SOURCE: Source = Source { name: "activation", code: include_str!("activation.cu") };

fn launch(gpu: &Gpu, name: &'static str, dtype: DType) -> Result<Launch> {
    gpu.launch(&SOURCE, [name, suffix(dtype)?])
}

fn over(x: &Tensor, count: usize) -> Grid {
    Grid::over(count, pack(x.dtype(), x.dtype()))
}

pub(super) fn value(gpu: &Gpu, function: Pointwise, x: &Tensor) -> Result<Tensor> {
    let (y, n) = (gpu.empty(x.shape(), x.dtype())?, x.elem_count());
    let (number, [a, b]) = function.number();
    let launch = launch(gpu, "value", x.dtype())?.write_new(&y)?.read(x)?.size(n);
    launch.int(number).double(a).double(b).run(over(x, n))?;
    Ok(y)
}

pub(super) fn derivative(
    gpu: &Gpu,
    function: Pointwise,
    x: &Tensor,
    grad: &Tensor,
) -> Result<Tensor> {
    let dx = gpu.empty(x.shape(), x.dtype())?;
    derivative_over(gpu, function, x, grad, &dx)?;
    Ok(dx)
}

/// [`derivative`] in `dx`, which may be `grad`: each thread reads an element before it writes it.
pub(super) fn derivative_over(
    gpu: &Gpu,
    function: Pointwise,
    x: &Tensor,
    grad: &Tensor,
    dx: &Tensor,
) -> Result<()> {
    let n = x.elem_count();
    let (number, [a, b]) = function.number();
    let launch = launch(gpu, "derivative", x.dtype())?.write(dx)?.read(x)?.read(grad)?.size(n);
    launch.int(number).double(a).double(b).run(over(x, n))
}

pub(super) fn swiglu(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let dims = half_dims(x);
    let (y, width) = (gpu.empty(dims.as_slice(), x.dtype())?, dims[dims.len() - 1]);
    let n = y.elem_count();
    // Element `i < n` of `y` has row `i / width` of `x`, of twice that.
    launch(gpu, "swiglu", x.dtype())?
        .write_new(&y)?
        .read(x)?
        .size(n)
        .size(width)
        .run(over(x, n))?;
    Ok(y)
}

pub(super) fn swiglu_backward(gpu: &Gpu, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (dx, n) = (gpu.empty(x.shape(), x.dtype())?, grad.elem_count());
    let dims = half_dims(x);
    let launch = launch(gpu, "swiglu_backward", x.dtype())?.write_new(&dx)?.read(x)?.read(grad)?;
    launch.size(n).size(dims[dims.len() - 1]).run(over(x, n))?;
    Ok(dx)
}

/// Elements of each channel that follow each other.
fn inner(x: &Tensor) -> usize {
    x.dims().iter().skip(2).product()
}

/// [`super::prelu::prelu`], or its gradient where there is a `grad`; `weight` in the dtype of the
/// arithmetic, one or one per channel.
pub(super) fn prelu(
    gpu: &Gpu,
    x: &Tensor,
    weight: &Tensor,
    grad: Option<&Tensor>,
) -> Result<Tensor> {
    let (y, n) = (gpu.empty(x.shape(), x.dtype())?, x.elem_count());
    let name = if grad.is_some() { "prelu_backward" } else { "prelu" };
    let mut launch = launch(gpu, name, x.dtype())?.write_new(&y)?.read(x)?;
    if let Some(grad) = grad {
        launch = launch.read(grad)?;
    }
    let launch = launch.read(weight)?.size(n).size(weight.elem_count()).size(inner(x));
    launch.run(over(x, n))?;
    Ok(y)
}

/// `min(x, 0) grad`, in the dtype of the arithmetic.
pub(super) fn prelu_terms(gpu: &Gpu, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (y, n) = (gpu.empty(x.shape(), accumulator(x.dtype()))?, x.elem_count());
    let launch = launch(gpu, "prelu_terms", x.dtype())?.write_new(&y)?.read(x)?.read(grad)?;
    launch.size(n).run(over(x, n))?;
    Ok(y)
}
