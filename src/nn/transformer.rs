//! PyTorch's transformer layers.

use candle_core::{Result, Tensor};
use candle_nn::{LayerNormConfig, Module, ModuleT, VarBuilder};

use super::attention::multihead_attention_b;
use super::linear::pytorch_linear;
use super::{Activation, Dropout, LayerNorm, Linear, MultiheadAttention, layer_norm};
use crate::ops;

/// Settings of [`TransformerEncoderLayer`] and [`TransformerDecoderLayer`]; PyTorch's names and defaults.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct TransformerConfig {
    /// The size between the two linear layers. Default `2048`.
    pub dim_feedforward: usize,
    /// The probability with which an element is dropped, behind each part and between the two linear layers. Attention
    /// weights are not dropped, unlike in PyTorch. Default `0.1`.
    pub dropout: f32,
    /// Between the two linear layers. [`Activation::Gelu`] is PyTorch's `gelu`. Default [`Activation::Relu`].
    pub activation: Activation,
    /// What norms add to the variance. Default `1e-5`.
    pub layer_norm_eps: f64,
    /// Whether norms come before each part, or after its residual. Default `false`.
    pub norm_first: bool,
    /// Whether linear layers, attention and norms have biases. Default `true`.
    pub bias: bool,
}

impl Default for TransformerConfig {
    fn default() -> Self {
        Self {
            dim_feedforward: 2048,
            dropout: 0.1,
            activation: Activation::Relu,
            layer_norm_eps: 1e-5,
            norm_first: false,
            bias: true,
        }
    }
}

impl TransformerConfig {
    fn norm(&self, d_model: usize, vb: VarBuilder) -> Result<LayerNorm> {
        let eps = self.layer_norm_eps;
        layer_norm(d_model, LayerNormConfig { eps, remove_mean: true, affine: self.bias }, vb)
    }
}

/// The two linear layers, and how any part joins its residual.
#[derive(Clone, Debug)]
struct Block {
    linear1: Linear,
    linear2: Linear,
    dropout: Dropout,
    config: TransformerConfig,
}

impl Block {
    fn new(d_model: usize, config: TransformerConfig, vb: &VarBuilder) -> Result<Self> {
        let TransformerConfig { dim_feedforward: width, bias, .. } = config;
        Ok(Self {
            linear1: pytorch_linear(d_model, width, bias, vb.pp("linear1"))?,
            linear2: pytorch_linear(width, d_model, bias, vb.pp("linear2"))?,
            dropout: Dropout::new(config.dropout),
            config,
        })
    }

    /// `x` and what `part` makes of it, with the norm before or after.
    fn residual(
        &self,
        x: &Tensor,
        norm: &LayerNorm,
        train: bool,
        part: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let add = |y: Tensor| ops::add(x, &self.dropout.forward(&y, train)?);
        match self.config.norm_first {
            true => add(part(&norm.forward(x)?)?),
            false => norm.forward(&add(part(x)?)?),
        }
    }

    fn feed_forward(&self, x: &Tensor, norm: &LayerNorm, train: bool) -> Result<Tensor> {
        self.residual(x, norm, train, |x| {
            let hidden = self.config.activation.forward(&self.linear1.forward(x)?)?;
            self.linear2.forward(&self.dropout.forward(&hidden, train)?)
        })
    }
}

/// Self attention and two linear layers, each with a residual and a norm; PyTorch's parameters `self_attn`, `linear1`,
/// `linear2`, `norm1`, `norm2`. The batch comes first.
///
/// # Precision
///
/// That of [`MultiheadAttention`] and its operators. Where the input is `F32`, residuals stay `F32` under autocast.
///
/// # Examples
///
/// ```
/// use candle_amp::{Autocast, nn};
/// use candle_core::{DType, Device, Tensor};
///
/// let vb = nn::var_builder(&nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let config = nn::TransformerConfig { dim_feedforward: 32, norm_first: true, ..Default::default() };
/// let layer = nn::transformer_encoder_layer(8, 2, config, vb)?;
/// let x = Tensor::rand(-1f32, 1., (2, 3, 8), &Device::Cpu)?;
/// let causal = true; // step 1 does not see step 2
/// let y = Autocast::new(DType::BF16).scope(|| layer.forward(&x, None, causal, false))?;
/// assert_eq!((y.dims(), y.dtype()), (&[2, 3, 8][..], DType::F32));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.TransformerEncoderLayer` with `batch_first=True`.
#[derive(Clone, Debug)]
pub struct TransformerEncoderLayer {
    self_attn: MultiheadAttention,
    block: Block,
    norm1: LayerNorm,
    norm2: LayerNorm,
}

