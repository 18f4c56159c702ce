//! Layer, RMS and group norm on CUDA: one launch forward, three backward.
//!
//! A team of threads normalises a row: a warp if rows are short, else a block. It reads the row for the mean, then for
//! the distances from it, so that a large mean costs no digits. Group norm uses the same kernels: a row is one group of
//! a sample, and [`RowShape`] says to which channel an element belongs.
//!
//! Backward, one launch computes `dx` row by row. The gradients of weight and bias are sums over rows: one launch sums
//! the columns of parts of the rows, another adds the parts in F64. For group norm, each sample is a part.

use candle_core::{D, DType, Result, Tensor};

use crate::kernels::accumulator;
use crate::kernels::cast;
use crate::kernels::cuda::{Gpu, Grid, Source, suffix};
use crate::kernels::elementwise::cuda::in_dtype;
use crate::kernels::reduce::cuda as reduce;

static SOURCE: Source = Source { name: "layer_norm", code: include_str!("layer_norm.cu") };

/// How the elements of a row belong to channels: `inner` follow each other for each, and rows go
/// through all channels every `groups`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowShape {
    pub(crate) count: usize,
    pub(crate) columns: usize,
    pub(crate) groups: usize,
    pub(crate) inner: usize,
}

impl RowShape {
    pub(super) fn of(x: &Tensor) -> Result<Self> {
        let columns = x.dim(D::Minus1)?;
        Ok(Self { count: x.elem_count() / columns.max(1), columns, groups: 1, inner: 1 })
    }
}

/// Weight and bias in one dtype that there are kernels for: that of `x`, or that of the arithmetic.
fn parameters<const N: usize>(
    x: &Tensor,
    parameters: [Option<&Tensor>; N],
) -> Result<([Option<Tensor>; N], DType)> {
    let same = parameters.iter().flatten().all(|p| p.dtype() == x.dtype());
    let dtype = if same { x.dtype() } else { accumulator(x.dtype()) };
    let mut near = [const { None }; N];
    for (near, parameter) in near.iter_mut().zip(parameters) {
        let like = |p: &Tensor| {
            let there = p.dtype() == dtype && p.is_contiguous();
            if there { Ok(p.detach()) } else { cast(p, dtype) }
        };
        *near = parameter.map(like).transpose()?;
    }
    Ok((near, dtype))
}

/// See [`super::forward`]; `x` is contiguous.
pub(crate) fn forward(
    gpu: &Gpu,
    x: &Tensor,
    rows: RowShape,
    affine: [Option<&Tensor>; 2],
    eps: f64,
    centred: bool,
) -> Result<(Tensor, Tensor)> {
    let ([weight, bias], dtype) = parameters(x, affine)?;
    let y = gpu.empty(x.shape(), x.dtype())?;
    let statistics = gpu.empty((rows.count, 3), accumulator(x.dtype()))?;
    let (grid, team) = Grid::rows(rows.count, rows.columns);
    // Rows before `count`, columns before `columns`, channels before `groups * columns / inner`,
    // which weight and bias have.
    gpu.launch(&SOURCE, ["norm", suffix(x.dtype())?, suffix(dtype)?])?
        .write_new(&y)?
        .write_new(&statistics)?
        .read(x)?
        .read_or_null(weight.as_ref())?
        .read_or_null(bias.as_ref())?
        .sizes(&[rows.count, rows.columns, rows.groups, rows.inner])
        .double(eps)
        .int(centred.into())
        .int(team)
        .run(grid)?;
    Ok((y, statistics))
}

