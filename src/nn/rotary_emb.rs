//! `candle_nn::rotary_emb`, with gradients, and for views too.

use candle_core::{Result, Tensor};

pub use crate::ops::{rope, rope_i, rope_thd};

/// The same as [`rope`]: candle's, which is fast, gives no gradient, and its `rope_slow` does.
///
/// # Errors
///
/// Those of [`rope`].
pub fn rope_slow(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope(x, cos, sin)
}

/// The same as [`rope_i`].
///
/// # Errors
///
/// Those of [`rope_i`].
pub fn rope_i_slow(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rope_i(x, cos, sin)
}
