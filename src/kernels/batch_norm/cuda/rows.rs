//! Batch norm of `(rows, channels)`: inputs `(n, c)` and channels-last images.
//!
//! Neighbours in memory are different channels, so a block per channel would read a few bytes of each row. Instead, a
//! thread has the same few channels in every row of its part, and a warp reads neighbouring channels.
//!
//! A block therefore has many channels. Merging their parts is a launch of its own, with one warp per channel.
//! Backward, that launch also computes three factors per channel, so that `dx` takes two multiply-adds per element.

use candle_core::{DType, Error, Result, Tensor};

use super::arguments::{FACTORS, NormalisedBy, PARTS};
use crate::kernels::accumulator;
use crate::kernels::batch_norm::affine::{Affine, Finish, Gradients, Rectifier};
use crate::kernels::batch_norm::statistics::{Running, Statistics};
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, suffix};
use crate::kernels::elementwise::plain;
use crate::kernels::in_dtype;
use crate::kernels::reduce::channels::Channels;
use crate::kernels::reduce::cuda::Tiling;

static SOURCE: Source = Source {
    name: "batch_norm_rows",
    code: concat!(include_str!("../merge.cuh"), include_str!("../batch_norm_rows.cu")),
};

/// Whether an element's neighbours are of other channels.
pub(super) fn suits(layout: Channels) -> bool {
    layout.inner == 1
}

pub(super) fn forward_train(
    gpu: &Gpu,
    x: &Tensor,
    layout: Channels,
    affine: Affine<'_>,
    finish: Finish<'_>,
    eps: f64,
) -> Result<(Tensor, Statistics)> {
    let blocks = RowBlocks::new(gpu, x, layout);
    let tiling = blocks.tiling(&[x])?;
    let parts = gpu.scratch_from(PARTS, tiling.parts * blocks.channels * 3, blocks.wide)?;
    blocks.run(blocks.kernel("row_moments")?.read(x)?.write_new(&parts)?, tiling)?;
    let statistics = Statistics(gpu.empty(3 * blocks.channels, blocks.wide)?);
    let kernel = blocks.kernel("merge_moments")?.read(x)?.read(&parts)?;
    let kernel = statistics.written(kernel)?.double(eps);
    blocks.merge(kernel, &[blocks.channels, tiling.parts])?;
    let (residual, code) = finish.parts();
    let by = NormalisedBy::Batch(&statistics);
    let y = blocks.normalise(x, residual, affine, by, code)?;
    Ok((y, statistics))
}

pub(super) fn forward_eval(
    gpu: &Gpu,
    x: &Tensor,
    layout: Channels,
    running: Running<'_>,
    affine: Affine<'_>,
) -> Result<Tensor> {
    let blocks = RowBlocks::new(gpu, x, layout);
    let (mean, var) = (&blocks.widened(running.mean)?, &blocks.widened(running.var)?);
    let by = NormalisedBy::Running(Running { mean, var, ..running });
    blocks.normalise(x, None, affine, by, 0)
}

