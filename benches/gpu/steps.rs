//! Training steps.

use anyhow::Result;
use candle_amp::nn::var_builder;
use candle_amp::optim::{AdamW, AdamWConfig, Config, GraphedStep, Optim, Sgd, Step};
use candle_amp::{Parameters, ops};
use candle_amp_benches::measure::{Runner, seconds};
use candle_amp_benches::networks::{Gpt, GptSize, ResNet, ResNetSize, SGD, images, tokens};
use candle_amp_benches::precision::Precision;
use candle_core::{Device, Result as CandleResult, Tensor};
use candle_nn::VarMap;

/// Takes a step, and does not wait for it.
pub(crate) type TrainingStep = Box<dyn FnMut() -> Result<()>>;

/// A model's loss, of its inputs.
type Loss = Box<dyn Fn(&[Tensor]) -> CandleResult<Tensor>>;

/// Seconds of steps that follow one another before somebody waits.
const RUN: f64 = 0.05;

/// Times as many steps as [`RUN`] has, from the second run on.
pub(crate) fn timed(mut step: TrainingStep, device: &Device) -> Runner {
    let (mut count, device) = (1, device.clone());
    Box::new(move || {
        device.synchronize()?;
        let all = seconds(|| {
            (0..count).try_for_each(|_| step())?;
            Ok(device.synchronize()?)
        })?;
        let each = all / count as f64;
        count = ((RUN / each) as usize).clamp(1, 100);
        Ok(each)
    })
}

/// Forward, backward, clipped to `max_norm` if to any, and a step of `optimizer`.
fn training(
    precision: Precision,
    loss: impl Fn() -> CandleResult<Tensor> + 'static,
    max_norm: Option<f64>,
    mut optimizer: impl Step + 'static,
) -> TrainingStep {
    let mut scaler = precision.scaler();
    Box::new(move || {
        let loss = precision.autocast().scope(&loss)?; // others have run, with TF32 or without
        scaler.scale(&loss)?.backward()?;
        if let Some(max_norm) = max_norm {
            scaler.clip_grad_norm(max_norm)?;
        }
        let _ = scaler.step(&mut optimizer)?;
        Ok(scaler.update()?)
    })
}

/// The same, as one CUDA graph.
fn graphed<C: Config>(
    precision: Precision,
    loss: impl Fn(&[Tensor]) -> CandleResult<Tensor> + 'static,
    max_norm: Option<f64>,
    mut optimizer: Optim<C>,
    inputs: [Tensor; 2],
) -> TrainingStep {
    let mut scaler = precision.scaler();
    let forward = move |inputs: &[Tensor]| precision.autocast().scope(|| loss(inputs));
    let step = GraphedStep::new(forward);
    let mut step = match max_norm {
        Some(max_norm) => step.with_clip_grad_norm(max_norm),
        None => step,
    };
    Box::new(move || {
        precision.autocast(); // others have run, with TF32 or without
        step.run(&mut scaler, &mut optimizer, &inputs)?;
        Ok(())
    })
}

pub(crate) fn graphed_gpt(
    size: GptSize,
    batch: usize,
    precision: Precision,
    device: &Device,
) -> Result<TrainingStep> {
    let (loss, adamw, inputs) = gpt_parts(size, batch, precision, device)?;
    Ok(graphed(precision, loss, Some(1.0), adamw, inputs))
}

pub(crate) fn graphed_resnet(
    size: ResNetSize,
    batch: usize,
    precision: Precision,
    device: &Device,
) -> Result<TrainingStep> {
    let (loss, sgd, inputs) = resnet_parts(size, batch, true, precision, device)?;
    Ok(graphed(precision, loss, None, sgd, inputs))
}

pub(crate) fn gpt(
    size: GptSize,
    batch: usize,
    precision: Precision,
    device: &Device,
) -> Result<TrainingStep> {
    let (loss, adamw, inputs) = gpt_parts(size, batch, precision, device)?;
    Ok(training(precision, move || loss(&inputs), Some(1.0), adamw))
}

pub(crate) fn resnet(
    size: ResNetSize,
    batch: usize,
    channels_last: bool,
    precision: Precision,
    device: &Device,
) -> Result<TrainingStep> {
    let (loss, sgd, inputs) = resnet_parts(size, batch, channels_last, precision, device)?;
    Ok(training(precision, move || loss(&inputs), None, sgd))
}

/// The loss of a model's inputs, its optimizer, and the inputs.
fn gpt_parts(
    size: GptSize,
    batch: usize,
    precision: Precision,
    device: &Device,
) -> Result<(Loss, AdamW, [Tensor; 2])> {
    let varmap = VarMap::new();
    let model = Gpt::new(size, var_builder(&varmap, precision.storage(), device))?;
    let variables = Parameters::from_varmap(&varmap).vars();
    let adamw = AdamW::new(variables, AdamWConfig { lr: 1e-4, ..Default::default() })?;
    let (x, y) = tokens(size, batch, device)?;
    let loss = move |inputs: &[Tensor]| model.loss(&inputs[0], &inputs[1]);
    Ok((Box::new(loss), adamw, [x, y]))
}

/// As [`gpt_parts`].
fn resnet_parts(
    size: ResNetSize,
    batch: usize,
    channels_last: bool,
    precision: Precision,
    device: &Device,
) -> Result<(Loss, Sgd, [Tensor; 2])> {
    let varmap = VarMap::new();
    let model = ResNet::new(size, var_builder(&varmap, precision.storage(), device))?;
    let model = if channels_last { model.channels_last() } else { model };
    let sgd = Sgd::new(Parameters::from_varmap(&varmap).vars(), SGD)?;
    let (x, y) = images(batch, device)?;
    let loss = move |inputs: &[Tensor]| ops::cross_entropy(&model.forward(&inputs[0])?, &inputs[1]);
    Ok((Box::new(loss), sgd, [x, y]))
}

pub(crate) fn candle_resnet(
    size: ResNetSize,
    batch: usize,
    device: &Device,
) -> Result<TrainingStep> {
    let mut step = candle_amp_benches::candle::resnet_step(size, batch, device)?;
    Ok(Box::new(move || Ok(step()?)))
}
