//! Steps of the networks.

use candle_amp::nn::{linear, var_builder};
use candle_amp::optim::Sgd;
use candle_amp::{Parameters, ops};
use candle_amp_benches::measure::{Runner, seconds};
use candle_amp_benches::networks::{GptBlock, ResNet, ResNetSize, SGD, images};
use candle_amp_benches::precision::Precision;
use candle_amp_benches::{candle, normal, tracked};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarMap};

pub(crate) fn resnet(
    size: ResNetSize,
    batch: usize,
    channels_last: bool,
    precision: Precision,
) -> anyhow::Result<Runner> {
    let varmap = VarMap::new();
    let model = ResNet::new(size, var_builder(&varmap, precision.storage(), &Device::Cpu))?;
    let model = if channels_last { model.channels_last() } else { model };
    let mut sgd = Sgd::new(Parameters::from_varmap(&varmap).vars(), SGD)?;
    let (x, y) = images(batch, &Device::Cpu)?;
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

/// The same on candle's own operators.
pub(crate) fn candle_resnet(size: ResNetSize, batch: usize) -> anyhow::Result<Runner> {
    let mut step = candle::resnet_step(size, batch, &Device::Cpu)?;
    Ok(Box::new(move || seconds(|| Ok(step()?))))
}

/// Forward and backward of a loss, without an optimizer.
fn forward_backward(precision: Precision, loss: impl Fn() -> Result<Tensor> + 'static) -> Runner {
    let (amp, mut scaler) = (precision.autocast(), precision.scaler());
    Box::new(move || {
        seconds(|| {
            let loss = amp.scope(&loss)?;
            scaler.scale(&loss)?.backward()?;
            scaler.zero_grad();
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
    let block = GptBlock::new(width, heads, false, vb)?;
    // Between blocks there is F32 on both sides: the sum of half and F32 that a residual is.
    let x = tracked(&normal((batch, context, width), DType::F32)?)?;
    Ok(forward_backward(precision, move || {
        let y = block.forward(&x)?;
        ops::mean(&ops::mul(&y, &y)?)
    }))
}
