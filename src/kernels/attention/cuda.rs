//! Attention as matrix products, and a kernel for the rows of scores between them, where `flash.rs`
//! has none for all of it.
//!
//! Products are written in the dtype of the arithmetic, so that no score overflows; probabilities go
//! into the next product in the dtype of `q`.

use candle_core::{DType, Result, Tensor};

use super::mask::Mask;
use super::repeated::sum_to;
use super::saved::{Kept, Saved};
use super::settings::Settings;
use crate::kernels::cuda::{Gpu, Grid, Source, suffix};
use crate::kernels::elementwise::plain;
use crate::kernels::gemm::gemm;
use crate::kernels::{accumulator, cast, cat};

static SOURCE: Source =
    Source { name: "sdpa", code: concat!(include_str!("scores.cuh"), include_str!("sdpa.cu")) };

/// Bytes of scores made at a time, where there are several samples to take one after another.
const SCORES: usize = 1 << 29;

/// Samples whose scores fit.
fn samples(q: &Tensor, k: &Tensor) -> Result<usize> {
    let (_, h, t, _) = q.dims4()?;
    let bytes = h * t * k.dim(2)? * accumulator(q.dtype()).size_in_bytes();
    Ok((SCORES / bytes.max(1)).max(1))
}

/// `(b, h, t, d)` with the heads that share keys in one: `(b, h_kv, h / h_kv * t, d)`.
fn by_group(x: &Tensor, kv_heads: usize) -> Result<Tensor> {
    let (b, h, t, d) = x.dims4()?;
    if h == kv_heads {
        return Ok(x.detach());
    }
    plain(x)?.reshape((b, kv_heads, h / kv_heads * t, d))
}

/// See [`super::forward`]; where [`flash`](super::flash) has no kernel.
pub(super) fn forward(
    gpu: &Gpu,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    settings: Settings,
) -> Result<(Tensor, Kept)> {
    let ((b, h, t, _), wide) = (q.dims4()?, accumulator(q.dtype()));
    let (_, kv_heads, s, dv) = v.dims4()?;
    if b * h * t * s == 0 {
        let zeros = gpu.zeros((b, h, t), wide)?;
        let kept = Kept { max: zeros.clone(), inverse_sum: zeros, unrounded: None };
        return Ok((gpu.zeros((b, h, t, dv), q.dtype())?, kept));
    }
    let step = samples(q, k)?;
    if step < b {
        let part = |first: usize| {
            let some = |x: &Tensor| x.narrow(0, first, step.min(b - first));
            let mask = mask.map(|mask| sample(mask, first, step.min(b - first))).transpose()?;
            forward(gpu, &some(q)?, &some(k)?, &some(v)?, mask.as_ref(), settings)
        };
        let parts: Vec<_> = (0..b).step_by(step).map(part).collect::<Result<_>>()?;
        let (outs, kept): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let (maxima, inverse_sums): (Vec<_>, Vec<_>) =
            kept.into_iter().map(|kept: Kept| (kept.max, kept.inverse_sum)).unzip();
        let (max, inverse_sum) = (cat(&maxima, 0)?, cat(&inverse_sums, 0)?);
        return Ok((cat(&outs, 0)?, Kept { max, inverse_sum, unrounded: None }));
    }
    let products = gemm(&by_group(q, kv_heads)?, &k.transpose(2, 3)?, None, wide)?;
    let (max, inverse_sum) = (gpu.empty((b, h, t), wide)?, gpu.empty((b, h, t), wide)?);
    let p = match q.dtype() {
        dtype if dtype == wide => products.clone(),
        dtype => gpu.empty(products.shape(), dtype)?,
    };
    let mask = Mask::of(mask, [b, h, t, s], wide)?;
    let (grid, team) = Grid::rows(b * h * t, s);
    // Rows before `b * h * t` of `s`, each read and written by one team; the mask by its strides.
    let launch = gpu.launch(&SOURCE, ["probabilities", suffix(q.dtype())?])?;
    mask.settings(launch.write(&p)?.write(&max)?.write(&inverse_sum)?.read(&products)?, settings)?
        .sizes(&[b * h * t, h, t, s])
        .int(settings.causal.into())
        .int(team)
        .run(grid)?;
    let out = gemm(&p, v, None, q.dtype())?;
    Ok((out.reshape((b, h, t, dv))?, Kept { max, inverse_sum, unrounded: None }))
}

/// Some samples of a mask that broadcasts to `(b, h, t, s)`.
fn sample(mask: &Tensor, first: usize, count: usize) -> Result<Tensor> {
    if mask.rank() < 4 || mask.dim(0)? == 1 {
        Ok(mask.clone())
    } else {
        mask.narrow(0, first, count)
    }
}

