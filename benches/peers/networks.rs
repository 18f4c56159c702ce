//! Networks on the crate's operators.

use candle_amp::nn::{
    BatchNorm, Conv2d, Conv2dConfig, LayerNorm, Linear, batch_norm, conv2d_no_bias, layer_norm,
    linear, linear_no_bias, var_builder,
};
use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{Parameters, ops};
use candle_amp_benches::{normal, tracked};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{Module, ModuleT, VarBuilder, VarMap};

use crate::measure::seconds;
use crate::workload::{Precision, Runner};

/// What every training step here uses.
pub(crate) const SGD: SgdConfig = SgdConfig {
    lr: 0.01,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 5e-4,
    nesterov: false,
    maximize: false,
};

/// A batch of images and their classes.
pub(crate) fn images(batch: usize) -> Result<(Tensor, Tensor)> {
    let classes = Tensor::from_iter((0..batch as u32).map(|i| i % 10), &Device::Cpu)?;
    Ok((normal((batch, 3, 32, 32), DType::F32)?, classes))
}

pub(crate) fn resnet(
    width: usize,
    depth: usize,
    batch: usize,
    precision: Precision,
) -> anyhow::Result<Runner> {
    let varmap = VarMap::new();
    let model = ResNet::new(width, depth, var_builder(&varmap, precision.storage(), &Device::Cpu))?;
    let mut sgd = Sgd::new(Parameters::from_varmap(&varmap).vars(), SGD)?;
    let (x, y) = images(batch)?;
    let (amp, mut scaler) = (precision.autocast(), precision.scaler());
    Ok(Box::new(move || {
        seconds(|| {
            let loss = amp.scope(|| ops::cross_entropy(&model.forward(&x)?, &y))?;
            scaler.scale(&loss)?.backward()?;
            let _ = scaler.step(&mut sgd)?;
            Ok(scaler.update()?)
        })
    }))
}

/// The network of the cifar10 example, of any width.
struct ResNet {
    stem: (Conv2d, BatchNorm),
    blocks: Vec<Block>,
    head: Linear,
}

impl ResNet {
    fn new(width: usize, depth: usize, vb: VarBuilder) -> Result<Self> {
        let stem = conv_norm([3, width], 3, 1, vb.pp("stem"))?;
        let (mut blocks, mut from) = (Vec::new(), width);
        for stage in 0..3 {
            for i in 0..depth {
                let stride = if stage > 0 && i == 0 { 2 } else { 1 };
                let sides = [from, width << stage];
                blocks.push(Block::new(sides, stride, vb.pp(format!("{stage}.{i}")))?);
                from = width << stage;
            }
        }
        Ok(Self { stem, blocks, head: linear(from, 10, vb.pp("head"))? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = rectified(&self.stem, x, None)?;
        for block in &self.blocks {
            x = block.forward(&x)?;
        }
        self.head.forward(&ops::flatten(&ops::global_avg_pool2d(&x)?)?)
    }
}

struct Block {
    first: (Conv2d, BatchNorm),
    second: (Conv2d, BatchNorm),
    /// Where the shape changes.
    shortcut: Option<(Conv2d, BatchNorm)>,
}

impl Block {
    fn new([from, to]: [usize; 2], stride: usize, vb: VarBuilder) -> Result<Self> {
        let shortcut = (from != to)
            .then(|| conv_norm([from, to], 1, stride, vb.pp("shortcut")))
            .transpose()?;
        let first = conv_norm([from, to], 3, stride, vb.pp("1"))?;
        Ok(Self { first, second: conv_norm([to, to], 3, 1, vb.pp("2"))?, shortcut })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = rectified(&self.first, x, None)?;
        let around = match &self.shortcut {
            Some((conv, norm)) => norm.forward_t(&conv.forward(x)?, true)?,
            None => x.clone(),
        };
        rectified(&self.second, &inner, Some(&around))
    }
}

fn conv_norm(
    [from, to]: [usize; 2],
    kernel: usize,
    stride: usize,
    vb: VarBuilder,
) -> Result<(Conv2d, BatchNorm)> {
    let config = Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
    let conv = conv2d_no_bias(from, to, kernel, config, vb.pp("conv"))?;
    Ok((conv, batch_norm(to, 1e-5, vb.pp("norm"))?))
}

fn rectified(
    (conv, norm): &(Conv2d, BatchNorm),
    x: &Tensor,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    norm.forward_relu_t(&conv.forward(x)?, residual, true)
}

/// Forward and backward of a loss, without an optimizer.
fn forward_backward(precision: Precision, loss: impl Fn() -> Result<Tensor> + 'static) -> Runner {
    let (amp, mut scaler) = (precision.autocast(), precision.scaler());
    Box::new(move || {
        seconds(|| {
            let loss = amp.scope(&loss)?;
            scaler.scale(&loss)?.backward()?;
            scaler.forget();
            Ok(())
        })
    })
}

pub(crate) fn mlp(
    layers: usize,
    width: usize,
    batch: usize,
    precision: Precision,
) -> anyhow::Result<Runner> {
    let vb = var_builder(&VarMap::new(), precision.storage(), &Device::Cpu);
    let layers = (0..layers).map(|i| linear(width, width, vb.pp(i)));
    let layers = layers.collect::<Result<Vec<_>>>()?;
    let x = normal((batch, width), DType::F32)?;
    Ok(forward_backward(precision, move || {
        let mut x = x.clone();
        for layer in &layers {
            x = ops::relu(&layer.forward(&x)?)?;
        }
        ops::mean(&x)
    }))
}

pub(crate) fn gpt_block(
    width: usize,
    heads: usize,
    [batch, context]: [usize; 2],
    precision: Precision,
) -> anyhow::Result<Runner> {
    let vb = var_builder(&VarMap::new(), precision.storage(), &Device::Cpu);
    let block = GptBlock {
        heads,
        norm1: layer_norm(width, 1e-5, vb.pp("norm1"))?,
        qkv: linear_no_bias(width, 3 * width, vb.pp("qkv"))?,
        out: linear_no_bias(width, width, vb.pp("out"))?,
        norm2: layer_norm(width, 1e-5, vb.pp("norm2"))?,
        up: linear_no_bias(width, 4 * width, vb.pp("up"))?,
        down: linear_no_bias(4 * width, width, vb.pp("down"))?,
    };
    // Between blocks there is F32 on both sides: the sum of half and F32 that a residual is.
    let x = tracked(&normal((batch, context, width), DType::F32)?)?;
    Ok(forward_backward(precision, move || {
        let y = block.forward(&x)?;
        ops::mean(&ops::mul(&y, &y)?)
    }))
}

/// As in the gpt example.
struct GptBlock {
    heads: usize,
    norm1: LayerNorm,
    qkv: Linear,
    out: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl GptBlock {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let qkv = self.qkv.forward(&self.norm1.forward(x)?)?;
        let scale = ((qkv.dim(D::Minus1)? / (3 * self.heads)) as f64).powf(-0.5);
        let attended = ops::sdpa_packed(&qkv, self.heads, true, scale)?;
        let x = ops::add(x, &self.out.forward(&attended)?)?;
        let inner = ops::gelu(&self.up.forward(&self.norm2.forward(&x)?)?)?;
        ops::add(&x, &self.down.forward(&inner)?)
    }
}
