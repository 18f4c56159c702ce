//! Multi-head attention.

use candle_core::{D, Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use super::Linear;
use super::linear::pytorch_linear;
use crate::error::ArgumentError;
use crate::ops;

/// Attention of several heads between linear layers, with PyTorch's parameters: `in_proj_weight (3 e, e)`,
/// `in_proj_bias (3 e)`, `out_proj.weight (e, e)`, `out_proj.bias (e)`. Its state dict loads.
///
/// The batch comes first, as with PyTorch's `batch_first=True`. Self attention is one product and
/// [`ops::sdpa_packed`]; otherwise queries, keys and values have a product each, and [`ops::sdpa`].
///
/// | of PyTorch's | here |
/// |---|---|
/// | `is_causal` | `causal`, which needs no mask beside it |
/// | `attn_mask` of floating point | `mask`, which is added to the scores |
/// | `attn_mask` of booleans, `key_padding_mask (b, s)` | `mask` of `U8`, with 1 where PyTorch has false: 1 attends. One for padding is reshaped to `(b, 1, 1, s)` |
/// | `dropout`, of attention weights | left out |
/// | `need_weights` | left out: weights are never in memory as a whole |
/// | `kdim`, `vdim`, `add_bias_kv`, `add_zero_attn` | left out |
///
/// # Precision
///
/// That of [`ops::linear`] and [`ops::sdpa`], which compute in the scope's dtype. The gradients of a 16-bit
/// `in_proj_weight` are rounded to its dtype where queries, keys and values are not one tensor, as candle narrows it.
///
/// # Examples
///
/// ```
/// use candle_amp::{Autocast, nn};
/// use candle_core::{DType, Device, Tensor};
///
/// let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let attention = nn::multihead_attention(8, 2, vb)?;
/// let x = Tensor::rand(-1f32, 1., (2, 3, 8), &Device::Cpu)?;
/// // The last step of the second sequence is padding.
/// let mask = Tensor::new(&[[1u8, 1, 1], [1, 1, 0]], &Device::Cpu)?.reshape((2, 1, 1, 3))?;
/// let amp = Autocast::new(DType::BF16);
/// let y = amp.scope(|| attention.forward(&x, &x, &x, Some(&mask), false))?;
/// assert_eq!((y.dims(), y.dtype()), (&[2, 3, 8][..], DType::BF16));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.MultiheadAttention`.
#[derive(Clone, Debug)]
pub struct MultiheadAttention {
    in_proj_weight: Tensor,
    in_proj_bias: Option<Tensor>,
    out_proj: Linear,
    num_heads: usize,
}

const OP: &str = "multihead_attention";

impl MultiheadAttention {
    /// A layer of given parameters.
    ///
    /// # Errors
    ///
    /// Shapes that do not fit; a `num_heads` that does not divide `e`.
    pub fn new(
        in_proj_weight: Tensor,
        in_proj_bias: Option<Tensor>,
        out_proj: Linear,
        num_heads: usize,
    ) -> Result<Self> {
        let &[out, embed_dim] = out_proj.weight().dims() else {
            return shape("out_proj.weight", out_proj.weight(), "(e, e)".into());
        };
        if out != embed_dim {
            return shape("out_proj.weight", out_proj.weight(), "(e, e)".into());
        }
        if num_heads == 0 || embed_dim == 0 || !embed_dim.is_multiple_of(num_heads) {
            let (got, expected) = (num_heads as f64, "a divisor of the embedding's size");
            return Err(ArgumentError::Setting { name: "num_heads", got, expected }.into());
        }
        let rows = 3 * embed_dim;
        if in_proj_weight.dims() != [rows, embed_dim] {
            return shape("in_proj_weight", &in_proj_weight, format!("({rows}, {embed_dim})"));
        }
        if let Some(bias) = in_proj_bias.as_ref().filter(|bias| bias.dims() != [rows]) {
            return shape("in_proj_bias", bias, format!("({rows})"));
        }
        Ok(Self { in_proj_weight, in_proj_bias, out_proj, num_heads })
    }

    /// The weight that makes queries, keys and values, one after another, `(3 e, e)`.
    pub fn in_proj_weight(&self) -> &Tensor {
        &self.in_proj_weight
    }

    /// Its bias, `(3 e)`.
    pub fn in_proj_bias(&self) -> Option<&Tensor> {
        self.in_proj_bias.as_ref()
    }

    /// The layer behind the heads.
    pub fn out_proj(&self) -> &Linear {
        &self.out_proj
    }

    /// How many heads share the embedding.
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// What `query` takes from `value`, by its likeness to `key`. One tensor given as all three is self attention.
    ///
    /// # Shapes
    ///
    /// `query (b, t, e)`, `key (b, s, e)`, `value (b, s, e)` → `(b, t, e)`. `mask` broadcasts to `(b, h, t, s)`: see
    /// [`ops::sdpa`]. A query that sees no key gets the bias of `out_proj`.
    ///
    /// # Errors
    ///
    /// Shapes, dtypes or devices that do not fit.
    pub fn forward(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        mask: Option<&Tensor>,
        causal: bool,
    ) -> Result<Tensor> {
        let embed_dim = self.in_proj_weight.dim(1)?;
        for (name, x) in [("query", query), ("key", key), ("value", value)] {
            if !matches!(*x.dims(), [_, _, width] if width == embed_dim) {
                return shape(name, x, format!("(b, steps, {embed_dim})"));
            }
        }
        let scale = 1.0 / ((embed_dim / self.num_heads) as f64).sqrt();
        if key.id() != query.id() || value.id() != query.id() {
            let [q, k, v] = [(query, 0), (key, 1), (value, 2)].map(|(x, part)| {
                let rows = |t: &Tensor| t.narrow(0, part * embed_dim, embed_dim);
                let bias = self.in_proj_bias.as_ref().map(rows).transpose()?;
                self.heads(&ops::linear(x, &rows(&self.in_proj_weight)?, bias.as_ref())?)
            });
            return self.output(&ops::sdpa(&q?, &k?, &v?, mask, causal, scale)?);
        }
        let packed = ops::linear(query, &self.in_proj_weight, self.in_proj_bias.as_ref())?;
        let Some(mask) = mask else {
            let y = ops::sdpa_packed(&packed, self.num_heads, causal, scale)?;
            return self.out_proj.forward(&y);
        };
        let [q, k, v] = [0, 1, 2]
            .map(|part| self.heads(&packed.narrow(D::Minus1, part * embed_dim, embed_dim)?));
        self.output(&ops::sdpa(&q?, &k?, &v?, Some(mask), causal, scale)?)
    }

    /// `x (b, t, e)` as `(b, h, t, d)`.
    fn heads(&self, x: &Tensor) -> Result<Tensor> {
        let (b, t, width) = x.dims3()?;
        x.reshape((b, t, self.num_heads, width / self.num_heads))?.transpose(1, 2)
    }

    /// The output layer of `y (b, h, t, d)`.
    fn output(&self, y: &Tensor) -> Result<Tensor> {
        self.out_proj.forward(&y.transpose(1, 2)?.flatten_from(2)?)
    }
}

fn shape<T>(name: &'static str, got: &Tensor, expected: String) -> Result<T> {
    Err(ArgumentError::Shape { op: OP, name, got: got.shape().clone(), expected }.into())
}

/// Attention of `num_heads` over embeddings of `embed_dim`; PyTorch's parameters and initial values.
///
/// # Errors
///
/// Those of [`MultiheadAttention::new`] and of the builder.
pub fn multihead_attention(
    embed_dim: usize,
    num_heads: usize,
    vb: VarBuilder,
) -> Result<MultiheadAttention> {
    multihead_attention_b(embed_dim, num_heads, true, vb)
}

/// Attention without biases; parameters `in_proj_weight` and `out_proj.weight`.
///
/// # Errors
///
/// As [`multihead_attention`].
pub fn multihead_attention_no_bias(
    embed_dim: usize,
    num_heads: usize,
    vb: VarBuilder,
) -> Result<MultiheadAttention> {
    multihead_attention_b(embed_dim, num_heads, false, vb)
}

pub(super) fn multihead_attention_b(
    embed_dim: usize,
    num_heads: usize,
    bias: bool,
    vb: VarBuilder,
) -> Result<MultiheadAttention> {
    let rows = 3 * embed_dim;
    // Glorot and Bengio's, of the weight as it is stored.
    let bound = (6.0 / (rows + embed_dim).max(1) as f64).sqrt();
    let init = Init::Uniform { lo: -bound, up: bound };
    let weight = vb.get_with_hints((rows, embed_dim), "in_proj_weight", init)?;
    let zeros = |size, name, vb: &VarBuilder| vb.get_with_hints(size, name, Init::Const(0.0));
    let in_proj_bias = bias.then(|| zeros(rows, "in_proj_bias", &vb)).transpose()?;
    let vb = vb.pp("out_proj");
    let out_proj = pytorch_linear(embed_dim, embed_dim, false, vb.clone())?;
    let out_bias = bias.then(|| zeros(embed_dim, "bias", &vb)).transpose()?;
    let out_proj = Linear::new(out_proj.weight().clone(), out_bias);
    MultiheadAttention::new(weight, in_proj_bias, out_proj, num_heads)
}