/// See [`super::backward`].
pub(super) fn backward(
    gpu: &Gpu,
    saved: Saved<'_>,
    settings: Settings,
    wants: [Option<DType>; 4],
) -> Result<[Option<Tensor>; 4]> {
    let Saved { q, k, v, mask, kept, grad } = saved;
    let ((b, h, t, _), wide) = (q.dims4()?, accumulator(q.dtype()));
    let (_, kv_heads, s, _) = v.dims4()?;
    if b * h * t * s * v.dim(3)? == 0 {
        let zeros = |like: &Tensor, want: Option<DType>| {
            want.map(|dtype| gpu.zeros(like.dims(), dtype)).transpose()
        };
        let dmask = mask.map(|mask| zeros(mask, wants[3])).transpose()?.flatten();
        return Ok([zeros(q, wants[0])?, zeros(k, wants[1])?, zeros(v, wants[2])?, dmask]);
    }
    let step = samples(q, k)?;
    if step < b && wants[3].is_none() {
        return in_parts(gpu, saved, settings, wants, step);
    }
    let grad = if grad.dtype() == q.dtype() { grad.detach() } else { cast(grad, q.dtype())? };
    let (queries, grad) = (by_group(q, kv_heads)?, by_group(&grad, kv_heads)?);
    let products = gemm(&queries, &k.transpose(2, 3)?, None, wide)?;
    let dp = gemm(&grad, &v.transpose(2, 3)?, None, wide)?;
    let (p, dx) = match q.dtype() {
        dtype if dtype == wide => (products.clone(), dp.clone()),
        dtype => (gpu.empty(products.shape(), dtype)?, gpu.empty(products.shape(), dtype)?),
    };
    let dmask = wants[3].and(mask).map(|_| gpu.empty((b, h, t, s), wide)).transpose()?;
    let spread = Mask::of(mask, [b, h, t, s], wide)?;
    let (grid, team) = Grid::rows(b * h * t, s);
    // As forward.
    let launch = gpu.launch(&SOURCE, ["slopes", suffix(q.dtype())?])?;
    let launch = launch.write(&p)?.write(&dx)?.write_or_null(dmask.as_ref())?;
    let launch = launch.read(&products)?.read(&dp)?;
    let launch = launch.read(&plain(&kept.max)?)?.read(&plain(&kept.inverse_sum)?)?;
    spread
        .settings(launch, settings)?
        .sizes(&[b * h * t, h, t, s])
        .int(settings.causal.into())
        .int(team)
        .run(grid)?;
    let of = |want: Option<DType>, lhs: &Tensor, rhs: &Tensor, like: &Tensor| {
        want.map(|dtype| gemm(lhs, rhs, None, dtype)?.reshape(like.dims())).transpose()
    };
    let dmask = match (dmask, mask, wants[3]) {
        (Some(dmask), Some(mask), Some(dtype)) => {
            Some(sum_to(dmask, mask.dims())?.to_dtype(dtype)?)
        }
        _ => None,
    };
    Ok([
        of(wants[0], &dx, k, q)?,
        of(wants[1], &dx.transpose(2, 3)?, &queries, k)?,
        of(wants[2], &p.transpose(2, 3)?, &grad, v)?,
        dmask,
    ])
}

/// [`backward`], `step` samples at a time.
fn in_parts(
    gpu: &Gpu,
    saved: Saved<'_>,
    settings: Settings,
    wants: [Option<DType>; 4],
    step: usize,
) -> Result<[Option<Tensor>; 4]> {
    let b = saved.q.dim(0)?;
    let mut parts: [Vec<Tensor>; 3] = Default::default();
    for first in (0..b).step_by(step) {
        let count = step.min(b - first);
        let all = [saved.q, saved.k, saved.v, &saved.kept.max, &saved.kept.inverse_sum, saved.grad];
        let some: Vec<Tensor> =
            all.iter().map(|x| x.narrow(0, first, count)).collect::<Result<_>>()?;
        let [q, k, v, max, inverse_sum, grad] = &some[..] else { continue };
        let mask = saved.mask.map(|mask| sample(mask, first, count)).transpose()?;
        let kept = &Kept { max: max.clone(), inverse_sum: inverse_sum.clone(), unrounded: None };
        let saved = Saved { q, k, v, mask: mask.as_ref(), kept, grad };
        let gradients = backward(gpu, saved, settings, wants)?;
        for (parts, gradient) in parts.iter_mut().zip(gradients) {
            parts.extend(gradient);
        }
    }
    let [dq, dk, dv] = parts.map(|parts| match parts.is_empty() {
        true => Ok(None),
        false => cat(&parts, 0).map(Some),
    });
    Ok([dq?, dk?, dv?, None])
}
