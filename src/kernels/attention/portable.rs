//! Attention out of candle's operators, for devices without kernels and as what the tests compare with.
//!
//! Arithmetic is F32 (F64 for F64), and results are rounded once. All scores `(b, h, t, s)` are in memory, and each
//! operator on them writes another such tensor. Query heads that share a head of keys are rows of one product, so keys
//! are not repeated.
//!
//! Hidden scores are negative infinities. A query that sees no key gets a largest score and an inverse sum of 0, and so
//! a result of zeros, not NaN. Of each query, forward saves only these two numbers. Backward computes the scores again,
//! and gets the probabilities from them and these numbers.

use candle_core::{D, DType, Result, Tensor};

use super::repeated::sum_to;
use super::saved::{Kept, Saved};
use super::settings::Settings;
use crate::kernels::accumulator;
use crate::kernels::elementwise::portable::upcast;

pub(super) fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    settings: Settings,
) -> Result<(Tensor, Kept)> {
    let (b, h, t, _) = q.dims4()?;
    if k.elem_count() == 0 || q.elem_count() == 0 {
        let out = Tensor::zeros((b, h, t, v.dim(3)?), q.dtype(), q.device())?;
        let wide = accumulator(q.dtype());
        let zeros = Tensor::zeros((b, h, t), wide, q.device())?;
        return Ok((out, Kept { max: zeros.clone(), inverse_sum: zeros, unrounded: None }));
    }
    let (scores, _) = scores(q, k, mask, settings)?;
    let max = scores.max_keepdim(D::Minus1)?;
    let hidden = max.eq(f64::NEG_INFINITY)?;
    let max = hidden.where_cond(&max.zeros_like()?, &max)?;
    let exp = scores.broadcast_sub(&max)?.exp()?;
    let sum = exp.sum_keepdim(D::Minus1)?;
    // A query that sees nothing has a sum of 0, and a share of 0.
    let inverse_sum = sum.eq(0.0)?.where_cond(&sum, &sum.recip()?)?;
    let p = exp.broadcast_mul(&inverse_sum)?;
    let out = by_group(&p, k)?.matmul(&upcast(v)?.contiguous()?)?;
    let out = out.reshape((b, h, t, ()))?.to_dtype(q.dtype())?;
    Ok((out, Kept { max: max.squeeze(3)?, inverse_sum: inverse_sum.squeeze(3)?, unrounded: None }))
}

pub(super) fn backward(
    saved: Saved<'_>,
    settings: Settings,
    wants: [Option<DType>; 4],
) -> Result<[Option<Tensor>; 4]> {
    let Saved { q, k, v, mask, kept, grad } = saved;
    if k.elem_count() == 0 || q.elem_count() == 0 {
        let zeros = |like: &Tensor, want: Option<DType>| {
            want.map(|dtype| Tensor::zeros(like.dims(), dtype, like.device())).transpose()
        };
        let dmask = mask.map(|mask| zeros(mask, wants[3])).transpose()?.flatten();
        return Ok([zeros(q, wants[0])?, zeros(k, wants[1])?, zeros(v, wants[2])?, dmask]);
    }
    let (scores, derivatives) = scores(q, k, mask, settings)?;
    let exp = scores.broadcast_sub(&kept.max.unsqueeze(3)?)?.exp()?;
    let p = exp.broadcast_mul(&kept.inverse_sum.unsqueeze(3)?)?;
    let grad = by_group(&upcast(grad)?, k)?;
    let dp = grad.matmul(&upcast(v)?.transpose(2, 3)?.contiguous()?)?.reshape(p.shape())?;
    let average = (&p * &dp)?.sum_keepdim(D::Minus1)?;
    let dmask = p.mul(&dp.broadcast_sub(&average)?)?;
    let dscores =
        (derivatives.map_or_else(|| Ok(dmask.clone()), |s| &dmask * s)? * settings.scale)?;
    let dscores = by_group(&dscores, k)?;
    let transposed = |x: &Tensor| x.transpose(2, 3)?.contiguous();
    let dq = |dtype| {
        let dq = dscores.matmul(&upcast(k)?.contiguous()?)?;
        dq.reshape(q.shape())?.to_dtype(dtype)
    };
    let dk = |dtype| transposed(&dscores)?.matmul(&by_group(&upcast(q)?, k)?)?.to_dtype(dtype);
    let dv = |dtype| transposed(&by_group(&p, k)?)?.matmul(&grad)?.to_dtype(dtype);
    let dmask = match (wants[3], mask) {
        (Some(dtype), Some(mask)) => Some(sum_to(dmask, mask.dims())?.to_dtype(dtype)?),
        _ => None,
    };
    Ok([
        wants[0].map(dq).transpose()?,
        wants[1].map(dk).transpose()?,
        wants[2].map(dv).transpose()?,
        dmask,
    ])
}

/// `(b, h, t, d)` with the heads that share keys in one: `(b, h_kv, h / h_kv * t, d)`.
fn by_group(x: &Tensor, k: &Tensor) -> Result<Tensor> {
    let (b, h, t, d) = x.dims4()?;
    let kv_heads = k.dim(1)?;
    x.contiguous()?.reshape((b, kv_heads, h / kv_heads * t, d))
}

/// The scores `(b, h, t, s)`, and the derivatives of the soft cap, where there is one.
fn scores(
    q: &Tensor,
    k: &Tensor,
    mask: Option<&Tensor>,
    settings: Settings,
) -> Result<(Tensor, Option<Tensor>)> {
    let (b, h, t, _) = q.dims4()?;
    let s = k.dim(2)?;
    let shape = (b, h, t, s);
    let product = by_group(&upcast(q)?, k)?.matmul(&upcast(k)?.transpose(2, 3)?.contiguous()?)?;
    let mut scores = product.reshape(shape)?;
    let mut derivatives = None;
    match settings.softcap {
        None => scores = (scores * settings.scale)?,
        Some(cap) => {
            let tanh = (scores * (settings.scale / cap))?.tanh()?;
            derivatives = Some(tanh.sqr()?.affine(-1.0, 1.0)?);
            scores = (tanh * cap)?;
        }
    }
    let hidden = (scores.ones_like()? * f64::NEG_INFINITY)?;
    let keep = |keep: &Tensor, scores: &Tensor| {
        keep.broadcast_as(shape)?.contiguous()?.where_cond(scores, &hidden)
    };
    match mask {
        None => {}
        Some(mask) if mask.dtype() == DType::U8 => scores = keep(&mask.detach(), &scores)?,
        Some(mask) => scores = scores.broadcast_add(&mask.detach().to_dtype(scores.dtype())?)?,
    }
    if settings.causal {
        let seen = (0..t).flat_map(|i| (0..s).map(move |j| u8::from(j <= i))).collect();
        scores = keep(&Tensor::from_vec(seen, (1, 1, t, s), q.device())?, &scores)?;
    }
    Ok((scores, derivatives))
}