pub(super) fn gradients(
    gpu: &Gpu,
    [x, grad]: [&Tensor; 2],
    layout: Channels,
    by: NormalisedBy<'_>,
    affine: Affine<'_>,
    rectifier: Option<Rectifier>,
) -> Result<Gradients> {
    let blocks = RowBlocks::new(gpu, x, layout);
    let (train, eps) = by.settings();
    let (weight, bias) = (blocks.parameter(affine.weight)?, blocks.parameter(affine.bias)?);
    let gated = |kernel: Launch| {
        let kernel = by.read(kernel)?.read_or_null(weight.as_ref())?;
        Ok::<_, Error>(
            kernel.read_or_null(bias.as_ref())?.int(rectifier.map_or(0, Rectifier::code)),
        )
    };
    let tiling = blocks.tiling(&[x, grad])?;
    let sums = gpu.scratch_from(PARTS, tiling.parts * 2 * blocks.channels, DType::F64)?;
    let kernel = blocks.kernel("row_gradient_sums")?.write_new(&sums)?.read(x)?.read(grad)?;
    blocks.run(gated(kernel)?, tiling)?;
    let [dweight, dbias] = blocks.vectors()?;
    let factors = gpu.scratch_from(FACTORS, 3 * blocks.channels, blocks.wide)?;
    let kernel = blocks.kernel("merge_gradients")?.read(&sums)?.read_or_null(weight.as_ref())?;
    let kernel = by.read_spread(kernel)?;
    let kernel = kernel.write_new(&dweight)?.write_new(&dbias)?.write_new(&factors)?;
    let sizes = [blocks.rows, blocks.channels, tiling.parts];
    blocks.merge(kernel.int(train).double(eps), &sizes)?;
    let dx = gpu.empty(x.shape(), x.dtype())?;
    let tiling = blocks.tiling(&[x, grad, &dx])?;
    let kernel = blocks.kernel("row_input_gradient")?.read(x)?.read(grad)?.write_new(&dx)?;
    blocks.run(gated(kernel)?.read(&factors)?.int(train), tiling)?;
    Ok((dx, dweight, dbias))
}

struct RowBlocks<'a> {
    gpu: &'a Gpu,
    rows: usize,
    channels: usize,
    dtype: DType,
    /// That of the arithmetic.
    wide: DType,
}

impl<'a> RowBlocks<'a> {
    fn new(gpu: &'a Gpu, x: &Tensor, layout: Channels) -> Self {
        let Channels { outer: rows, channels, .. } = layout;
        Self { gpu, rows, channels, dtype: x.dtype(), wide: accumulator(x.dtype()) }
    }

    fn tiling(&self, tensors: &[&Tensor]) -> Result<Tiling> {
        Tiling::over(tensors, self.rows, self.channels)
    }

    fn kernel(&self, name: &'static str) -> Result<Launch> {
        self.gpu.launch(&SOURCE, [name, suffix(self.dtype)?])
    }

    /// Block `p * tiles + t` has the rows of part `p` and the columns of tile `t`. It reads and writes
    /// those, its channels of vectors, and its part of partial sums.
    fn run(&self, kernel: Launch, tiling: Tiling) -> Result<()> {
        let kernel = kernel.sizes(&[self.rows, self.channels, tiling.parts, tiling.tiles]);
        kernel.int(tiling.packed.into()).run(tiling.grid())
    }

    /// A warp reads all parts of a channel, and writes its element of vectors.
    fn merge(&self, kernel: Launch, sizes: &[usize]) -> Result<()> {
        kernel.sizes(sizes).run(Grid::flat(self.channels.div_ceil(8), 256))
    }

    fn normalise(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
        affine: Affine<'_>,
        by: NormalisedBy<'_>,
        finish: i32,
    ) -> Result<Tensor> {
        let y = self.gpu.empty(x.shape(), x.dtype())?;
        let (weight, bias) = (self.parameter(affine.weight)?, self.parameter(affine.bias)?);
        let tiling = match residual {
            Some(residual) => self.tiling(&[x, &y, residual])?,
            None => self.tiling(&[x, &y])?,
        };
        let kernel =
            self.kernel("normalise_rows")?.read(x)?.read_or_null(residual)?.write_new(&y)?;
        let kernel = kernel.read_or_null(weight.as_ref())?.read_or_null(bias.as_ref())?;
        let (kernel, (train, eps)) = (by.read(kernel)?, by.settings());
        self.run(kernel.int(finish).int(train).double(eps), tiling)?;
        Ok(y)
    }

    fn vectors<const N: usize>(&self) -> Result<[Tensor; N]> {
        self.gpu.vectors(self.channels, self.wide)
    }

    fn parameter(&self, parameter: Option<&Tensor>) -> Result<Option<Tensor>> {
        parameter.map(|parameter| self.widened(parameter)).transpose()
    }

    fn widened(&self, vector: &Tensor) -> Result<Tensor> {
        plain(&in_dtype(vector, self.wide)?)
    }
}
