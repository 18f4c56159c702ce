//! nanoGPT: a tied head, four micro-batches to a step, clipping, and no weight decay for norms and biases.

use candle_amp::nn::{self, Embedding, LayerNorm, Linear, Module};
use candle_amp::optim::{AdamW, AdamWConfig, decay_groups};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::run::Run;

const VOCABULARY: usize = 50;
const CONTEXT: usize = 32;
const WIDTH: usize = 96;
const HEADS: usize = 3;
const LAYERS: usize = 3;
const PARTS: usize = 4;

struct Block {
    norm1: LayerNorm,
    norm2: LayerNorm,
    qkv: Linear,
    out: Linear,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Self> {
        let linear = |from, to, name| nn::linear(from * WIDTH, to * WIDTH, vb.pp(name));
        Ok(Self {
            norm1: nn::layer_norm(WIDTH, 1e-5, vb.pp("norm1"))?,
            norm2: nn::layer_norm(WIDTH, 1e-5, vb.pp("norm2"))?,
            qkv: linear(1, 3, "qkv")?,
            out: linear(1, 1, "out")?,
            up: linear(1, 4, "up")?,
            down: linear(4, 1, "down")?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(&self.norm1.forward(x)?)?;
        let scale = ((WIDTH / HEADS) as f64).sqrt().recip();
        let y = ops::sdpa_packed(&qkv, HEADS, true, scale)?;
        let x = ops::add(x, &self.out.forward(&y)?)?;
        let y = ops::gelu_tanh(&self.up.forward(&self.norm2.forward(&x)?)?)?;
        Ok(ops::add(&x, &self.down.forward(&y)?)?)
    }
}

struct NanoGpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
}

impl NanoGpt {
    fn new(vb: VarBuilder) -> Result<Self> {
        let block = |i| Block::new(vb.pp("blocks").pp(i));
        Ok(Self {
            tokens: nn::embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?,
            positions: nn::embedding(CONTEXT, WIDTH, vb.pp("positions"))?,
            blocks: (0..LAYERS).map(block).collect::<Result<_>>()?,
            norm: nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
        })
    }

    fn loss(&self, x: &Tensor, following: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, x.dim(1)? as u32, x.device())?;
        let positions = self.positions.forward(&positions)?;
        let x = ops::add(&self.tokens.forward(x)?, &positions)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        let (x, table) = (self.norm.forward(&x)?, self.tokens.embeddings());
        Ok(ops::linear_cross_entropy(&x, table, None, following)?)
    }
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = NanoGpt::new(run.vb())?;
    let config = AdamWConfig { lr: 3e-3, beta2: 0.95, weight_decay: 0.1, ..Default::default() };
    let mut adamw = AdamW::from_groups(decay_groups(&run.initialised()?, config))?;
    for (x, following) in run.tokens(VOCABULARY as u32, PARTS * 4, CONTEXT)? {
        let mut total = Tensor::new(0f32, x.device())?;
        for (x, following) in x.chunk(PARTS, 0)?.iter().zip(following.chunk(PARTS, 0)?) {
            let loss = run.amp.scope(|| model.loss(x, &following))?;
            let loss = (loss / PARTS as f64)?;
            run.scaler.scale(&loss)?.backward()?;
            total = (total + loss.detach())?;
        }
        run.scaler.clip_grad_norm(1.0)?;
        let _ = run.scaler.step(&mut adamw)?;
        run.scaler.update()?;
        run.report(&total)?;
    }
    Ok(())
}
