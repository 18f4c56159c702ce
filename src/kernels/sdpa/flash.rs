//! Attention forward in one launch, on tensor cores.

use candle_core::{DType, Result, Tensor};

use super::Settings;
use super::cuda::Mask;
use crate::kernels::cuda::{Gpu, Grid, Source, start, suffix};

static SOURCE: Source =
    Source { name: "flash", code: concat!(include_str!("scores.cuh"), include_str!("flash.cu")) };

/// Queries of a block, as in the source.
const QUERIES: usize = 64;
/// The widest heads there are kernels for.
const WIDEST: usize = 128;

/// Whether there is a kernel for these: halves, on compute capability 8.0 and later, in heads of at
/// most 128 elements that start at multiples of 16 bytes, keys and values alike.
pub(super) fn fits(gpu: &Gpu, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<bool> {
    let d = q.dim(3)?;
    let lies_well = |x: &Tensor| -> Result<bool> {
        let (strides, last) = x.stride().split_at(3);
        let rows = strides.iter().all(|stride| stride.is_multiple_of(8));
        Ok(rows && last == [1] && start(x)?.is_multiple_of(16))
    };
    Ok(matches!(q.dtype(), DType::F16 | DType::BF16)
        && d.is_multiple_of(8)
        && d <= WIDEST
        && v.dim(3)? == d
        && lies_well(q)?
        && lies_well(k)?
        && lies_well(v)?
        && gpu.compute_capability()? >= (8, 0))
}

/// See [`super::forward`]; none of the sizes is 0. With `rows` the output lies as `(b, t, h, d)`
/// does, and is a view of that.
pub(super) fn forward(
    gpu: &Gpu,
    [q, k, v]: [&Tensor; 3],
    mask: Option<&Tensor>,
    settings: Settings,
    rows: bool,
) -> Result<(Tensor, Tensor)> {
    let (b, h, t, d) = q.dims4()?;
    let (kv_heads, s) = (k.dim(1)?, k.dim(2)?);
    let out = match rows {
        true => gpu.empty((b, t, h, d), q.dtype())?.transpose(1, 2)?,
        false => gpu.empty((b, h, t, d), q.dtype())?,
    };
    let sums = gpu.empty((b, h, t), DType::F32)?;
    let mask = Mask::of(mask, [b, h, t, s], DType::F32)?;
    let wide = if d <= 64 { 64 } else { WIDEST };
    let launch = gpu.launch(&SOURCE, &format!("flash_{wide}_{}", suffix(q.dtype())?))?;
    // The strides of a row of each, by which queries before `t`, keys before `s` and columns before
    // `d` are read, and queries written; head `i` has keys of head `i / (h / kv_heads)`.
    let mut launch = launch.write_strided(&out)?.sizes(&out.stride()[..3]).write(&sums)?;
    for x in [q, k, v] {
        launch = launch.read_strided(x)?.sizes(&x.stride()[..3]);
    }
    mask.settings(launch, settings)?
        .sizes(&[h, h / kv_heads, t, s, d])
        .int(settings.causal.into())
        .run(Grid::flat(b * h * t.div_ceil(QUERIES), 128))?;
    Ok((out, sums))
}
