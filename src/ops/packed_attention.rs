//! Attention on what one linear layer gives.

use candle_core::{IndexOp, Result, Tensor};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::attention::{self as kernel, Kept, Settings};

/// [`sdpa`](super::sdpa) of queries, keys and values that one linear layer made, one after another
/// in the last dimension, each of `heads` heads.
///
/// The same numbers as splitting, moving the heads, attending and moving them back. But candle's
/// views cost backward a tensor of zeros and a sum for each, in the size of `qkv`, and this none.
///
/// # Shapes
///
/// `qkv (b, t, 3 · heads · d)` → `(b, t, heads · d)`.
///
/// # Precision
///
/// That of [`sdpa`](super::sdpa), whose row of the operator table it follows.
///
/// # Errors
///
/// A last dimension that is not three times a multiple of `heads`; no heads; a `scale` that is not
/// finite.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor};
///
/// let qkv = Tensor::ones((2, 5, 3 * 4 * 8), DType::F32, &Device::Cpu)?; // 4 heads of 8
/// let y = ops::sdpa_packed(&qkv, 4, true, 1.0 / 8f64.sqrt())?;
/// assert_eq!(y.dims(), [2, 5, 4 * 8]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `flash_attn_qkvpacked_func` of [FlashAttention](https://arxiv.org/abs/2205.14135).
pub fn sdpa_packed(qkv: &Tensor, heads: usize, causal: bool, scale: f64) -> Result<Tensor> {
    if !scale.is_finite() {
        let expected = "a finite number";
        return Err(ArgumentError::Setting { name: "scale", got: scale, expected }.into());
    }
    if heads == 0 {
        return Err(
            ArgumentError::Setting { name: "heads", got: 0.0, expected: "at least 1" }.into()
        );
    }
    apply(PackedAttention { heads, settings: Settings { scale, causal, softcap: None } }, &[qkv])
}

struct PackedAttention {
    heads: usize,
    settings: Settings,
}

impl PackedAttention {
    /// Views of the queries, keys and values, each `(b, heads, t, d)`.
    fn parts(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let (b, t, width) = qkv.dims3()?;
        let qkv = qkv.reshape((b, t, 3, self.heads, width / (3 * self.heads)))?;
        let part = |i| qkv.i((.., .., i))?.transpose(1, 2);
        Ok([part(0)?, part(1)?, part(2)?])
    }
}

impl Operator for PackedAttention {
    /// The input, and what forward leaves.
    type Saved = (Tensor, Kept);

    fn op(&self) -> Op {
        Op::Sdpa
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let qkv = &inputs[0];
        check_operand(self.op(), qkv, "qkv", qkv, false)?;
        if !matches!(*qkv.dims(), [_, _, width] if width > 0 && width % (3 * self.heads) == 0) {
            let expected = format!("(b, t, 3 · {} heads · d)", self.heads);
            return shape_error(self.op(), "qkv", qkv, expected);
        }
        let [q, k, v] = self.parts(qkv)?;
        let (y, kept) = kernel::forward_rows(&q, &k, &v, self.settings)?;
        Ok((y, (qkv.clone(), kept)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let Some(want) = ctx.wants[0] else { return Ok(vec![None]) };
        let (qkv, kept) = ctx.saved;
        let [q, k, v] = self.parts(qkv)?;
        let (b, t, width) = ctx.gradient.dims3()?;
        let grad = ctx.gradient.reshape((b, t, self.heads, width / self.heads))?.transpose(1, 2)?;
        let saved = kernel::Saved { q: &q, k: &k, v: &v, mask: None, kept, grad: &grad };
        let joined = kernel::backward_packed(saved, self.settings, want)?;
        Ok(vec![Some(Gradient::owned(joined))])
    }
}
