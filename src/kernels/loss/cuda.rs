//! Losses on CUDA: at most two launches forward and one backward, beside casts. Nothing is copied to the host.
//!
//! Forward, the first launch writes F64 terms to scratch: one for each row of a class loss, or for each block of a
//! pairwise loss. The second, of one block, adds them up and writes the mean, rounded once. Without a reduction, a
//! pairwise loss is one launch. Cross entropy reads the logits once and keeps two numbers per row, its log-sum-exp in
//! two parts. Backward recomputes the softmax from these and the logits, whose buffer may take the gradient.
//!
//! Arithmetic on elements is F32 (F64 for F64). There are no atomics: the order of every sum depends on shapes and
//! alignment, and not on the GPU. A target that is no class makes a loss NaN, as an error would have to wait for the
//! GPU.

use candle_core::{DType, Result, Tensor};

use super::class::{ClassLoss, LogitsGradient, Reduced, Reduction, count};
use super::pairwise::{LossArgument, Pairwise};
use crate::kernels::accumulator;
use crate::kernels::cast;
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, pack, suffix};
use crate::kernels::elementwise::cuda::in_dtype;

static SOURCE: Source = Source { name: "loss", code: include_str!("loss.cu") };

/// Blocks that add up the terms of a loss, at most.
const BLOCKS: usize = 1024;

/// The places of terms in [`Gpu::scratch`]: the losses of rows, or of parts, and the weights of rows.
const LOSSES: usize = 7;
const WEIGHTS: usize = 8;

/// Room for the losses of so many rows, and for their weights where a loss adds those up: until the next call.
fn rows_of(gpu: &Gpu, loss: &ClassLoss, rows: usize) -> Result<(Tensor, Option<Tensor>)> {
    let weights = loss.sums_weights().then(|| gpu.scratch_from(WEIGHTS, rows, DType::F64));
    Ok((gpu.scratch_from(LOSSES, rows, DType::F64)?, weights.transpose()?))
}

/// The kernel `name` of what it reads and, where kernels differ by that, of what it writes.
fn launch(gpu: &Gpu, name: &'static str, read: DType, written: Option<DType>) -> Result<Launch> {
    let written = written.map_or(Ok(""), suffix)?;
    gpu.launch(&SOURCE, [name, suffix(read)?, written])
}

/// The sum of the first `number` of `terms`, F64, over `count`, in `out`.
fn mean(gpu: &Gpu, terms: &Tensor, number: usize, count: f64, out: DType) -> Result<Tensor> {
    let y = gpu.empty((), out)?;
    let launch = launch(gpu, "mean", out, None)?.write_new(&y)?.write_or_null(None)?;
    let launch = launch.read(terms)?.read_or_null(None)?;
    launch.size(number).double(count).run(Grid::flat(1, 512))?;
    Ok(y)
}

/// The losses of `rows`, F64, reduced; by the weights of the rows, F64, where there are any.
fn reduce(
    gpu: &Gpu,
    loss: &ClassLoss,
    losses: &Tensor,
    row_weights: Option<&Tensor>,
    rows: usize,
    out: DType,
) -> Result<Reduced> {
    if loss.reduction == Reduction::None {
        return Ok(Reduced { loss: cast(&losses.narrow(0, 0, rows)?, out)?, total: None });
    }
    let Some(row_weights) = row_weights else {
        let loss = mean(gpu, losses, rows, loss.count(rows), out)?;
        return Ok(Reduced { loss, total: None });
    };
    let (y, total) = (gpu.empty((), out)?, gpu.empty((), out)?);
    let launch = launch(gpu, "mean", out, None)?.write_new(&y)?.write_new(&total)?;
    let launch = launch.read(losses)?.read(row_weights)?.size(rows).double(0.0);
    launch.run(Grid::flat(1, 512))?;
    Ok(Reduced { loss: y, total: Some(total) })
}

/// Floating-point numbers in the dtype that a kernel for `dtype` takes them in.
fn widened(numbers: &Tensor, dtype: DType) -> Result<Tensor> {
    let wide = accumulator(dtype);
    if numbers.dtype() == wide { Ok(numbers.detach()) } else { cast(numbers, wide) }
}

