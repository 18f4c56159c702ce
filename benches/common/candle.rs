//! The residual network on candle's own operators and backward.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{
    BatchNorm, Conv2d, Conv2dConfig, Linear, Module, ModuleT, Optimizer, SGD, VarBuilder, VarMap,
    batch_norm, conv2d_no_bias, linear, loss,
};

use crate::networks::{BlockSize, ConvSize, ResNetSize, images};

type ConvNorm = (Conv2d, BatchNorm);

/// A training step in F32. candle's SGD has no momentum, which is a little less to do.
///
/// # Errors
///
/// What setting it up meets.
pub fn resnet_step(
    size: ResNetSize,
    batch: usize,
    device: &Device,
) -> Result<impl FnMut() -> Result<()> + use<>> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, device);
    let (model, mut sgd) = (ResNet::new(size, vb)?, SGD::new(varmap.all_vars(), 0.01)?);
    let (x, y) = images(batch, device)?;
    Ok(move || sgd.backward_step(&loss::cross_entropy(&model.forward(&x)?, &y)?))
}

struct ResNet {
    stem: ConvNorm,
    blocks: Vec<(Vec<ConvNorm>, Option<ConvNorm>)>,
    head: Linear,
}

impl ResNet {
    fn new(size: ResNetSize, vb: VarBuilder) -> Result<Self> {
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
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = normed(&self.stem, x)?.relu()?;
        for (inner, shortcut) in &self.blocks {
            let around = match shortcut {
                Some(shortcut) => normed(shortcut, &x)?,
                None => x.clone(),
            };
            for (i, one) in inner.iter().enumerate() {
                let y = normed(one, &x)?;
                x = if i + 1 == inner.len() { (y + &around)? } else { y }.relu()?;
            }
        }
        self.head.forward(&x.mean(D::Minus1)?.mean(D::Minus1)?)
    }
}

fn conv_norm(size: ConvSize, vb: VarBuilder) -> Result<ConvNorm> {
    let ConvSize { sides: [from, to], kernel, stride } = size;
    let config = Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
    let conv = conv2d_no_bias(from, to, kernel, config, vb.pp("conv"))?;
    Ok((conv, batch_norm(to, 1e-5, vb.pp("norm"))?))
}

fn normed((conv, norm): &ConvNorm, x: &Tensor) -> Result<Tensor> {
    norm.forward_t(&conv.forward(x)?, true)
}
