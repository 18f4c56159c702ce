//! Attention.

use candle_core::{DType, Result, Tensor};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::attention::{self as kernel, Kept, Settings};

/// Scaled dot product attention: `softmax(q · kᵀ · scale + mask) · v`.
///
/// # Shapes
///
/// `q (b, h, t, d)`, `k (b, h_kv, s, d)`, `v (b, h_kv, s, dv)` → `(b, h, t, dv)`. `h` is a multiple
/// of `h_kv`: with fewer heads of keys, as in grouped-query attention, `h / h_kv` queries' heads in
/// a row share one. Views are read in place.
///
/// `mask` broadcasts to `(b, h, t, s)`. `U8` is a choice: 1 attends, 0 does not. Floating point is
/// added to the scores, and gets a gradient. With `causal` too, query `i` sees keys `0..=i` alone,
/// whatever `t` and `s` are, as in PyTorch: one query with a cache of keys wants no `causal`.
///
/// # Precision
///
/// Under autocast all are cast to the compute dtype, a floating-point mask too: below -65504 it is
/// a negative infinity in `F16`, which hides a key. Outside, `q`, `k` and `v` share a dtype, and
/// the mask may have any. Products, scores, softmax and all sums are `F32`; the output is rounded
/// once, to the dtype of `q`. Probabilities are not rounded in between, but on CUDA: there they are,
/// and in backward the gradients of scores too, to the dtype of `q`, before the next product. Scores beyond 10⁷ lose digits on
/// tensor cores, and from about 10⁸ on may give NaN or 0 there.
///
/// Of what has a size of `t · s`, nothing is kept: backward makes the scores again, from two numbers
/// a query; and on CUDA, for 16-bit inputs, the output in `F32`. The gradient of a mask, where it is wanted,
/// takes that much in `F32` for a while.
///
/// A query that sees no key gets zeros, and gives no gradient. So it does in PyTorch since 2.5;
/// before, it got NaN. What is hidden weighs 0, and 0 times an infinite or NaN value is NaN, here
/// as there.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; a `scale` that is not finite.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor};
///
/// // Heads are usually split off the last dimension, and moved.
/// let x = Tensor::ones((2, 5, 3, 8), DType::BF16, &Device::Cpu)?.transpose(1, 2)?;
/// let y = ops::sdpa(&x, &x, &x, None, true, 1.0 / 8f64.sqrt())?;
/// assert_eq!((y.dims(), y.dtype()), (&[2, 3, 5, 8][..], DType::BF16));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// Vaswani et al., [Attention Is All You Need](https://arxiv.org/abs/1706.03762); the backward is
/// that of [FlashAttention](https://arxiv.org/abs/2205.14135).
/// `torch.nn.functional.scaled_dot_product_attention`.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    causal: bool,
    scale: f64,
) -> Result<Tensor> {
    run(q, k, v, mask, Settings { scale, causal, softcap: None })
}

/// As [`sdpa`], with the scaled scores held between `-softcap` and `softcap` before the mask:
/// `softcap · tanh(score / softcap)`.
///
/// # Errors
///
/// As [`sdpa`], and a `softcap` that is not finite, or not above zero.
///
/// # References
///
/// [Gemma 2](https://arxiv.org/abs/2408.00118), section 2.
pub fn sdpa_softcapped(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    causal: bool,
    scale: f64,
    softcap: f64,
) -> Result<Tensor> {
    if !(softcap > 0.0 && softcap.is_finite()) {
        let expected = "a finite number above zero";
        return Err(ArgumentError::Setting { name: "softcap", got: softcap, expected }.into());
    }
    run(q, k, v, mask, Settings { scale, causal, softcap: Some(softcap) })
}

fn run(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    settings: Settings,
) -> Result<Tensor> {
    if !settings.scale.is_finite() {
        let (got, expected) = (settings.scale, "a finite number");
        return Err(ArgumentError::Setting { name: "scale", got, expected }.into());
    }
    let inputs: Vec<&Tensor> = [q, k, v].into_iter().chain(mask).collect();
    apply(Sdpa(settings), &inputs)
}

struct Sdpa(Settings);

struct Saved {
    /// Queries, keys, values and, if there is one, the mask.
    inputs: Vec<Tensor>,
    kept: Kept,
}

impl Operator for Sdpa {
    type Saved = Saved;

    fn op(&self) -> Op {
        Op::Sdpa
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let (q, k, v, mask) = (&inputs[0], &inputs[1], &inputs[2], inputs.get(3));
        check_operand(self.op(), q, "q", q, false)?;
        check_operand(self.op(), q, "k", k, true)?;
        check_operand(self.op(), q, "v", v, true)?;
        let &[b, h, t, d] = q.dims() else {
            return shape_error(self.op(), "q", q, "(b, h, t, d)".into());
        };
        let (h_kv, s) = match *k.dims() {
            [k_b, h_kv, s, k_d] if k_b == b && k_d == d && h_kv > 0 && h % h_kv == 0 => (h_kv, s),
            _ => {
                let expected = format!("({b}, h_kv, s, {d}), h_kv | {h}, for q {:?}", q.shape());
                return shape_error(self.op(), "k", k, expected);
            }
        };
        if d == 0 {
            return shape_error(self.op(), "q", q, "at least one element a query".into());
        }
        if !matches!(*v.dims(), [v_b, v_h, v_s, _] if [v_b, v_h, v_s] == [b, h_kv, s]) {
            let expected = format!("({b}, {h_kv}, {s}, dv) for k {:?}", k.shape());
            return shape_error(self.op(), "v", v, expected);
        }
        if let Some(mask) = mask {
            self.check_mask(q, mask, [b, h, t, s])?;
        }
        let (y, kept) = kernel::forward(q, k, v, mask, self.0)?;
        Ok((y, Saved { inputs: inputs.to_vec(), kept }))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Saved { inputs, kept } = ctx.saved;
        let saved = kernel::Saved {
            q: &inputs[0],
            k: &inputs[1],
            v: &inputs[2],
            mask: inputs.get(3),
            kept,
            grad: ctx.gradient,
        };
        let wants = std::array::from_fn(|i| ctx.wants.get(i).copied().flatten());
        let gradients = kernel::backward(saved, self.0, wants)?.into_iter().take(inputs.len());
        Ok(gradients.map(|gradient| gradient.map(Gradient::owned)).collect())
    }
}

impl Sdpa {
    fn check_mask(&self, q: &Tensor, mask: &Tensor, dims: [usize; 4]) -> Result<()> {
        if mask.dtype() != DType::U8 {
            if !mask.dtype().is_float() {
                let expected = "U8, where 1 attends, or floating point, to add".to_string();
                let (op, got) = (self.op().name(), mask.dtype());
                return Err(ArgumentError::DType { op, name: "mask", got, expected }.into());
            }
            check_operand(self.op(), q, "mask", mask, false)?;
        }
        let (got, expected) = (mask.device().location(), q.device().location());
        if got != expected {
            let op = self.op().name();
            return Err(ArgumentError::Device { op, name: "mask", got, expected }.into());
        }
        let mut pairs = mask.dims().iter().rev().zip(dims.iter().rev());
        if mask.rank() > 4 || !pairs.all(|(&got, &size)| got == 1 || got == size) {
            let expected = format!("one that broadcasts to (b, h, t, s) = {dims:?}");
            return shape_error(self.op(), "mask", mask, expected);
        }
        Ok(())
    }
}