/// See [`super::class_targets`].
pub(super) fn targets(gpu: &Gpu, targets: &Tensor, ignored: i64, number: u32) -> Result<Tensor> {
    let (y, n) = (gpu.empty(targets.shape(), DType::U32)?, targets.elem_count());
    let launch = gpu.launch(&SOURCE, "targets_i64")?.write_new(&y)?.read(targets)?.size(n);
    launch.size(ignored as usize).size(number as usize).run(Grid::over(n, 1))?;
    Ok(y)
}

/// The number of rows and classes, and of the target that does not count: of none, more than a target can be.
fn sizes(loss: &ClassLoss, rows: usize) -> [usize; 3] {
    [rows, loss.classes, loss.ignored.map_or(usize::MAX, |ignored| ignored as usize)]
}

pub(super) fn cross_entropy_forward(
    gpu: &Gpu,
    loss: &ClassLoss,
    logits: &Tensor,
    targets: &Tensor,
) -> Result<(Reduced, Tensor)> {
    let ((rows, apart), wide) = (logits.dims2()?, accumulator(logits.dtype()));
    let (losses, row_weights) = rows_of(gpu, loss, rows)?;
    let log_sums = gpu.empty((2, rows), wide)?;
    let (grid, team) = Grid::rows(rows, loss.classes);
    // Rows before `rows` of logits, targets and results; of a row, what is before the classes.
    launch(gpu, "cross_entropy", logits.dtype(), None)?
        .write_new(&losses)?
        .write_or_null(row_weights.as_ref())?
        .write_new(&log_sums)?
        .read(logits)?
        .read(targets)?
        .read_or_null(loss.weights.as_ref())?
        .sizes(&sizes(loss, rows))
        .size(apart)
        .double(loss.label_smoothing)
        .int(team)
        .run(grid)?;
    Ok((reduce(gpu, loss, &losses, row_weights.as_ref(), rows, wide)?, log_sums))
}

pub(super) fn cross_entropy_backward(
    gpu: &Gpu,
    of: LogitsGradient<'_>,
    out: DType,
) -> Result<Tensor> {
    in_dtype(of.logits.dtype(), out, |out| {
        let dx = gpu.empty(of.logits.shape(), out)?;
        cross_entropy_backward_into(gpu, of, dx)
    })
}

/// `dx` may be the logits: a thread reads an element before it writes it.
pub(super) fn cross_entropy_backward_into(
    gpu: &Gpu,
    of: LogitsGradient<'_>,
    dx: Tensor,
) -> Result<Tensor> {
    let LogitsGradient { loss, logits, .. } = of;
    let ((rows, apart), dtype) = (logits.dims2()?, logits.dtype());
    let gradient = widened(of.gradient, dtype)?;
    let (grid, team) = Grid::rows(rows, loss.classes);
    // As forward; zeros after the classes.
    launch(gpu, "cross_entropy_backward", dtype, Some(dx.dtype()))?
        .write(&dx)?
        .read(logits)?
        .read(of.targets)?
        .read(of.log_sum_exp)?
        .read_or_null(loss.weights.as_ref())?
        .read(&gradient)?
        .read_or_null(of.total)?
        .sizes(&sizes(loss, rows))
        .size(loss.gradient_stride())
        .double(loss.count(rows))
        .size(apart)
        .double(loss.label_smoothing)
        .int(team)
        .run(grid)?;
    Ok(dx)
}

pub(super) fn nll_forward(
    gpu: &Gpu,
    loss: &ClassLoss,
    log_probs: &Tensor,
    targets: &Tensor,
) -> Result<Reduced> {
    let rows = log_probs.dim(0)?;
    let (losses, row_weights) = rows_of(gpu, loss, rows)?;
    launch(gpu, "pick", log_probs.dtype(), None)?
        .write_new(&losses)?
        .write_or_null(row_weights.as_ref())?
        .read(log_probs)?
        .read(targets)?
        .read_or_null(loss.weights.as_ref())?
        .sizes(&sizes(loss, rows))
        .run(Grid::over(rows, 1))?;
    reduce(gpu, loss, &losses, row_weights.as_ref(), rows, accumulator(log_probs.dtype()))
}