impl TransformerEncoderLayer {
    /// The layer on `src (b, t, e)` → `(b, t, e)`; `mask` and `causal` are those of [`MultiheadAttention::forward`].
    /// Elements are dropped where `train` is set.
    ///
    /// # Errors
    ///
    /// Shapes, dtypes or devices that do not fit; a probability outside 0 to 1.
    pub fn forward(
        &self,
        src: &Tensor,
        mask: Option<&Tensor>,
        causal: bool,
        train: bool,
    ) -> Result<Tensor> {
        let attend = |x: &Tensor| self.self_attn.forward(x, x, x, mask, causal);
        let x = self.block.residual(src, &self.norm1, train, attend)?;
        self.block.feed_forward(&x, &self.norm2, train)
    }
}

impl ModuleT for TransformerEncoderLayer {
    /// Without a mask.
    fn forward_t(&self, src: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(src, None, false, train)
    }
}

/// An encoder layer for embeddings of `d_model`, with `nhead` heads; PyTorch's initial values.
///
/// # Errors
///
/// Those of [`MultiheadAttention::new`] and of the builder.
pub fn transformer_encoder_layer(
    d_model: usize,
    nhead: usize,
    config: TransformerConfig,
    vb: VarBuilder,
) -> Result<TransformerEncoderLayer> {
    Ok(TransformerEncoderLayer {
        self_attn: multihead_attention_b(d_model, nhead, config.bias, vb.pp("self_attn"))?,
        block: Block::new(d_model, config, &vb)?,
        norm1: config.norm(d_model, vb.pp("norm1"))?,
        norm2: config.norm(d_model, vb.pp("norm2"))?,
    })
}

/// Self attention, attention to what an encoder gives, and two linear layers; PyTorch's parameters `self_attn`,
/// `multihead_attn`, `linear1`, `linear2`, `norm1`, `norm2`, `norm3`. The batch comes first.
///
/// # Precision
///
/// As [`TransformerEncoderLayer`].
///
/// # References
///
/// `torch.nn.TransformerDecoderLayer` with `batch_first=True`.
#[derive(Clone, Debug)]
pub struct TransformerDecoderLayer {
    self_attn: MultiheadAttention,
    multihead_attn: MultiheadAttention,
    block: Block,
    norm1: LayerNorm,
    norm2: LayerNorm,
    norm3: LayerNorm,
}

impl TransformerDecoderLayer {
    /// The layer on `tgt (b, t, e)` and `memory (b, s, e)` → `(b, t, e)`. `tgt_mask` and `causal` are those of self
    /// attention, `memory_mask` that of attention to `memory`: see [`MultiheadAttention::forward`].
    ///
    /// # Errors
    ///
    /// As [`TransformerEncoderLayer::forward`].
    pub fn forward(
        &self,
        tgt: &Tensor,
        memory: &Tensor,
        tgt_mask: Option<&Tensor>,
        memory_mask: Option<&Tensor>,
        causal: bool,
        train: bool,
    ) -> Result<Tensor> {
        let attend = |x: &Tensor| self.self_attn.forward(x, x, x, tgt_mask, causal);
        let x = self.block.residual(tgt, &self.norm1, train, attend)?;
        let attend =
            |x: &Tensor| self.multihead_attn.forward(x, memory, memory, memory_mask, false);
        let x = self.block.residual(&x, &self.norm2, train, attend)?;
        self.block.feed_forward(&x, &self.norm3, train)
    }
}

/// A decoder layer, as [`transformer_encoder_layer`].
///
/// # Errors
///
/// As there.
pub fn transformer_decoder_layer(
    d_model: usize,
    nhead: usize,
    config: TransformerConfig,
    vb: VarBuilder,
) -> Result<TransformerDecoderLayer> {
    let attention = |name| multihead_attention_b(d_model, nhead, config.bias, vb.pp(name));
    Ok(TransformerDecoderLayer {
        self_attn: attention("self_attn")?,
        multihead_attn: attention("multihead_attn")?,
        block: Block::new(d_model, config, &vb)?,
        norm1: config.norm(d_model, vb.pp("norm1"))?,
        norm2: config.norm(d_model, vb.pp("norm2"))?,
        norm3: config.norm(d_model, vb.pp("norm3"))?,
    })
}

