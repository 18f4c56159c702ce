//! ViT-Tiny on patches of 4x4 pixels, with warm-up, a cosine schedule, label smoothing and clipping. `pytorch/vit.py` is
//! the original.
//!
//! Look at the schedule: it receives the step's outcome, and stands still while steps are skipped.

use candle_amp::nn::{self, Activation::Gelu, Module, ModuleT, TransformerConfig, VarBuilder};
use candle_amp::ops;
use candle_amp::optim::{AdamW, AdamWConfig, Schedule, Scheduler};
use candle_core::{IndexOp, Result, Tensor};

use crate::run::Run;

const WIDTH: usize = 192;
const HEADS: usize = 3;
const PATCH: usize = 4;
const LAYERS: usize = 4;

struct ViT {
    patches: nn::Conv2d,
    class_token: Tensor,
    positions: Tensor,
    encoder: nn::TransformerEncoder,
    head: nn::Linear,
}

impl ViT {
    fn new(classes: usize, vb: VarBuilder) -> Result<Self> {
        let config = nn::Conv2dConfig { stride: PATCH, ..Default::default() };
        let layer = TransformerConfig { dropout: 0.0, norm_first: true, ..Default::default() };
        let layer = TransformerConfig { dim_feedforward: 4 * WIDTH, activation: Gelu, ..layer };
        Ok(Self {
            patches: nn::conv2d(3, WIDTH, PATCH, config, vb.pp("patches"))?,
            class_token: vb.get((1, 1, WIDTH), "class_token")?,
            positions: vb.get((1, 1 + (32 / PATCH).pow(2), WIDTH), "positions")?,
            encoder: nn::transformer_encoder(LAYERS, WIDTH, HEADS, layer, vb.pp("encoder"))?,
            head: nn::linear(WIDTH, classes, vb.pp("head"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.patches.forward(x)?.flatten_from(2)?.transpose(1, 2)?;
        let class_token = self.class_token.broadcast_as((x.dim(0)?, 1, WIDTH))?;
        let x = ops::add(&ops::cat(&[&class_token, &x], 1)?, &self.positions)?;
        self.head.forward(&self.encoder.forward_t(&x, true)?.i((.., 0))?)
    }
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = ViT::new(10, run.vb())?;
    let config = AdamWConfig { weight_decay: 0.05, ..Default::default() };
    let mut adamw = AdamW::new(run.initialised()?, config)?;
    let mut schedule = Scheduler::new(Schedule::cosine(98).with_warm_up(2), &mut adamw)?;
    for (x, y) in run.images(8)? {
        let loss = run.amp.scope(|| ops::cross_entropy_smoothed(&model.forward(&x)?, &y, 0.1))?;
        run.scaler.scale(&loss)?.backward()?;
        run.scaler.clip_grad_norm(1.0)?;
        let outcome = run.scaler.step(&mut adamw)?;
        run.scaler.update()?;
        schedule.step(&outcome, &mut adamw)?;
        run.report(&loss)?;
    }
    Ok(())
}