pub(super) fn nll_backward(
    gpu: &Gpu,
    loss: &ClassLoss,
    [targets, gradient]: [&Tensor; 2],
    total: Option<&Tensor>,
    out: DType,
) -> Result<Tensor> {
    let (rows, gradient) = (targets.dim(0)?, widened(gradient, out)?);
    let wide = |tensor: Option<&Tensor>| tensor.map(|tensor| widened(tensor, out)).transpose();
    let (weights, total) = (wide(loss.weights.as_ref())?, wide(total)?);
    let dx = gpu.empty((rows, loss.classes), out)?;
    let (grid, team) = Grid::rows(rows, loss.classes);
    launch(gpu, "pick_backward", out, None)?
        .write_new(&dx)?
        .read(targets)?
        .read_or_null(weights.as_ref())?
        .read(&gradient)?
        .read_or_null(total.as_ref())?
        .sizes(&sizes(loss, rows))
        .size(loss.gradient_stride())
        .double(loss.count(rows))
        .int(team)
        .run(grid)?;
    Ok(dx)
}

/// The number of a loss in the source, and its parameter.
fn number(loss: Pairwise) -> (i32, f64) {
    match loss {
        Pairwise::Mse => (0, 0.0),
        Pairwise::Huber { delta } => (1, delta),
        Pairwise::BinaryCrossEntropy => (2, 0.0),
        Pairwise::BinaryCrossEntropyWithLogit => (3, 0.0),
        Pairwise::L1 => (4, 0.0),
        Pairwise::KlDiv { log_target: false } => (5, 0.0),
        Pairwise::KlDiv { log_target: true } => (6, 0.0),
    }
}

pub(super) fn pairwise_forward(
    gpu: &Gpu,
    loss: Pairwise,
    reduction: Reduction,
    [input, target]: [&Tensor; 2],
) -> Result<Tensor> {
    let (n, dtype) = (input.elem_count(), input.dtype());
    let ((kind, delta), grid) = (number(loss), Grid::over(n, pack(dtype, dtype)));
    if reduction == Reduction::None {
        let y = gpu.empty(input.shape(), accumulator(dtype))?;
        let launch = launch(gpu, "pairwise_terms", dtype, None)?.write_new(&y)?.read(input)?;
        launch.read(target)?.size(n).int(kind).double(delta).run(grid)?;
        return Ok(y);
    }
    let grid = Grid::flat(grid.blocks[0].min(BLOCKS), grid.threads);
    let blocks = grid.blocks[0];
    let parts = gpu.scratch_from(LOSSES, blocks, DType::F64)?;
    let launch =
        launch(gpu, "pairwise", dtype, None)?.write_new(&parts)?.read(input)?.read(target)?;
    launch.size(n).int(kind).double(delta).run(grid)?;
    mean(gpu, &parts, blocks, count(reduction, n), accumulator(dtype))
}

pub(super) fn pairwise_backward(
    gpu: &Gpu,
    (loss, argument): (Pairwise, LossArgument),
    reduction: Reduction,
    [input, target, gradient]: [&Tensor; 3],
    out: DType,
) -> Result<Tensor> {
    let (n, dtype) = (input.elem_count(), input.dtype());
    let gradient = widened(gradient, dtype)?;
    let (kind, delta) = number(loss);
    in_dtype(dtype, out, |out| {
        let dx = gpu.empty(input.shape(), out)?;
        launch(gpu, "pairwise_backward", dtype, Some(out))?
            .write_new(&dx)?
            .read(input)?
            .read(target)?
            .read(&gradient)?
            .int((reduction == Reduction::None).into())
            .double(count(reduction, n))
            .size(n)
            .int(kind)
            .int((argument == LossArgument::Target).into())
            .double(delta)
            .run(Grid::over(n, pack(dtype, out)))?;
        Ok(dx)
    })
}
