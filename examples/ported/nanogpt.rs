//! nanoGPT: a tied head, four micro-batches to a step, clipping, and no weight decay for norms and biases.
//! `pytorch/nanogpt.py` is the original.
//!
//! Look at `ops::sdpa_packed`, which needs no split into heads, and at `ops::linear_cross_entropy`, the tied head and its
//! loss in one operator.

use candle_amp::nn::{self, Embedding, Module, ModuleT, SequentialT, VarBuilder};
use candle_amp::ops;
use candle_amp::optim::{AdamW, AdamWConfig, decay_groups};
use candle_core::{Result, Tensor};

use crate::run::Run;

const VOCABULARY: usize = 50;
const CONTEXT: usize = 32;
const WIDTH: usize = 96;
const HEADS: usize = 3;
const LAYERS: usize = 3;
const MICRO_BATCHES: usize = 4;

fn residual(part: SequentialT) -> nn::FuncT<'static> {
    nn::func_t(move |x, train| ops::add(x, &part.forward_t(x, train)?))
}

fn block(vb: VarBuilder) -> Result<SequentialT> {
    let linear = |from, to, name| nn::linear(from * WIDTH, to * WIDTH, vb.pp(name));
    let norm = |name| nn::layer_norm(WIDTH, 1e-5, vb.pp(name));
    let scale = ((WIDTH / HEADS) as f64).sqrt().recip();
    let attend = move |qkv: &Tensor| ops::sdpa_packed(qkv, HEADS, true, scale);
    let attention = nn::seq_t().add(norm("norm1")?).add(linear(1, 3, "qkv")?).add_fn(attend);
    let attention = attention.add(linear(1, 1, "out")?);
    let mlp = nn::seq_t().add(norm("norm2")?).add(linear(1, 4, "up")?).add_fn(ops::gelu_tanh);
    let mlp = mlp.add(linear(4, 1, "down")?);
    Ok(nn::seq_t().add(residual(attention)).add(residual(mlp)))
}

struct NanoGpt {
    tokens: Embedding,
    positions: Embedding,
    layers: SequentialT,
}

impl NanoGpt {
    fn new(vb: VarBuilder) -> Result<Self> {
        let (of_blocks, mut layers) = (vb.pp("blocks"), nn::seq_t());
        for i in 0..LAYERS {
            layers = layers.add(block(of_blocks.pp(i))?);
        }
        let layers = layers.add(nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?);
        let tokens = nn::embedding(VOCABULARY, WIDTH, vb.pp("tokens"))?;
        Ok(Self { tokens, positions: nn::embedding(CONTEXT, WIDTH, vb.pp("positions"))?, layers })
    }

    fn loss(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let positions = Tensor::arange(0, x.dim(1)? as u32, x.device())?;
        let x = ops::add(&self.tokens.forward(x)?, &self.positions.forward(&positions)?)?;
        let x = self.layers.forward_t(&x, true)?;
        ops::linear_cross_entropy(&x, self.tokens.embeddings(), None, targets)
    }
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = NanoGpt::new(run.vb())?;
    let config = AdamWConfig { lr: 3e-3, beta2: 0.95, weight_decay: 0.1, ..Default::default() };
    let mut adamw = AdamW::from_groups(decay_groups(&run.initialised()?, config))?;
    for (x, targets) in run.tokens(VOCABULARY, MICRO_BATCHES * 4, CONTEXT)? {
        let mut total = Tensor::new(0f32, x.device())?;
        for (x, targets) in x.chunk(MICRO_BATCHES, 0)?.iter().zip(targets.chunk(MICRO_BATCHES, 0)?)
        {
            let loss = (run.amp.scope(|| model.loss(x, &targets))? / MICRO_BATCHES as f64)?;
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
