//! On CUDA: two launches forward, two backward; of `(n, c)`, whose channels lie side by side, three
//! each.

mod rows;

use candle_core::{DType, Result, Tensor};

use super::{Affine, Finish, Running, Statistics};
use crate::kernels::accumulator;
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, suffix};
use crate::kernels::elementwise::plain;
use crate::kernels::in_dtype;
use crate::kernels::reduce::channels::Channels;

type Gradients = (Tensor, Tensor, Tensor);

static SOURCE: Source = Source {
    name: "batch_norm",
    code: concat!(include_str!("merge.cuh"), include_str!("batch_norm.cu")),
};

/// Blocks that keep any GPU busy. Not those of this one: the order of a sum is one everywhere.
const BLOCKS: usize = 1024;
/// Elements a thread, at least: below, merging parts takes longer than making them.
const GRAIN: usize = 16;

impl<'a> Finish<'a> {
    /// The residual, and what kernels know it by.
    fn parts(self) -> (Option<&'a Tensor>, i32) {
        match self {
            Self::Plain => (None, 0),
            Self::Relu => (None, 1),
            Self::AddRelu(residual) => (Some(residual), 2),
        }
    }
}

/// `x` is contiguous and has elements; so is a residual, of its shape and dtype.
pub(super) fn forward_train(
    gpu: &Gpu,
    x: &Tensor,
    affine: Affine<'_>,
    finish: Finish<'_>,
    eps: f64,
) -> Result<(Tensor, Statistics)> {
    if rows::suits(x) {
        return rows::forward_train(gpu, x, affine, finish, eps);
    }
    let plan = Plan::new(gpu, x);
    let parts = plan.partials(3)?;
    plan.run(plan.kernel("moments")?.read(x)?.write(&parts)?)?;
    let [mean, var, inv_std] = plan.vectors()?;
    let y = gpu.empty(x.dims(), x.dtype())?;
    let (residual, finish) = finish.parts();
    let (weight, bias) = (plan.parameter(affine.weight)?, plan.parameter(affine.bias)?);
    let kernel = plan.kernel("normalise")?.read(x)?.read_or_null(residual)?.write(&y)?;
    let kernel = kernel.read_or_null(weight.as_ref())?.read_or_null(bias.as_ref())?;
    let kernel = kernel.read(&parts)?.write(&mean)?.write(&var)?.write(&inv_std)?;
    plan.run(kernel.int(finish).double(eps))?;
    Ok((y, Statistics { mean, var, inv_std }))
}

pub(super) fn forward_eval(
    gpu: &Gpu,
    x: &Tensor,
    running: Running<'_>,
    affine: Affine<'_>,
) -> Result<Tensor> {
    if rows::suits(x) {
        return rows::forward_eval(gpu, x, running, affine);
    }
    let plan = Plan::new(gpu, x);
    let y = gpu.empty(x.dims(), x.dtype())?;
    let (weight, bias) = (plan.parameter(affine.weight)?, plan.parameter(affine.bias)?);
    let (mean, var) = (plan.wide(running.mean)?, plan.wide(running.var)?);
    let kernel = plan.kernel("normalise")?.read(x)?.read_or_null(None)?.write(&y)?;
    let kernel = kernel.read_or_null(weight.as_ref())?.read_or_null(bias.as_ref())?;
    let kernel = kernel.read_or_null(None)?.read(&mean)?.read(&var)?.write_or_null(None)?;
    plan.run(kernel.int(0).double(running.eps))?;
    Ok(y)
}

/// `x` and `grad` are contiguous, of one shape and dtype, and have elements.
pub(super) fn backward_train(
    gpu: &Gpu,
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
) -> Result<Gradients> {
    let affine = Affine { weight, bias: None };
    backward(gpu, x, grad, NormalisedBy::Batch(statistics), affine, false)
}

/// The same from the gradient of what relu left.
pub(super) fn backward_relu(
    gpu: &Gpu,
    x: &Tensor,
    grad: &Tensor,
    affine: Affine<'_>,
    statistics: &Statistics,
) -> Result<Gradients> {
    backward(gpu, x, grad, NormalisedBy::Batch(statistics), affine, true)
}

pub(super) fn backward_eval(
    gpu: &Gpu,
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    running: Running<'_>,
) -> Result<Gradients> {
    let affine = Affine { weight, bias: None };
    backward(gpu, x, grad, NormalisedBy::Running(running), affine, false)
}

