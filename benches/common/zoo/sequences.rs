//! Transformers and recurrent networks.

use candle_amp::nn::{
    Conv2d, Conv2dConfig, Embedding, LSTM, LSTMConfig, LayerNorm, Linear, conv2d, embedding,
    layer_norm, linear, lstm,
};
use candle_amp::ops;
use candle_core::{IndexOp, Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::networks::{GptBlock, GptSize};

const NORMAL: Init = Init::Randn { mean: 0.0, stdev: 0.02 };

fn blocks(
    layers: usize,
    width: usize,
    heads: usize,
    causal: bool,
    vb: &VarBuilder,
) -> Result<Vec<GptBlock>> {
    let block = |i| GptBlock::new(width, heads, true, vb.pp("blocks").pp(i));
    (0..layers).map(|i| Ok(block(i)?.with(causal, ops::gelu_erf))).collect()
}

/// A vision transformer with a token for the class.
pub(super) struct ViT {
    patches: Conv2d,
    class: Tensor,
    places: Tensor,
    blocks: Vec<GptBlock>,
    norm: LayerNorm,
    head: Linear,
}

impl ViT {
    const WIDTH: usize = 192;
    const HEADS: usize = 3;
    const PATCH: usize = 4;
    const PATCHES: usize = (32 / Self::PATCH) * (32 / Self::PATCH);

    pub(super) fn new(layers: usize, vb: VarBuilder) -> Result<Self> {
        let config = Conv2dConfig { stride: Self::PATCH, ..Default::default() };
        let token = |tokens, name| vb.get_with_hints((tokens, Self::WIDTH), name, NORMAL);
        Ok(Self {
            patches: conv2d(3, Self::WIDTH, Self::PATCH, config, vb.pp("patches"))?,
            class: token(1, "class_token")?,
            places: token(1 + Self::PATCHES, "places")?,
            blocks: blocks(layers, Self::WIDTH, Self::HEADS, false, &vb)?,
            norm: layer_norm(Self::WIDTH, 1e-5, vb.pp("norm"))?,
            head: linear(Self::WIDTH, 10, vb.pp("head"))?,
        })
    }
}

impl Module for ViT {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.patches.forward(x)?.flatten_from(2)?.transpose(1, 2)?;
        let class = self.class.broadcast_as((x.dim(0)?, 1, Self::WIDTH))?;
        let x = ops::add(&ops::cat(&[&class, &x], 1)?, &self.places)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        self.head.forward(&self.norm.forward(&x)?.i((.., 0))?)
    }
}

/// nanoGPT. A port of it: the benchmarks have a GPT-2 with the head in its loss already.
pub(super) struct NanoGpt {
    tokens: Embedding,
    places: Embedding,
    blocks: Vec<GptBlock>,
    norm: LayerNorm,
}

impl NanoGpt {
    pub(super) fn new(size: GptSize, vb: VarBuilder) -> Result<Self> {
        let GptSize { layers, width, heads, vocabulary, context } = size;
        let table = |rows, vb: VarBuilder| -> Result<_> {
            Ok(Embedding::new(vb.get_with_hints((rows, width), "weight", NORMAL)?, width))
        };
        Ok(Self {
            tokens: table(vocabulary, vb.pp("tokens"))?,
            places: table(context, vb.pp("places"))?,
            blocks: blocks(layers, width, heads, true, &vb)?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
        })
    }
}

impl Module for NanoGpt {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let places = Tensor::arange(0, x.dim(1)? as u32, x.device())?;
        let places = self.places.forward(&places)?;
        let x = ops::add(&self.tokens.forward(x)?, &places)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        ops::linear(&self.norm.forward(&x)?, self.tokens.embeddings(), None)
    }
}

/// A language model of stacked LSTMs.
pub(super) struct LstmLm {
    tokens: Embedding,
    layers: Vec<LSTM>,
    head: Linear,
}

impl LstmLm {
    pub(super) fn new(
        vocabulary: usize,
        width: usize,
        layers: usize,
        vb: VarBuilder,
    ) -> Result<Self> {
        let layer = |layer_idx| {
            let config = LSTMConfig { layer_idx, ..Default::default() };
            lstm(width, width, config, vb.pp("lstm"))
        };
        Ok(Self {
            tokens: embedding(vocabulary, width, vb.pp("tokens"))?,
            layers: (0..layers).map(layer).collect::<Result<_>>()?,
            head: linear(width, vocabulary, vb.pp("head"))?,
        })
    }
}

impl Module for LstmLm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let layer =
            |x: Tensor, layer: &LSTM| Ok::<_, candle_core::Error>(layer.sequence(&x, None)?.0);
        self.head.forward(&self.layers.iter().try_fold(self.tokens.forward(x)?, layer)?)
    }
}
