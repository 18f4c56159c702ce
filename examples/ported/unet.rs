//! A U-Net that finds a mask, trained by binary cross entropy and the dice loss. `pytorch/unet.py` is the original.
//!
//! Look at the loss: it needs no `.float()`, as the losses and sums of `ops` are in F32 under autocast too. And at `level`,
//! which holds the level below it.

use candle_amp::nn::{
    self, Activation::Relu, Conv2dConfig, Module, ModuleT, SequentialT, VarBuilder,
};
use candle_amp::ops;
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_core::{Result, Tensor};

use crate::run::Run;

fn double(from: usize, to: usize, vb: VarBuilder) -> Result<SequentialT> {
    let (config, mut layers) = (Conv2dConfig { padding: 1, ..Default::default() }, nn::seq_t());
    for (i, from) in [(0, from), (3, to)] {
        layers = layers.add(nn::conv2d_no_bias(from, to, 3, config, vb.pp(i))?);
        layers = layers.add(nn::batch_norm(to, 1e-5, vb.pp(i + 1))?).add(Relu);
    }
    Ok(layers)
}

/// Convolves, lets `below` work on half the size, and convolves what both returned.
fn level(
    [from, to]: [usize; 2],
    below: SequentialT,
    [down, up]: [VarBuilder; 2],
) -> Result<SequentialT> {
    let config = nn::ConvTranspose2dConfig { stride: 2, ..Default::default() };
    let upsample = nn::conv_transpose2d(2 * to, to, 2, config, up.pp("upsample"))?;
    let convs = double(2 * to, to, up.pp("convs"))?;
    Ok(double(from, to, down)?.add_fn_t(move |x, train| {
        let y = below.forward_t(&ops::max_pool2d(x, 2, 2, 0)?, train)?;
        convs.forward_t(&ops::cat(&[x, &upsample.forward(&y)?], 1)?, train)
    }))
}

fn unet(c: usize, vb: VarBuilder) -> Result<SequentialT> {
    let (down, up) = (vb.pp("down"), vb.pp("up"));
    let bottom = double(2 * c, 4 * c, vb.pp("bottom"))?;
    let inner = level([c, 2 * c], bottom, [down.pp(1), up.pp(0)])?;
    let outer = level([3, c], inner, [down.pp(0), up.pp(1)])?;
    Ok(outer.add(nn::conv2d(c, 1, 1, Conv2dConfig::default(), vb.pp("head"))?))
}

fn dice(logits: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let p = ops::sigmoid(logits)?;
    let overlap = ops::sum_dims(&ops::mul(&p, mask)?, (1, 2, 3))?;
    let total = ops::sum_dims(&ops::add(&p, mask)?, (1, 2, 3))?;
    1.0 - ops::mean(&ops::div(&ops::affine(&overlap, 2.0, 1.0)?, &ops::affine(&total, 1.0, 1.0)?)?)?
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = unet(8, run.vb())?;
    let config = AdamWConfig { lr: 2e-3, ..Default::default() };
    let mut adamw = AdamW::new(run.initialised()?, config)?;
    for (x, mask) in run.masks(4, 32)? {
        let loss = run.amp.scope(|| {
            let logits = model.forward_t(&x, true)?;
            let entropy = ops::binary_cross_entropy_with_logit(&logits, &mask)?;
            ops::add(&entropy, &dice(&logits, &mask)?)
        })?;
        run.scaler.scale(&loss)?.backward()?;
        let _ = run.scaler.step(&mut adamw)?;
        run.scaler.update()?;
        run.report(&loss)?;
    }
    Ok(())
}