/// Encoder layers one after another, and a norm behind them if there is one; PyTorch's parameters `layers.0` and so on,
/// and `norm`.
///
/// # References
///
/// `torch.nn.TransformerEncoder`.
pub type TransformerEncoder = TransformerStack<TransformerEncoderLayer>;

/// Decoder layers one after another, and a norm behind them if there is one; parameters as [`TransformerEncoder`].
///
/// # References
///
/// `torch.nn.TransformerDecoder`.
pub type TransformerDecoder = TransformerStack<TransformerDecoderLayer>;

/// Layers one after another: a [`TransformerEncoder`] or a [`TransformerDecoder`].
#[derive(Clone, Debug)]
pub struct TransformerStack<L> {
    layers: Vec<L>,
    norm: Option<LayerNorm>,
}

impl<L> TransformerStack<L> {
    /// Given layers. `norm` is wanted where the layers have their norms first.
    pub fn new(layers: Vec<L>, norm: Option<LayerNorm>) -> Self {
        Self { layers, norm }
    }

    /// So many layers, and the norm that the configuration wants behind them.
    fn build(
        num_layers: usize,
        layer: impl Fn(VarBuilder) -> Result<L>,
        (d_model, config): (usize, TransformerConfig),
        vb: &VarBuilder,
    ) -> Result<Self> {
        let layers =
            (0..num_layers).map(|i| layer(vb.pp("layers").pp(i))).collect::<Result<_>>()?;
        let norm = config.norm_first.then(|| config.norm(d_model, vb.pp("norm"))).transpose()?;
        Ok(Self { layers, norm })
    }

    fn fold(&self, x: &Tensor, run: impl Fn(&L, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let x = self.layers.iter().try_fold(x.clone(), |x, layer| run(layer, &x))?;
        match &self.norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }
}

impl TransformerEncoder {
    /// All layers, with the arguments of [`TransformerEncoderLayer::forward`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn forward(
        &self,
        src: &Tensor,
        mask: Option<&Tensor>,
        causal: bool,
        train: bool,
    ) -> Result<Tensor> {
        self.fold(src, |layer, x| layer.forward(x, mask, causal, train))
    }
}

impl ModuleT for TransformerEncoder {
    /// Without a mask.
    fn forward_t(&self, src: &Tensor, train: bool) -> Result<Tensor> {
        self.forward(src, None, false, train)
    }
}

/// `num_layers` encoder layers, each with initial values of its own (PyTorch copies one layer), and a norm behind them
/// where the configuration has norms first.
///
/// # Errors
///
/// As [`transformer_encoder_layer`].
pub fn transformer_encoder(
    num_layers: usize,
    d_model: usize,
    nhead: usize,
    config: TransformerConfig,
    vb: VarBuilder,
) -> Result<TransformerEncoder> {
    let layer = |vb: VarBuilder| transformer_encoder_layer(d_model, nhead, config, vb);
    TransformerStack::build(num_layers, layer, (d_model, config), &vb)
}

impl TransformerDecoder {
    /// All layers, with the arguments of [`TransformerDecoderLayer::forward`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn forward(
        &self,
        tgt: &Tensor,
        memory: &Tensor,
        tgt_mask: Option<&Tensor>,
        memory_mask: Option<&Tensor>,
        causal: bool,
        train: bool,
    ) -> Result<Tensor> {
        self.fold(tgt, |layer, x| layer.forward(x, memory, tgt_mask, memory_mask, causal, train))
    }
}

/// `num_layers` decoder layers, as [`transformer_encoder`].
///
/// # Errors
///
/// As there.
pub fn transformer_decoder(
    num_layers: usize,
    d_model: usize,
    nhead: usize,
    config: TransformerConfig,
    vb: VarBuilder,
) -> Result<TransformerDecoder> {
    let layer = |vb: VarBuilder| transformer_decoder_layer(d_model, nhead, config, vb);
    TransformerStack::build(num_layers, layer, (d_model, config), &vb)
}
