//! Two launches forward, one backward; nothing is read back, targets neither.

use candle_core::{DType, Result, Tensor};

use super::pairwise::{Pairwise, Side};
use crate::kernels::accumulator;
use crate::kernels::cast;
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, pack, suffix};
use crate::kernels::elementwise::cuda::in_dtype;

static SOURCE: Source = Source { name: "loss", code: include_str!("loss.cu") };

/// Blocks that add up the terms of a loss, at most.
const BLOCKS: usize = 1024;

fn launch(gpu: &Gpu, name: &str, dtypes: &[DType]) -> Result<Launch> {
    let kinds = dtypes.iter().map(|&dtype| suffix(dtype)).collect::<Result<Vec<_>>>()?;
    gpu.launch(&SOURCE, &format!("{name}_{}", kinds.join("_")))
}

/// The sum of `terms`, F64, over `count`, in `out`.
fn mean(gpu: &Gpu, terms: &Tensor, count: usize, out: DType) -> Result<Tensor> {
    let y = gpu.empty((), out)?;
    let launch = launch(gpu, "mean", &[out])?.write(&y)?.read(terms)?;
    launch.size(terms.elem_count()).size(count).run(Grid::flat(1, 512))?;
    Ok(y)
}

/// A scalar in the dtype that a kernel for `dtype` takes it in.
fn scalar(scale: &Tensor, dtype: DType) -> Result<Tensor> {
    let wide = accumulator(dtype);
    if scale.dtype() == wide { Ok(scale.detach()) } else { cast(scale, wide) }
}

pub(super) fn cross_entropy_forward(
    gpu: &Gpu,
    logits: &Tensor,
    targets: &Tensor,
    classes: usize,
    label_smoothing: f64,
) -> Result<(Tensor, Tensor)> {
    let ((rows, apart), wide) = (logits.dims2()?, accumulator(logits.dtype()));
    let (losses, log_sums) = (gpu.empty(rows, DType::F64)?, gpu.empty((2, rows), wide)?);
    let (grid, team) = Grid::rows(rows, classes);
    // Rows before `rows` of logits, targets and both results; of a row, what is before `classes`.
    launch(gpu, "cross_entropy", &[logits.dtype()])?
        .write(&losses)?
        .write(&log_sums)?
        .read(logits)?
        .read(targets)?
        .size(rows)
        .size(classes)
        .size(apart)
        .double(label_smoothing)
        .int(team)
        .run(grid)?;
    Ok((mean(gpu, &losses, rows, wide)?, log_sums))
}

pub(super) fn cross_entropy_backward(
    gpu: &Gpu,
    tensors: [&Tensor; 4],
    classes: usize,
    label_smoothing: f64,
    out: DType,
) -> Result<Tensor> {
    let [logits, ..] = tensors;
    in_dtype(logits.dtype(), out, |out| {
        let dx = gpu.empty(logits.shape(), out)?;
        cross_entropy_backward_into(gpu, tensors, classes, label_smoothing, dx)
    })
}

/// `dx` may be the logits: a thread reads an element before it writes it.
pub(super) fn cross_entropy_backward_into(
    gpu: &Gpu,
    [logits, targets, log_sum_exp, grad_scale]: [&Tensor; 4],
    classes: usize,
    label_smoothing: f64,
    dx: Tensor,
) -> Result<Tensor> {
    let ((rows, apart), dtype) = (logits.dims2()?, logits.dtype());
    let scale = scalar(grad_scale, dtype)?;
    let (grid, team) = Grid::rows(rows, classes);
    // As forward; zeros after `classes`.
    launch(gpu, "cross_entropy_backward", &[dtype, dx.dtype()])?
        .write(&dx)?
        .read(logits)?
        .read(targets)?
        .read(log_sum_exp)?
        .read(&scale)?
        .size(rows)
        .size(classes)
        .size(apart)
        .double(label_smoothing)
        .int(team)
        .run(grid)?;
    Ok(dx)
}

pub(super) fn nll_forward(gpu: &Gpu, log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (rows, classes) = log_probs.dims2()?;
    let losses = gpu.empty(rows, DType::F64)?;
    let launch = launch(gpu, "pick", &[log_probs.dtype()])?.write(&losses)?;
    let launch = launch.read(log_probs)?.read(targets)?.size(rows).size(classes);
    launch.run(Grid::over(rows, 1))?;
    mean(gpu, &losses, rows, accumulator(log_probs.dtype()))
}

pub(super) fn nll_backward(
    gpu: &Gpu,
    targets: &Tensor,
    classes: usize,
    grad_scale: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let (rows, scale) = (targets.dim(0)?, scalar(grad_scale, out)?);
    let dx = gpu.empty((rows, classes), out)?;
    let (grid, team) = Grid::rows(rows, classes);
    let launch = launch(gpu, "pick_backward", &[out])?.write(&dx)?.read(targets)?.read(&scale)?;
    launch.size(rows).size(classes).int(team).run(grid)?;
    Ok(dx)
}

/// The number of a loss in the source, and its parameter.
fn number(loss: Pairwise) -> (i32, f64) {
    match loss {
        Pairwise::Mse => (0, 0.0),
        Pairwise::Huber { delta } => (1, delta),
        Pairwise::BinaryCrossEntropy => (2, 0.0),
        Pairwise::BinaryCrossEntropyWithLogit => (3, 0.0),
    }
}

pub(super) fn pairwise_forward(
    gpu: &Gpu,
    loss: Pairwise,
    input: &Tensor,
    target: &Tensor,
) -> Result<Tensor> {
    let (n, dtype) = (input.elem_count(), input.dtype());
    let grid = Grid::over(n, pack(dtype, dtype));
    let grid = Grid::flat(grid.blocks[0].min(BLOCKS), grid.threads);
    let parts = gpu.empty(grid.blocks[0], DType::F64)?;
    let (kind, delta) = number(loss);
    let launch = launch(gpu, "pairwise", &[dtype])?.write(&parts)?.read(input)?.read(target)?;
    launch.size(n).int(kind).double(delta).run(grid)?;
    mean(gpu, &parts, n, accumulator(dtype))
}

pub(super) fn pairwise_backward(
    gpu: &Gpu,
    (loss, side): (Pairwise, Side),
    [input, target, grad_scale]: [&Tensor; 3],
    out: DType,
) -> Result<Tensor> {
    let (n, dtype) = (input.elem_count(), input.dtype());
    let scale = scalar(grad_scale, dtype)?;
    let (kind, delta) = number(loss);
    in_dtype(dtype, out, |out| {
        let dx = gpu.empty(input.shape(), out)?;
        launch(gpu, "pairwise_backward", &[dtype, out])?
            .write(&dx)?
            .read(input)?
            .read(target)?
            .read(&scale)?
            .size(n)
            .int(kind)
            .int((side == Side::Target).into())
            .double(delta)
            .run(Grid::over(n, pack(dtype, out)))?;
        Ok(dx)
    })
}
