//! Single layers, forward and backward, as they are in the middle of a network.

use candle_amp::nn::{Conv2dConfig, batch_norm, var_builder};
use candle_amp::ops;
use candle_amp_benches::measure::{Runner, seconds};
use candle_amp_benches::precision::Precision;
use candle_amp_benches::{loss_with, normal, tracked};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{ModuleT, VarMap};

/// All three passes; two where there are three channels, as images need no gradient.
pub(crate) fn conv(
    shape: [usize; 4],
    to: usize,
    kernel: usize,
    stride: usize,
    precision: Precision,
) -> anyhow::Result<Runner> {
    let [_, from, ..] = shape;
    let config = Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
    let weight = Var::from_tensor(&normal((to, from, kernel, kernel), DType::F32)?)?;
    layer(shape, from != 3, precision, move |x| ops::conv2d(x, &weight, None, config))
}

pub(crate) fn batch_norm_relu(shape: [usize; 4], precision: Precision) -> anyhow::Result<Runner> {
    let vb = var_builder(&VarMap::new(), DType::F32, &Device::Cpu);
    let norm = batch_norm(shape[1], 1e-5, vb)?;
    layer(shape, true, precision, move |x| ops::relu(&norm.forward_t(x, true)?))
}

/// Forward of `layer`, and backward from a given gradient of its output.
fn layer(
    shape: [usize; 4],
    wants_gradient: bool,
    precision: Precision,
    layer: impl Fn(&Tensor) -> Result<Tensor> + 'static,
) -> anyhow::Result<Runner> {
    let (amp, mut scaler) = (precision.autocast(), precision.scaler());
    let x = normal(shape.as_slice(), precision.dtype())?;
    let x = if wants_gradient { tracked(&x)? } else { x };
    let y = amp.scope(|| layer(&x))?;
    let gradient = normal(y.shape(), y.dtype())?;
    Ok(Box::new(move || {
        seconds(|| {
            let y = amp.scope(|| layer(&x))?;
            let loss = loss_with(&[&y], vec![gradient.clone()])?;
            scaler.scale(&loss)?.backward()?;
            scaler.zero_grad();
            Ok(())
        })
    }))
}
