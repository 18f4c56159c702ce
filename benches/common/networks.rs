//! Networks on the crate's operators.

use candle_amp::nn::{
    BatchNorm, Conv2d, Conv2dConfig, LayerNorm, Linear, batch_norm, conv2d_no_bias, layer_norm,
    linear, linear_no_bias,
};
use candle_amp::ops;
use candle_amp::optim::SgdConfig;
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Module, ModuleT, VarBuilder};
use serde::{Deserialize, Serialize};

/// What every training step of a residual network here uses.
pub const SGD: SgdConfig = SgdConfig {
    lr: 0.01,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 5e-4,
    nesterov: false,
    maximize: false,
};

/// A batch of images of CIFAR-10's size and their classes.
///
/// # Errors
///
/// What drawing them meets.
pub fn images(batch: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let classes = Tensor::from_iter((0..batch as u32).map(|i| i % 10), device)?;
    Ok((Tensor::randn(0f32, 1.0, (batch, 3, 32, 32), device)?, classes))
}

/// Which residual network. The stem keeps images as large as CIFAR-10's are.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct ResNetSize {
    /// Channels of the first stage; each has twice those of the one before.
    pub width: usize,
    /// Blocks of each stage, 0 for none.
    pub stages: [usize; 4],
    /// Blocks of three convolutions, 1x1, 3x3 and 1x1 to four times the channels, not of two 3x3.
    pub bottleneck: bool,
}

/// A convolution, `kernel / 2` padded, and its batch norm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvSize {
    pub(crate) sides: [usize; 2],
    pub(crate) kernel: usize,
    pub(crate) stride: usize,
}

/// The convolutions of a block, and the one around them where the shape changes.
#[derive(Clone, Debug)]
pub(crate) struct BlockSize {
    pub(crate) inner: Vec<ConvSize>,
    pub(crate) shortcut: Option<ConvSize>,
}

impl ResNetSize {
    /// ResNet-18.
    pub const RESNET18: Self = Self { width: 64, stages: [2, 2, 2, 2], bottleneck: false };
    /// ResNet-50.
    pub const RESNET50: Self = Self { width: 64, stages: [3, 4, 6, 3], bottleneck: true };

    /// Three stages of `depth` blocks, as for CIFAR-10.
    pub const fn cifar(width: usize, depth: usize) -> Self {
        Self { width, stages: [depth, depth, depth, 0], bottleneck: false }
    }

    pub(crate) fn stem(self) -> ConvSize {
        ConvSize { sides: [3, self.width], kernel: 3, stride: 1 }
    }

    /// The blocks, and how many channels come out of the last.
    pub(crate) fn blocks(self) -> (Vec<BlockSize>, usize) {
        let (mut blocks, mut from) = (Vec::new(), self.width);
        for (stage, count) in self.stages.into_iter().enumerate() {
            let narrow = self.width << stage;
            let to = if self.bottleneck { 4 * narrow } else { narrow };
            for i in 0..count {
                let stride = if stage > 0 && i == 0 { 2 } else { 1 };
                let conv = |sides, kernel, stride| ConvSize { sides, kernel, stride };
                let inner = match self.bottleneck {
                    true => vec![
                        conv([from, narrow], 1, 1),
                        conv([narrow, narrow], 3, stride),
                        conv([narrow, to], 1, 1),
                    ],
                    false => vec![conv([from, to], 3, stride), conv([to, to], 3, 1)],
                };
                let shortcut = (from != to).then(|| conv([from, to], 1, stride));
                blocks.push(BlockSize { inner, shortcut });
                from = to;
            }
        }
        (blocks, from)
    }
}

type ConvNorm = (Conv2d, BatchNorm);

/// A residual network from images, `(n, 3, 32, 32)`, to logits, `(n, 10)`.
#[derive(Debug)]
pub struct ResNet {
    stem: ConvNorm,
    /// Convolutions, and the one around them.
    blocks: Vec<(Vec<ConvNorm>, Option<ConvNorm>)>,
    head: Linear,
    channels_last: bool,
}

impl ResNet {
    /// With initial weights from `vb`.
    ///
    /// # Errors
    ///
    /// What drawing them meets.
    pub fn new(size: ResNetSize, vb: VarBuilder) -> Result<Self> {
        let (blocks, features) = size.blocks();
        let block = |(i, block): (usize, &BlockSize)| {
            let vb = vb.pp(i);
            let inner = block.inner.iter().enumerate();
            let inner = inner.map(|(i, size)| conv_norm(*size, vb.pp(i)));
            let shortcut = block.shortcut.map(|size| conv_norm(size, vb.pp("shortcut")));
            Ok((inner.collect::<Result<_>>()?, shortcut.transpose()?))
        };
        Ok(Self {
            stem: conv_norm(size.stem(), vb.pp("stem"))?,
            blocks: blocks.iter().enumerate().map(block).collect::<Result<_>>()?,
            head: linear(features, 10, vb.pp("head"))?,
            channels_last: false,
        })
    }

    /// With images turned as they enter.
    #[must_use]
    pub fn channels_last(self) -> Self {
        let turn = |(conv, norm): ConvNorm| (conv.channels_last(), norm.channels_last());
        let blocks = self
            .blocks
            .into_iter()
            .map(|(inner, shortcut)| (inner.into_iter().map(turn).collect(), shortcut.map(turn)));
        Self {
            stem: turn(self.stem),
            blocks: blocks.collect(),
            head: self.head,
            channels_last: true,
        }
    }

