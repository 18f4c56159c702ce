//! Scaled dot product attention.
//!
//! `q` is `(b, h, t, d)`, `k` `(b, h_kv, s, d)` and `v` `(b, h_kv, s, dv)`, of one dtype; head `i`
//! of `q` sees head `i / (h / h_kv)` of the others. Scores, softmax and all sums are F32 (F64 for
//! F64). Nothing of size `t * s` is kept: backward makes the scores again.

mod backward;
mod cpu;
mod cuda;
mod flash;
mod mask;
mod portable;
mod repeated;
mod saved;
mod scores;
mod settings;
#[cfg(test)]
mod tests;

use candle_core::{D, DType, Result, Tensor};

pub(crate) use saved::{Kept, Saved};
pub(crate) use settings::Settings;

use crate::kernels::choice::algorithm::{chosen, fell_back};
use crate::kernels::cuda::Gpu;
use crate::kernels::elementwise::plain;
use crate::kernels::{cat, contiguous, in_dtype};

/// `softmax(scores) v`, `(b, h, t, dv)`, in the dtype of `q`.
///
/// `mask` broadcasts to `(b, h, t, s)`: U8, where 0 hides, or a float to add. A query that sees no
/// key gets zeros; its `max` and `inverse_sum` are 0.
pub(crate) fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    settings: Settings,
) -> Result<(Tensor, Kept)> {
    run(Algorithm::of(q, k, v)?, [q, k, v], mask, settings)
}

fn run(
    algorithm: Algorithm<'_>,
    [q, k, v]: [&Tensor; 3],
    mask: Option<&Tensor>,
    settings: Settings,
) -> Result<(Tensor, Kept)> {
    match algorithm {
        Algorithm::Flash(gpu, products, ()) => {
            flash::forward(gpu, products, [q, k, v], mask, settings, false)
        }
        Algorithm::Products(gpu) => cuda::forward(gpu, q, k, v, mask, settings),
        Algorithm::Blocks => cpu::forward(q, k, v, mask, settings),
        Algorithm::Portable => portable::forward(q, k, v, mask, settings),
    }
}

/// How a pass of attention is computed. `O` is what flash attention needs besides: backward the output in F32.
enum Algorithm<'a, O = ()> {
    /// On a GPU, by kernels that keep no scores.
    Flash(&'a Gpu, flash::Products, O),
    /// On a GPU, by products and a kernel for the rows of scores between them.
    Products(&'a Gpu),
    /// On the CPU, a block of queries at a time.
    Blocks,
    /// By candle's operators, on devices that this crate has no kernels for.
    Portable,
}

impl<'a> Algorithm<'a> {
    fn of(q: &'a Tensor, k: &Tensor, v: &Tensor) -> Result<Self> {
        Self::choose("attention", q, [k, v], |gpu| Ok(flash::fits(gpu, q, k, v)?.then_some(())))
    }
}

impl<'a> Algorithm<'a, &'a Tensor> {
    /// Flash attention if forward was, but not for the gradient of a mask: that has the size of the scores, so not keeping
    /// those saves nothing.
    fn of_backward(saved: Saved<'a>, wants_mask: bool) -> Result<Self> {
        let output = saved.kept.unrounded.as_ref().filter(|_| !wants_mask);
        Self::choose("attention backward", saved.q, [saved.k, saved.v], |_| Ok(output))
    }
}

impl<'a, O> Algorithm<'a, O> {
    /// `flash` says whether it can do the pass.
    fn choose(
        pass: &'static str,
        q: &'a Tensor,
        [k, v]: [&Tensor; 2],
        flash: impl FnOnce(&Gpu) -> Result<Option<O>>,
    ) -> Result<Self> {
        let algorithm = match Gpu::of(q.device()) {
            Some(gpu) => match flash(gpu)? {
                Some(output) => Self::Flash(gpu, flash::Products::of(gpu, q.dtype())?, output),
                None => Self::Products(gpu),
            },
            None if q.device().is_cpu() => Self::Blocks,
            None => Self::Portable,
        };
        let sizes = [q.shape(), k.shape(), v.shape()];
        match algorithm {
            Self::Products(_) if flash::is_for(q) => {
                fell_back(pass, "flash", algorithm.name(), &sizes);
            }
            _ => chosen(pass, algorithm.name(), &sizes),
        }
        Ok(algorithm)
    }

    /// What a trace shows.
    fn name(&self) -> &'static str {
        match self {
            Self::Flash(_, flash::Products::OfWarps, _) => "flash",
            Self::Flash(_, flash::Products::OfGroups, _) => "flash, wgmma",
            Self::Products(_) => "products",
            Self::Blocks => "blocks",
            Self::Portable => "candle",
        }
    }
}

/// [`forward`] without a mask, and with the heads of each query after one another: `(b, t, h * dv)`.
pub(crate) fn forward_rows(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    settings: Settings,
) -> Result<(Tensor, Kept)> {
    let (out, kept) = match Algorithm::of(q, k, v)? {
        Algorithm::Flash(gpu, products, ()) => {
            flash::forward(gpu, products, [q, k, v], None, settings, true)?
        }
        algorithm => run(algorithm, [q, k, v], None, settings)?,
    };
    Ok((plain(&out.transpose(1, 2)?)?.flatten_from(2)?, kept))
}

/// The gradients of `q`, `k`, `v` and a float mask, each in the dtype it is wanted in.
///
/// Only the mask's costs memory of size `t * s`.
pub(crate) fn backward(
    saved: Saved<'_>,
    settings: Settings,
    wants: [Option<DType>; 4],
) -> Result<[Option<Tensor>; 4]> {
    run_backward(Algorithm::of_backward(saved, wants[3].is_some())?, saved, settings, wants)
}

fn run_backward(
    algorithm: Algorithm<'_, &Tensor>,
    saved: Saved<'_>,
    settings: Settings,
    wants: [Option<DType>; 4],
) -> Result<[Option<Tensor>; 4]> {
    match algorithm {
        Algorithm::Flash(gpu, products, output) => {
            let [dq, dk, dv] = flash::backward(gpu, products, saved, output, settings, wants)?;
            Ok([dq, dk, dv, None])
        }
        Algorithm::Products(gpu) => cuda::backward(gpu, saved, settings, wants),
        Algorithm::Blocks => backward::backward(saved, settings, wants),
        Algorithm::Portable => portable::backward(saved, settings, wants),
    }
}

/// [`backward`] without a mask, of as many heads of keys as of queries: the gradients of queries,
/// keys and values one after another, `(b, t, 3 * h * d)`.
pub(crate) fn backward_packed(saved: Saved<'_>, settings: Settings, want: DType) -> Result<Tensor> {
    let algorithm = Algorithm::of_backward(saved, false)?;
    if let Algorithm::Flash(gpu, products, output) = algorithm {
        return flash::backward_packed(gpu, products, saved, output, settings, want);
    }
    let saved = Saved { grad: &contiguous(saved.grad)?, ..saved };
    let wants = [Some(want), Some(want), Some(want), None];
    let parts = run_backward(algorithm, saved, settings, wants)?;
    let parts = parts.into_iter().flatten();
    let parts = parts.map(|part| contiguous(&part.transpose(1, 2)?)?.flatten_from(D::Minus2));
    let joined = cat(&parts.collect::<Result<Vec<_>>>()?, 2)?;
    in_dtype(&joined, want)
}
