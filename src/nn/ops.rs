//! `candle_nn::ops`, with gradients: what candle fuses into one kernel gives none there.

use candle_core::shape::Dim;
use candle_core::{D, Result, Tensor};

pub use crate::ops::{
    dropout, hard_sigmoid, leaky_relu, log_softmax, mish, selu, sigmoid, silu, softmax, swiglu,
};

use crate::error::bail;
use crate::ops;

/// [`softmax`] along the last dimension.
///
/// # Errors
///
/// Those of [`softmax`].
pub fn softmax_last_dim(xs: &Tensor) -> Result<Tensor> {
    softmax(xs, D::Minus1.to_index(xs.shape(), "softmax_last_dim")?)
}

/// [`ops::layer_norm`].
///
/// # Errors
///
/// Those of [`ops::layer_norm`].
pub fn layer_norm(xs: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    ops::layer_norm(xs, Some(alpha), Some(beta), eps.into())
}

/// The same as [`layer_norm`].
///
/// # Errors
///
/// Those of [`ops::layer_norm`].
pub fn layer_norm_slow(x: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    layer_norm(x, alpha, beta, eps)
}

/// [`ops::rms_norm`].
///
/// # Errors
///
/// Those of [`ops::rms_norm`].
pub fn rms_norm(xs: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    ops::rms_norm(xs, Some(alpha), eps.into())
}

/// The same as [`rms_norm`].
///
/// # Errors
///
/// Those of [`ops::rms_norm`].
pub fn rms_norm_slow(x: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    rms_norm(x, alpha, eps)
}

/// [`ops::sdpa`]; with a `softcapping` other than 1, [`ops::sdpa_softcapped`]. candle's runs on
/// Metal alone.
///
/// As with candle's, a single query sees all keys, also where `do_causal` is set: it is the last of a sequence whose keys are
/// cached.
///
/// # Errors
///
/// Those of [`ops::sdpa_softcapped`]; `do_causal` with more than one query and another number of keys: candle aligns the mask
/// to the last key, PyTorch and `ops::sdpa` to the first.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    let (scale, softcapping) = (scale.into(), softcapping.into());
    let [queries, keys] = [q, k].map(|x| x.dims().iter().rev().nth(1).copied().unwrap_or(0));
    let is_causal = do_causal && queries != 1;
    if is_causal && queries != keys {
        bail!(
            "sdpa: {queries} queries and {keys} keys with `do_causal`: give a mask that says which keys each query sees"
        )
    }
    match softcapping {
        1.0 => ops::sdpa(q, k, v, mask, is_causal, scale),
        _ => ops::sdpa_softcapped(q, k, v, mask, is_causal, scale, softcapping),
    }
}