/// The statistics that `x` was normalised by.
#[derive(Clone, Copy)]
enum NormalisedBy<'a> {
    /// Of the batch itself, so that the gradient passes through them.
    Batch(&'a Statistics),
    Running(Running<'a>),
}

impl<'a> NormalisedBy<'a> {
    /// What kernels are given: the mean, the spread (`1 / std` of a batch, else the variance), whether they
    /// are of the batch, and epsilon.
    fn parts(self) -> (&'a Tensor, &'a Tensor, i32, f64) {
        match self {
            Self::Batch(Statistics { mean, inv_std, .. }) => (mean, inv_std, 1, 0.0),
            Self::Running(Running { mean, var, eps }) => (mean, var, 0, eps),
        }
    }
}

/// The gradients of what was normalised `by` statistics; with `relu`, `grad` is that of relu's result.
fn backward(
    gpu: &Gpu,
    x: &Tensor,
    grad: &Tensor,
    by: NormalisedBy<'_>,
    affine: Affine<'_>,
    relu: bool,
) -> Result<Gradients> {
    if rows::suits(x) {
        return rows::backward(gpu, x, grad, by, affine, relu);
    }
    let plan = Plan::new(gpu, x);
    let (mean, spread, train, eps) = by.parts();
    let (mean, spread) = (plan.wide(mean)?, plan.wide(spread)?);
    let parts = plan.partials(2)?;
    let (weight, bias) = (plan.parameter(affine.weight)?, plan.parameter(affine.bias)?);
    let gated = |kernel: Launch| {
        let kernel = kernel.read(&mean)?.read(&spread)?.read_or_null(weight.as_ref())?;
        Ok::<_, candle_core::Error>(kernel.read_or_null(bias.as_ref())?.int(relu.into()))
    };
    let kernel = gated(plan.kernel("gradient_sums")?.read(x)?.read(grad)?)?;
    plan.run(kernel.write(&parts)?)?;
    let dx = gpu.empty(x.dims(), x.dtype())?;
    let [dweight, dbias] = plan.vectors()?;
    let kernel = gated(plan.kernel("input_gradient")?.read(x)?.read(grad)?.write(&dx)?)?;
    let kernel = kernel.read(&parts)?.write(&dweight)?.write(&dbias)?;
    plan.run(kernel.int(train).double(eps))?;
    Ok((dx, dweight, dbias))
}

/// Contiguous vectors of one length and dtype, `F32` or `F64`.
pub(super) fn average(
    gpu: &Gpu,
    [mean, var]: [&Tensor; 2],
    [batch_mean, batch_var]: [&Tensor; 2],
    kept: f64,
    [of_mean, of_var]: [f64; 2],
) -> Result<()> {
    let channels = mean.elem_count();
    let kernel = gpu.launch(&SOURCE, &format!("average_{}", suffix(mean.dtype())?))?;
    let kernel = kernel.write(mean)?.write(var)?.read(batch_mean)?.read(batch_var)?;
    let kernel = kernel.double(kept).double(of_mean).double(of_var).size(channels);
    kernel.run(Grid::over(channels, 1))
}

/// How the elements of a tensor are shared out: so many blocks a channel.
struct Plan<'a> {
    gpu: &'a Gpu,
    layout: Channels,
    parts: usize,
    dtype: DType,
}

impl<'a> Plan<'a> {
    fn new(gpu: &'a Gpu, x: &Tensor) -> Self {
        let layout = Channels::of(x.dims(), 1);
        let most = layout.count() / (Grid::THREADS * GRAIN);
        let parts = BLOCKS.div_ceil(layout.channels).min(most).max(1);
        Self { gpu, layout, parts, dtype: x.dtype() }
    }

    fn kernel(&self, name: &str) -> Result<Launch> {
        self.gpu.launch(&SOURCE, &format!("{name}_{}", suffix(self.dtype)?))
    }

    /// One block a part of a channel. A kernel reads and writes the elements of its part in tensors
    /// of `layout`'s size, the elements of its channel in vectors, and its own of the partials.
    fn run(&self, kernel: Launch) -> Result<()> {
        let Channels { outer, channels, inner } = self.layout;
        let kernel = kernel.sizes(&[outer, channels, inner, self.parts]);
        kernel.run(Grid::flat(channels * self.parts, Grid::THREADS))
    }

    /// `values` of every part of every channel.
    fn partials(&self, values: usize) -> Result<Tensor> {
        let shape = (self.parts, self.layout.channels, values);
        self.gpu.empty(shape, accumulator(self.dtype))
    }

    fn vectors<const N: usize>(&self) -> Result<[Tensor; N]> {
        self.gpu.vectors(self.layout.channels, accumulator(self.dtype))
    }

    fn parameter(&self, parameter: Option<&Tensor>) -> Result<Option<Tensor>> {
        parameter.map(|parameter| self.wide(parameter)).transpose()
    }

    fn wide(&self, vector: &Tensor) -> Result<Tensor> {
        plain(&in_dtype(vector, accumulator(self.dtype))?)
    }
}