/// The gradient of `x`, in `out`, with `pending`, of that dtype too; `x` and `grad` are contiguous and of one
/// dtype.
pub(crate) fn input_gradient(
    gpu: &Gpu,
    [x, grad, statistics]: [&Tensor; 3],
    rows: RowShape,
    weight: Option<&Tensor>,
    centred: bool,
    out: DType,
    pending: Option<&Tensor>,
) -> Result<Tensor> {
    let ([weight], dtype) = parameters(x, [weight])?;
    in_dtype(x.dtype(), out, |out| {
        let dx = gpu.empty(x.shape(), out)?;
        let (grid, team) = Grid::rows(rows.count, rows.columns);
        let name = ["norm_backward", suffix(x.dtype())?, suffix(dtype)?, suffix(out)?];
        // As forward.
        gpu.launch(&SOURCE, name)?
            .write_new(&dx)?
            .read(x)?
            .read(grad)?
            .read_or_null(weight.as_ref())?
            .read_or_null(pending)?
            .read(statistics)?
            .sizes(&[rows.count, rows.columns, rows.groups, rows.inner])
            .int(centred.into())
            .int(team)
            .run(grid)?;
        Ok(dx)
    })
}

/// The gradients of weight and bias, from sums `(parts, 2, channels)`.
fn affine(
    gpu: &Gpu,
    sums: &Tensor,
    channels: usize,
    wants: [Option<DType>; 2],
) -> Result<[Option<Tensor>; 2]> {
    // One launch for both, which mostly are of one dtype.
    let Some(dtype) = wants[0].or(wants[1]) else { return Ok([None, None]) };
    let both = reduce::finish(gpu, sums, [sums.dim(0)?, 2 * channels, 1], dtype)?;
    let half = |at: usize, want: Option<DType>| {
        let Some(want) = want else { return Ok(None) };
        let half = both.narrow(0, at * channels, channels)?;
        if want == dtype { Ok(Some(half)) } else { cast(&half, want).map(Some) }
    };
    Ok([half(0, wants[0])?, half(1, wants[1])?])
}

/// See [`super::backward`]; `x` and `grad` are contiguous and of one dtype.
pub(super) fn backward(
    gpu: &Gpu,
    tensors: [&Tensor; 3],
    weight: Option<&Tensor>,
    centred: bool,
    wants: [Option<DType>; 3],
    pending: Option<&Tensor>,
) -> Result<[Option<Tensor>; 3]> {
    let [x, grad, statistics] = tensors;
    let rows = RowShape::of(x)?;
    let dx = |out| input_gradient(gpu, tensors, rows, weight, centred, out, pending);
    let dx = wants[0].map(dx).transpose()?;
    if wants[1].or(wants[2]).is_none() {
        return Ok([dx, None, None]);
    }
    let RowShape { count, columns, .. } = rows;
    let tiling = reduce::Tiling::over(&[x, grad], count, columns)?;
    let sums = gpu.empty((tiling.parts, 2, columns), DType::F64)?;
    // Block `p * tiles + t` reads rows before `count` and columns before `columns`, and writes those
    // columns of part `p`.
    gpu.launch(&SOURCE, ["norm_columns", suffix(x.dtype())?])?
        .write_new(&sums)?
        .read(x)?
        .read(grad)?
        .read(statistics)?
        .sizes(&[count, columns, tiling.parts, tiling.tiles])
        .int(tiling.packed.into())
        .run(tiling.grid())?;
    let [dweight, dbias] = affine(gpu, &sums, columns, [wants[1], wants[2]])?;
    Ok([dx, dweight, dbias])
}

/// The gradients of weight and bias of group norm, of `(n, channels, inner)`.
pub(crate) fn group_parameters(
    gpu: &Gpu,
    [x, grad, statistics]: [&Tensor; 3],
    [samples, channels, inner, groups]: [usize; 4],
    wants: [Option<DType>; 2],
) -> Result<[Option<Tensor>; 2]> {
    if wants[0].or(wants[1]).is_none() {
        return Ok([None, None]);
    }
    let sums = gpu.empty((samples, 2, channels), DType::F64)?;
    let (grid, team) = Grid::rows(samples * channels, inner);
    // A team has a plane of `inner` elements, of `samples * channels`, and writes its two sums.
    gpu.launch(&SOURCE, ["norm_planes", suffix(x.dtype())?])?
        .write_new(&sums)?
        .read(x)?
        .read(grad)?
        .read(statistics)?
        .sizes(&[samples * channels, channels, inner, groups])
        .int(team)
        .run(grid)?;
    affine(gpu, &sums, channels, wants)
}
