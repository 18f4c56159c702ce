//! Batch norm on CUDA. In training, two launches forward and two backward; [`rows`] takes `(rows, channels)` in three
//! each.
//!
//! Each channel is cut into parts, one block each; their number depends on the shape alone. Forward, the first launch
//! computes the moments of each part, about the channel's first element, so that a large mean costs no digits. In the
//! second, each warp merges the parts of its channel in F64 before it normalises, which saves a launch.
//!
//! Backward is alike: sums of the parts, then `dx`, `dweight` and `dbias`. It computes a fused rectifier's result again from
//! `x`, so that no gradient between the two is written.

mod arguments;
mod rows;

use candle_core::{DType, Error, Result, Tensor};

use super::affine::{Affine, Finish, Gradients, Rectifier};
use super::statistics::{Running, Statistics};
use crate::kernels::accumulator;
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, suffix};
use crate::kernels::elementwise::plain;
use crate::kernels::in_dtype;
use crate::kernels::reduce::channels::Channels;
use arguments::{NormalisedBy, PARTS};

static SOURCE: Source = Source {
    name: "batch_norm",
    code: concat!(include_str!("../merge.cuh"), include_str!("../batch_norm.cu")),
};

/// Enough blocks for any GPU. A constant, so that sums have the same order on every GPU.
const BLOCKS: usize = 1024;
/// Elements a thread, at least: below, merging parts takes longer than making them.
const GRAIN: usize = 16;

/// `x` is contiguous, of this layout, and has elements; so has a residual, of its shape and dtype.
pub(super) fn forward_train(
    gpu: &Gpu,
    x: &Tensor,
    layout: Channels,
    affine: Affine<'_>,
    finish: Finish<'_>,
    eps: f64,
) -> Result<(Tensor, Statistics)> {
    if rows::suits(layout) {
        return rows::forward_train(gpu, x, layout, affine, finish, eps);
    }
    let blocks = ChannelBlocks::new(gpu, x, layout);
    let parts = blocks.partials(3)?;
    blocks.run(blocks.kernel("moments")?.read(x)?.write_new(&parts)?)?;
    let statistics = blocks.statistics()?;
    let y = gpu.empty(x.shape(), x.dtype())?;
    let (residual, finish) = finish.parts();
    let (weight, bias) = (blocks.parameter(affine.weight)?, blocks.parameter(affine.bias)?);
    let kernel = blocks.kernel("normalise")?.read(x)?.read_or_null(residual)?.write_new(&y)?;
    let kernel = kernel.read_or_null(weight.as_ref())?.read_or_null(bias.as_ref())?;
    let kernel = statistics.written(kernel.read(&parts)?)?;
    blocks.run(kernel.int(finish).double(eps))?;
    Ok((y, statistics))
}

pub(super) fn forward_eval(
    gpu: &Gpu,
    x: &Tensor,
    layout: Channels,
    running: Running<'_>,
    affine: Affine<'_>,
) -> Result<Tensor> {
    if rows::suits(layout) {
        return rows::forward_eval(gpu, x, layout, running, affine);
    }
    let blocks = ChannelBlocks::new(gpu, x, layout);
    let y = gpu.empty(x.shape(), x.dtype())?;
    let (weight, bias) = (blocks.parameter(affine.weight)?, blocks.parameter(affine.bias)?);
    let (mean, var) = (blocks.wide(running.mean)?, blocks.wide(running.var)?);
    let kernel = blocks.kernel("normalise")?.read(x)?.read_or_null(None)?.write_new(&y)?;
    let kernel = kernel.read_or_null(weight.as_ref())?.read_or_null(bias.as_ref())?;
    let kernel = kernel.read_or_null(None)?.read(&mean)?.read(&var)?.write_or_null(None)?;
    blocks.run(kernel.int(0).double(running.eps))?;
    Ok(y)
}

/// `x` and `grad` are contiguous, of one shape and dtype, and have elements. With a rectifier, `grad` is the
/// gradient of what that left.
pub(super) fn backward(
    gpu: &Gpu,
    tensors: [&Tensor; 2],
    layout: Channels,
    statistics: &Statistics,
    affine: Affine<'_>,
    rectifier: Option<Rectifier>,
) -> Result<Gradients> {
    gradients(gpu, tensors, layout, NormalisedBy::Batch(statistics), affine, rectifier)
}

pub(super) fn backward_eval(
    gpu: &Gpu,
    tensors: [&Tensor; 2],
    layout: Channels,
    weight: Option<&Tensor>,
    running: Running<'_>,
) -> Result<Gradients> {
    let wide = accumulator(tensors[0].dtype());
    let near = |vector: &Tensor| plain(&in_dtype(vector, wide)?);
    let (mean, var) = (&near(running.mean)?, &near(running.var)?);
    let by = NormalisedBy::Running(Running { mean, var, ..running });
    let affine = Affine { weight, bias: None };
    gradients(gpu, tensors, layout, by, affine, None)
}

