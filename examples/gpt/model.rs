//! The network, built of the crate's layers and operators.

use candle_amp::autograd::checkpoint;
use candle_amp::nn::{Embedding, LayerNorm, Linear, layer_norm};
use candle_amp::ops;
use candle_core::{D, Result, Tensor};
use candle_nn::{Init, Module, VarBuilder};

use crate::options::Size;

/// A transformer after GPT-2: from characters, `(n, t)`, to logits of the next one at every place,
/// `(n * t, characters)`.
///
/// Radford et al. 2019, Language Models are Unsupervised Multitask Learners. Layer norm comes
/// before attention and perceptron; matrix products have no bias.
#[derive(Debug)]
pub(crate) struct Gpt {
    characters: Embedding,
    /// What stands for a place, `(context, width)`.
    places: Tensor,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
    /// Whether backward recomputes each block.
    recompute: bool,
}

impl Gpt {
    pub(crate) fn new(
        characters: usize,
        size: Size,
        recompute: bool,
        vb: VarBuilder,
    ) -> Result<Self> {
        let Size { context, layers, width, .. } = size;
        let normal = Init::Randn { mean: 0., stdev: 0.02 };
        let table = vb.get_with_hints((characters, width), "characters.weight", normal)?;
        let places = vb.get_with_hints((context, width), "places.weight", normal)?;
        let blocks = (0..layers).map(|i| Block::new(size, vb.pp(format!("blocks.{i}"))));
        Ok(Self {
            characters: Embedding::new(table, width),
            places,
            blocks: blocks.collect::<Result<_>>()?,
            norm: layer_norm(width, 1e-5, vb.pp("norm"))?,
            head: linear(width, characters, 0.02, vb.pp("head"))?,
            recompute,
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (_, t) = x.dims2()?;
        let mut x = ops::add(&self.characters.forward(x)?, &self.places.narrow(0, 0, t)?)?;
        for block in &self.blocks {
            x = if self.recompute {
                let block = block.clone();
                checkpoint(move |x| block.forward(x), &x)?
            } else {
                block.forward(&x)?
            };
        }
        self.head.forward(&self.norm.forward(&x)?)?.flatten_to(1)
    }
}

/// Attention, then a perceptron, each added to what it was given.
#[derive(Clone, Debug)]
struct Block {
    heads: usize,
    norm1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(Size { heads, layers, width, .. }: Size, vb: VarBuilder) -> Result<Self> {
        // Sums over the layers keep their size.
        let small = 0.02 / (2. * layers as f64).sqrt();
        Ok(Self {
            heads,
            norm1: layer_norm(width, 1e-5, vb.pp("norm1"))?,
            qkv: linear(width, 3 * width, 0.02, vb.pp("qkv"))?,
            out: linear(width, width, small, vb.pp("out"))?,
            norm2: layer_norm(width, 1e-5, vb.pp("norm2"))?,
            up: linear(width, 4 * width, 0.02, vb.pp("up"))?,
            down: linear(4 * width, width, small, vb.pp("down"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = ops::add(x, &self.attention(&self.norm1.forward(x)?)?)?;
        let inner = ops::gelu_tanh(&self.up.forward(&self.norm2.forward(&x)?)?)?;
        ops::add(&x, &self.down.forward(&inner)?)
    }

    /// Every place attends to itself and those before it.
    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(x)?;
        let width = qkv.dim(D::Minus1)? / (3 * self.heads);
        self.out.forward(&ops::sdpa_packed(&qkv, self.heads, true, (width as f64).powf(-0.5))?)
    }
}

/// A product with initial weights of deviation `stdev`.
fn linear(from: usize, to: usize, stdev: f64, vb: VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((to, from), "weight", Init::Randn { mean: 0., stdev })?;
    Ok(Linear::new(weight, None))
}

#[cfg(test)]
mod tests;
