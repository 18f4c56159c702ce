//! A U-Net that finds a mask, trained by binary cross entropy and the dice loss.

use candle_amp::nn::{self, Activation, Conv2dConfig, ConvTranspose2dConfig, Module, ModuleT};
use candle_amp::optim::{AdamW, AdamWConfig};
use candle_amp::ops;
use candle_core::{Result, Tensor};
use candle_nn::VarBuilder;

use crate::run::Run;

fn double(from: usize, to: usize, vb: VarBuilder) -> Result<nn::SequentialT> {
    let config = Conv2dConfig { padding: 1, ..Default::default() };
    Ok(nn::seq_t()
        .add(nn::conv2d_no_bias(from, to, 3, config, vb.pp(0))?)
        .add(nn::batch_norm(to, 1e-5, vb.pp(1))?)
        .add(Activation::Relu)
        .add(nn::conv2d_no_bias(to, to, 3, config, vb.pp(3))?)
        .add(nn::batch_norm(to, 1e-5, vb.pp(4))?)
        .add(Activation::Relu))
}

struct Up {
    larger: nn::ConvTranspose2d,
    convs: nn::SequentialT,
}

impl Up {
    fn new(from: usize, to: usize, vb: VarBuilder) -> Result<Self> {
        let config = ConvTranspose2dConfig { stride: 2, ..Default::default() };
        let larger = nn::conv_transpose2d(from, to, 2, config, vb.pp("larger"))?;
        Ok(Self { larger, convs: double(from, to, vb.pp("convs"))? })
    }

    fn forward(&self, x: &Tensor, skipped: &Tensor) -> Result<Tensor> {
        Ok(self.convs.forward_t(&ops::cat(&[skipped, &self.larger.forward(x)?], 1)?, true)?)
    }
}

struct UNet {
    down: [nn::SequentialT; 2],
    bottom: nn::SequentialT,
    up: [Up; 2],
    head: nn::Conv2d,
}

impl UNet {
    fn new(c: usize, vb: VarBuilder) -> Result<Self> {
        let (down, up) = (vb.pp("down"), vb.pp("up"));
        Ok(Self {
            down: [double(3, c, down.pp(0))?, double(c, 2 * c, down.pp(1))?],
            bottom: double(2 * c, 4 * c, vb.pp("bottom"))?,
            up: [Up::new(4 * c, 2 * c, up.pp(0))?, Up::new(2 * c, c, up.pp(1))?],
            head: nn::conv2d(c, 1, 1, Conv2dConfig::default(), vb.pp("head"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let (mut x, mut skipped) = (x.clone(), Vec::new());
        for double in &self.down {
            let y = double.forward_t(&x, true)?;
            x = ops::max_pool2d(&y, 2, 2, 0)?;
            skipped.push(y);
        }
        x = self.bottom.forward_t(&x, true)?;
        for (up, skipped) in self.up.iter().zip(skipped.iter().rev()) {
            x = up.forward(&x, skipped)?;
        }
        Ok(self.head.forward(&x)?)
    }
}

fn dice(logits: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let p = ops::sigmoid(logits)?;
    let both = ops::sum_dims(&ops::mul(&p, mask)?, (1, 2, 3))?;
    let all = ops::sum_dims(&ops::add(&p, mask)?, (1, 2, 3))?;
    let ratio = ops::div(&ops::affine(&both, 2.0, 1.0)?, &ops::affine(&all, 1.0, 1.0)?)?;
    Ok(ops::mean(&ops::affine(&ratio, -1.0, 1.0)?)?)
}

pub(crate) fn train(run: &mut Run) -> Result<()> {
    let model = UNet::new(8, run.vb())?;
    let config = AdamWConfig { lr: 2e-3, ..Default::default() };
    let mut adamw = AdamW::new(run.initialised()?, config)?;
    for (x, mask) in run.masks(4, 32)? {
        let loss = run.amp.scope(|| {
            let logits = model.forward(&x)?;
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