/// The gradients of what was normalised `by` statistics; with a rectifier, `grad` is that of its result.
fn gradients(
    gpu: &Gpu,
    [x, grad]: [&Tensor; 2],
    layout: Channels,
    by: NormalisedBy<'_>,
    affine: Affine<'_>,
    rectifier: Option<Rectifier>,
) -> Result<Gradients> {
    if rows::suits(layout) {
        return rows::gradients(gpu, [x, grad], layout, by, affine, rectifier);
    }
    let blocks = ChannelBlocks::new(gpu, x, layout);
    let (train, eps) = by.settings();
    let parts = blocks.partials(2)?;
    let (weight, bias) = (blocks.parameter(affine.weight)?, blocks.parameter(affine.bias)?);
    let gated = |kernel: Launch| {
        let kernel = by.read(kernel)?.read_or_null(weight.as_ref())?;
        Ok::<_, Error>(
            kernel.read_or_null(bias.as_ref())?.int(rectifier.map_or(0, Rectifier::code)),
        )
    };
    let kernel = gated(blocks.kernel("gradient_sums")?.read(x)?.read(grad)?)?;
    blocks.run(kernel.write_new(&parts)?)?;
    let dx = gpu.empty(x.shape(), x.dtype())?;
    let [dweight, dbias] = blocks.vectors()?;
    let kernel = gated(blocks.kernel("input_gradient")?.read(x)?.read(grad)?.write_new(&dx)?)?;
    let kernel = kernel.read(&parts)?.write_new(&dweight)?.write_new(&dbias)?;
    blocks.run(kernel.int(train).double(eps))?;
    Ok((dx, dweight, dbias))
}

/// Contiguous vectors of one length and dtype.
pub(super) fn average(
    gpu: &Gpu,
    [mean, var]: [&Tensor; 2],
    Statistics(batch): &Statistics,
    kept: f64,
    [of_mean, of_var]: [f64; 2],
) -> Result<()> {
    let channels = mean.elem_count();
    let kernel = gpu.launch(&SOURCE, ["average", suffix(mean.dtype())?])?;
    let kernel = kernel.write(mean)?.write(var)?;
    let kernel = kernel.parts(batch, 3, [Statistics::MEAN, Statistics::VAR])?;
    let kernel = kernel.double(kept).double(of_mean).double(of_var).size(channels);
    kernel.run(Grid::over(channels, 1))
}

/// How the elements of a tensor are shared out: so many blocks per channel.
struct ChannelBlocks<'a> {
    gpu: &'a Gpu,
    layout: Channels,
    parts: usize,
    dtype: DType,
}

impl<'a> ChannelBlocks<'a> {
    fn new(gpu: &'a Gpu, x: &Tensor, layout: Channels) -> Self {
        let most = layout.count() / (Grid::THREADS * GRAIN);
        let parts = BLOCKS.div_ceil(layout.channels).min(most).max(1);
        Self { gpu, layout, parts, dtype: x.dtype() }
    }

    fn kernel(&self, name: &'static str) -> Result<Launch> {
        self.gpu.launch(&SOURCE, [name, suffix(self.dtype)?])
    }

    /// One block per part of a channel. A kernel reads and writes the elements of its part in tensors
    /// of `layout`'s size, the elements of its channel in vectors, and its own of the partials.
    fn run(&self, kernel: Launch) -> Result<()> {
        let Channels { outer, channels, inner } = self.layout;
        let kernel = kernel.sizes(&[outer, channels, inner, self.parts]);
        kernel.run(Grid::flat(channels * self.parts, Grid::THREADS))
    }

    /// `values` of every part of every channel, until the next call.
    fn partials(&self, values: usize) -> Result<Tensor> {
        let len = self.parts * self.layout.channels * values;
        self.gpu.scratch_from(PARTS, len, accumulator(self.dtype))
    }

    fn vectors<const N: usize>(&self) -> Result<[Tensor; N]> {
        self.gpu.vectors(self.layout.channels, accumulator(self.dtype))
    }

    fn statistics(&self) -> Result<Statistics> {
        self.gpu.empty(3 * self.layout.channels, accumulator(self.dtype)).map(Statistics)
    }

    fn parameter(&self, parameter: Option<&Tensor>) -> Result<Option<Tensor>> {
        parameter.map(|parameter| self.wide(parameter)).transpose()
    }

    fn wide(&self, vector: &Tensor) -> Result<Tensor> {
        plain(&in_dtype(vector, accumulator(self.dtype))?)
    }
}
