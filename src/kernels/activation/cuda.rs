//! One launch each: a thread's elements are those of its number, before the `n`-th.

use candle_core::{DType, Result, Tensor};

use super::{Curve, half_dims};
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, pack, suffix};
use crate::kernels::elementwise::portable::arithmetic;

static SOURCE: Source = Source { name: "activation", code: include_str!("activation.cu") };

/// The number of a curve in the source, and its parameters.
fn number(curve: Curve) -> (i32, f64, f64) {
    match curve {
        Curve::Gelu => (0, 0.0, 0.0),
        Curve::GeluErf => (1, 0.0, 0.0),
        Curve::Silu => (2, 0.0, 0.0),
        Curve::Sigmoid => (3, 0.0, 0.0),
        Curve::Tanh => (4, 0.0, 0.0),
        Curve::Relu6 => (5, 0.0, 0.0),
        Curve::Relu2 => (6, 0.0, 0.0),
        Curve::HardSigmoid => (7, 0.0, 0.0),
        Curve::HardSwish => (8, 0.0, 0.0),
        Curve::Mish => (9, 0.0, 0.0),
        Curve::Elu { alpha, scale } => (10, alpha, scale),
        Curve::LeakyRelu { slope } => (11, slope, 0.0),
        Curve::Softplus => (12, 0.0, 0.0),
        Curve::Exp => (13, 0.0, 0.0),
        Curve::Log => (14, 0.0, 0.0),
    }
}

fn launch(gpu: &Gpu, name: &str, dtype: DType) -> Result<Launch> {
    gpu.launch(&SOURCE, &format!("{name}_{}", suffix(dtype)?))
}

fn over(x: &Tensor, count: usize) -> Grid {
    Grid::over(count, pack(x.dtype(), x.dtype()))
}

pub(super) fn value(gpu: &Gpu, curve: Curve, x: &Tensor) -> Result<Tensor> {
    let (y, n) = (gpu.empty(x.shape(), x.dtype())?, x.elem_count());
    let (curve, alpha, scale) = number(curve);
    let launch = launch(gpu, "value", x.dtype())?.write(&y)?.read(x)?.size(n);
    launch.int(curve).double(alpha).double(scale).run(over(x, n))?;
    Ok(y)
}

pub(super) fn slope(gpu: &Gpu, curve: Curve, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let dx = gpu.empty(x.shape(), x.dtype())?;
    slope_over(gpu, curve, x, grad, &dx)?;
    Ok(dx)
}

/// [`slope`] in `dx`, which may be `grad`: each thread reads an element before it writes it.
pub(super) fn slope_over(
    gpu: &Gpu,
    curve: Curve,
    x: &Tensor,
    grad: &Tensor,
    dx: &Tensor,
) -> Result<()> {
    let n = x.elem_count();
    let (curve, alpha, scale) = number(curve);
    let launch = launch(gpu, "slope", x.dtype())?.write(dx)?.read(x)?.read(grad)?.size(n);
    launch.int(curve).double(alpha).double(scale).run(over(x, n))
}

pub(super) fn swiglu(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let dims = half_dims(x);
    let (y, width) = (gpu.empty(dims.as_slice(), x.dtype())?, dims[dims.len() - 1]);
    let n = y.elem_count();
    // Element `i < n` of `y` has row `i / width` of `x`, of twice that.
    launch(gpu, "swiglu", x.dtype())?.write(&y)?.read(x)?.size(n).size(width).run(over(x, n))?;
    Ok(y)
}

pub(super) fn swiglu_backward(gpu: &Gpu, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (dx, n) = (gpu.empty(x.shape(), x.dtype())?, grad.elem_count());
    let dims = half_dims(x);
    let launch = launch(gpu, "swiglu_backward", x.dtype())?.write(&dx)?.read(x)?.read(grad)?;
    launch.size(n).size(dims[dims.len() - 1]).run(over(x, n))?;
    Ok(dx)
}

/// Elements of each channel that follow each other.
fn inner(x: &Tensor) -> usize {
    x.dims().iter().skip(2).product()
}

/// [`super::prelu::prelu`], or its gradient where there is a `grad`; `weight` in the dtype of the
/// arithmetic, one or one a channel.
pub(super) fn prelu(
    gpu: &Gpu,
    x: &Tensor,
    weight: &Tensor,
    grad: Option<&Tensor>,
) -> Result<Tensor> {
    let (y, n) = (gpu.empty(x.shape(), x.dtype())?, x.elem_count());
    let name = if grad.is_some() { "prelu_backward" } else { "prelu" };
    let mut launch = launch(gpu, name, x.dtype())?.write(&y)?.read(x)?;
    if let Some(grad) = grad {
        launch = launch.read(grad)?;
    }
    let launch = launch.read(weight)?.size(n).size(weight.elem_count()).size(inner(x));
    launch.run(over(x, n))?;
    Ok(y)
}

/// `min(x, 0) grad`, in the dtype of the arithmetic.
pub(super) fn prelu_terms(gpu: &Gpu, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (y, n) = (gpu.empty(x.shape(), arithmetic(x.dtype()))?, x.elem_count());
    let launch = launch(gpu, "prelu_terms", x.dtype())?.write(&y)?.read(x)?.read(grad)?;
    launch.size(n).run(over(x, n))?;
    Ok(y)
}