    /// In training.
    ///
    /// # Errors
    ///
    /// What the operators meet.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = if self.channels_last { &x.permute((0, 2, 3, 1))? } else { x };
        let mut x = rectified(&self.stem, x, None)?;
        for (inner, shortcut) in &self.blocks {
            let around = match shortcut {
                Some((conv, norm)) => norm.forward_t(&conv.forward(&x)?, true)?,
                None => x.clone(),
            };
            for (i, one) in inner.iter().enumerate() {
                x = rectified(one, &x, (i + 1 == inner.len()).then_some(&around))?;
            }
        }
        let x = match self.channels_last {
            true => ops::channels_last::global_avg_pool2d(&x)?,
            false => ops::global_avg_pool2d(&x)?,
        };
        self.head.forward(&x)
    }
}

fn conv_norm(size: ConvSize, vb: VarBuilder) -> Result<ConvNorm> {
    let ConvSize { sides: [from, to], kernel, stride } = size;
    let config = Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
    let conv = conv2d_no_bias(from, to, kernel, config, vb.pp("conv"))?;
    Ok((conv, batch_norm(to, 1e-5, vb.pp("norm"))?))
}

fn rectified((conv, norm): &ConvNorm, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
    norm.forward_relu_t(&conv.forward(x)?, residual, true)
}

/// A transformer block after GPT-2, as in the gpt example.
#[derive(Debug)]
pub struct GptBlock {
    heads: usize,
    causal: bool,
    gelu: fn(&Tensor) -> Result<Tensor>,
    norm1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl GptBlock {
    /// With initial weights from `vb`; with `bias`, as GPT-2 has it, or without, as the example.
    ///
    /// # Errors
    ///
    /// What drawing them meets.
    pub fn new(width: usize, heads: usize, bias: bool, vb: VarBuilder) -> Result<Self> {
        let linear = if bias { linear } else { linear_no_bias };
        Ok(Self {
            heads,
            causal: true,
            gelu: ops::gelu_tanh,
            norm1: layer_norm(width, 1e-5, vb.pp("norm1"))?,
            qkv: linear(width, 3 * width, vb.pp("qkv"))?,
            out: linear(width, width, vb.pp("out"))?,
            norm2: layer_norm(width, 1e-5, vb.pp("norm2"))?,
            up: linear(width, 4 * width, vb.pp("up"))?,
            down: linear(4 * width, width, vb.pp("down"))?,
        })
    }

    /// With another activation, and attention to all tokens unless `causal`.
    #[must_use]
    pub fn with(self, causal: bool, gelu: fn(&Tensor) -> Result<Tensor>) -> Self {
        Self { causal, gelu, ..self }
    }

    /// From `(n, t, width)` to as much.
    ///
    /// # Errors
    ///
    /// What the operators meet.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(&self.norm1.forward(x)?)?;
        let scale = ((qkv.dim(D::Minus1)? / (3 * self.heads)) as f64).powf(-0.5);
        let attended = ops::sdpa_packed(&qkv, self.heads, self.causal, scale)?;
        let x = ops::add(x, &self.out.forward(&attended)?)?;
        let inner = (self.gelu)(&self.up.forward(&self.norm2.forward(&x)?)?)?;
        ops::add(&x, &self.down.forward(&inner)?)
    }
}

/// Which GPT-2.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct GptSize {
    /// Blocks.
    pub layers: usize,
    /// Features of a token.
    pub width: usize,
    /// Of each attention.
    pub heads: usize,
    /// Tokens there are.
    pub vocabulary: usize,
    /// Tokens of a sequence, at most.
    pub context: usize,
}

impl GptSize {
    /// GPT-2 small, 124 million parameters.
    pub const SMALL: Self =
        Self { layers: 12, width: 768, heads: 12, vocabulary: 50257, context: 1024 };
}

/// GPT-2: from tokens, `(n, t)`, to the loss of the ones after them. The table of tokens is the head's weight too.
#[derive(Debug)]
pub struct Gpt {
    tokens: Tensor,
    places: Tensor,
    blocks: Vec<GptBlock>,
    norm: LayerNorm,
}

impl Gpt {
    /// With initial weights from `vb`.
    ///
    /// # Errors
    ///
    /// What drawing them meets.
    pub fn new(size: GptSize, vb: VarBuilder) -> Result<Self> {
        let GptSize { layers, width, heads, vocabulary, context } = size;
        let normal = candle_nn::Init::Randn { mean: 0.0, stdev: 0.02 };
        let blocks = (0..layers).map(|i| GptBlock::new(width, heads, true, vb.pp(i)));
        Ok(Self {
            tokens: vb.get_with_hints((vocabulary, width), "tokens", normal)?,
            places: vb.get_with_hints((context, width), "places", normal)?,
            blocks: blocks.collect::<Result<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
        })
    }

    /// In training, of the tokens `x` and of those that come next, `(n, t)` both.
    ///
    /// # Errors
    ///
    /// What the operators meet.
    pub fn loss(&self, x: &Tensor, next: &Tensor) -> Result<Tensor> {
        let places = self.places.narrow(0, 0, x.dim(1)?)?;
        let mut x = ops::add(&ops::embedding(x, &self.tokens)?, &places)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        ops::linear_cross_entropy(&self.norm.forward(&x)?, &self.tokens, None, next)
    }
}

/// Sequences of random tokens, and the token after each: `(n, t)` both.
///
/// # Errors
///
/// What drawing them meets.
pub fn tokens(size: GptSize, batch: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    let draw = || {
        let tokens = Tensor::rand(0f32, size.vocabulary as f32, (batch, size.context), device)?;
        // A number just below the vocabulary may have been rounded to it.
        tokens.floor()?.minimum((size.vocabulary - 1) as f64)?.to_dtype(DType::U32)
    };
    Ok((draw()?, draw()?))
}
