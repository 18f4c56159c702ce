//! The residual network on candle's own operators and backward.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{
    BatchNorm, Conv2d, Conv2dConfig, Linear, Module, ModuleT, Optimizer, SGD, VarBuilder, VarMap,
    batch_norm, conv2d_no_bias, linear, loss,
};

use crate::measure::seconds;
use crate::networks::images;
use crate::workload::Runner;

type ConvNorm = (Conv2d, BatchNorm);

/// A training step in F32. candle's SGD has no momentum, which is a little less to do.
pub(crate) fn resnet(width: usize, depth: usize, batch: usize) -> anyhow::Result<Runner> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
    let (model, mut sgd) = (ResNet::new(width, depth, vb)?, SGD::new(varmap.all_vars(), 0.01)?);
    let (x, y) = images(batch)?;
    Ok(Box::new(move || {
        seconds(|| {
            let loss = loss::cross_entropy(&model.forward(&x)?, &y)?;
            Ok(sgd.backward_step(&loss)?)
        })
    }))
}

struct ResNet {
    stem: ConvNorm,
    /// Two convolutions, and one where the shape changes.
    blocks: Vec<(ConvNorm, ConvNorm, Option<ConvNorm>)>,
    head: Linear,
}

impl ResNet {
    fn new(width: usize, depth: usize, vb: VarBuilder) -> Result<Self> {
        let stem = conv_norm([3, width], 3, 1, vb.pp("stem"))?;
        let (mut blocks, mut from) = (Vec::new(), width);
        for stage in 0..3 {
            for i in 0..depth {
                let (to, vb) = (width << stage, vb.pp(format!("{stage}.{i}")));
                let stride = if stage > 0 && i == 0 { 2 } else { 1 };
                let first = conv_norm([from, to], 3, stride, vb.pp("1"))?;
                let second = conv_norm([to, to], 3, 1, vb.pp("2"))?;
                let shortcut = (from != to)
                    .then(|| conv_norm([from, to], 1, stride, vb.pp("shortcut")))
                    .transpose()?;
                blocks.push((first, second, shortcut));
                from = to;
            }
        }
        Ok(Self { stem, blocks, head: linear(from, 10, vb.pp("head"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = normed(&self.stem, x)?.relu()?;
        for (first, second, shortcut) in &self.blocks {
            let inner = normed(second, &normed(first, &x)?.relu()?)?;
            let around = match shortcut {
                Some(shortcut) => normed(shortcut, &x)?,
                None => x,
            };
            x = (inner + around)?.relu()?;
        }
        self.head.forward(&x.mean(D::Minus1)?.mean(D::Minus1)?)
    }
}

fn conv_norm(
    [from, to]: [usize; 2],
    kernel: usize,
    stride: usize,
    vb: VarBuilder,
) -> Result<ConvNorm> {
    let config = Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
    let conv = conv2d_no_bias(from, to, kernel, config, vb.pp("conv"))?;
    Ok((conv, batch_norm(to, 1e-5, vb.pp("norm"))?))
}

fn normed((conv, norm): &ConvNorm, x: &Tensor) -> Result<Tensor> {
    norm.forward_t(&conv.forward(x)?, true)
}
