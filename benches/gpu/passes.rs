//! Passes over all parameters at once: each is one public call.
//!
//! A pass over a small model takes less than starting a clock and waiting for a device do. So several
//! passes follow one another in a run, each over gradients of its own: what one leaves in the cache is
//! none of the next one's.

use anyhow::Result;
use candle_amp::optim::{
    AdamW, AdamWConfig, Ema, EmaConfig, Lamb, LambConfig, Lion, LionConfig, Masters, Sgd, Step,
};
use candle_amp::{GradScaler, MasterVars, MasterWeights, ScaleConfig};
use candle_amp_benches::loss_with;
use candle_amp_benches::measure::seconds;
use candle_amp_benches::networks::SGD;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Init, VarMap};
use serde::Serialize;

use crate::parameters::Parameters;

/// Bytes of gradients that one run has at most, but for two sets in any case.
const HELD: usize = 4 << 30;

/// How variables and masters are kept.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Storage {
    F32,
    /// BF16 variables, F32 masters.
    Bf16Masters,
    /// BF16 variables, and the bits that make them F32.
    Bf16Remainder,
}

/// Seconds of a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    /// On the device too.
    pub(crate) all: f64,
    /// Until the host has asked for it: a mean over passes one after another, of which the first finds an idle device.
    pub(crate) host: f64,
}

/// Runs as many passes as there are sets of gradients.
pub(crate) type Passes = Box<dyn FnMut() -> Result<Taken>>;

/// Times `count` passes that `run` makes one after another.
fn taken(count: usize, device: &Device, run: impl FnOnce() -> Result<()>) -> Result<Taken> {
    device.synchronize()?;
    let mut host = 0.0;
    let all = seconds(|| {
        host = seconds(run)?;
        Ok(device.synchronize()?)
    })?;
    Ok(Taken { all: all / count as f64, host: host / count as f64 })
}

/// How many sets of gradients, and so passes, a run has. PyTorch's side has as many.
fn sets(parameters: Parameters) -> usize {
    (HELD / (size_of::<f32>() * parameters.count())).clamp(2, 16)
}

fn normal(length: usize, device: &Device) -> Result<Tensor> {
    Ok(Tensor::randn(0f32, 1.0, length, device)?)
}

fn variables(parameters: Parameters, dtype: DType, device: &Device) -> Result<Vec<Var>> {
    let variable = |length| Ok(Var::from_tensor(&normal(length, device)?.to_dtype(dtype)?)?);
    parameters.lengths().into_iter().map(variable).collect()
}

/// Times the passes that `pass` makes of sets of variables, on their gradients in scalers that `make` makes. Each set has
/// its own: what one pass writes has no gradient from before.
fn on_gradients<P: FnMut(&mut GradScaler) -> Result<()> + 'static>(
    parameters: Parameters,
    dtype: DType,
    device: &Device,
    make: impl Fn() -> Result<GradScaler>,
    pass: impl Fn(Vec<Var>) -> Result<P>,
) -> Result<Passes> {
    let gradients = parameters.lengths().into_iter().map(|length| normal(length, device));
    let gradients = gradients.collect::<Result<Vec<_>>>()?;
    let set = |_| {
        let variables = variables(parameters, dtype, device)?;
        Ok((variables.clone(), make()?, pass(variables)?))
    };
    let mut sets = (0..sets(parameters)).map(set).collect::<Result<Vec<_>>>()?;
    let device = device.clone();
    Ok(Box::new(move || {
        for (variables, scaler, _) in &mut sets {
            let inputs: Vec<&Tensor> = variables.iter().map(Var::as_tensor).collect();
            let loss = loss_with(&inputs, gradients.clone())?;
            scaler.scale(&loss)?.backward()?;
        }
        let taken = taken(sets.len(), &device, || {
            sets.iter_mut().try_for_each(|(_, scaler, pass)| pass(scaler))
        })?;
        sets.iter_mut().for_each(|(_, scaler, _)| scaler.zero_grad());
        Ok(taken)
    }))
}

/// Times `pass`, which needs no gradients.
fn alone(
    parameters: Parameters,
    device: &Device,
    mut pass: impl FnMut() -> Result<()> + 'static,
) -> Passes {
    let (count, device) = (sets(parameters), device.clone());
    Box::new(move || taken(count, &device, || (0..count).try_for_each(|_| pass())))
}

pub(crate) fn unscale(parameters: Parameters, device: &Device) -> Result<Passes> {
    let pass = |_| Ok(|scaler: &mut GradScaler| Ok(scaler.unscale()?));
    on_gradients(parameters, DType::F32, device, scaler, pass)
}

fn scaler() -> Result<GradScaler> {
    Ok(GradScaler::new(ScaleConfig::constant(1024.0))?)
}

/// Of gradients far longer than they may be.
pub(crate) fn clip(parameters: Parameters, device: &Device) -> Result<Passes> {
    let pass = |_| Ok(|scaler: &mut GradScaler| Ok(scaler.clip_grad_norm(1.0).map(drop)?));
    on_gradients(parameters, DType::F32, device, scaler, pass)
}

/// A step of what `make` makes of variables.
fn optimizer<S: Step + 'static>(
    parameters: Parameters,
    dtype: DType,
    device: &Device,
    make: impl Fn(Vec<Var>) -> candle_amp::Result<S>,
) -> Result<Passes> {
    let step = |variables| {
        let mut optimizer = make(variables)?;
        Ok(move |scaler: &mut GradScaler| {
            let _ = scaler.step(&mut optimizer)?;
            Ok(())
        })
    };
    on_gradients(parameters, dtype, device, || Ok(GradScaler::disabled()), step)
}

/// Of gradients far longer than they may be, where they are clipped.
pub(crate) fn update(parameters: Parameters, clip: bool, device: &Device) -> Result<Passes> {
    on_gradients(parameters, DType::F32, device, scaler, |variables| {
        let mut adamw = AdamW::new(variables, AdamWConfig::default())?;
        Ok(move |scaler: &mut GradScaler| {
            if clip {
                scaler.clip_grad_norm(1.0)?;
            }
            let _ = scaler.step(&mut adamw)?;
            Ok(())
        })
    })
}

pub(crate) fn sgd(parameters: Parameters, device: &Device) -> Result<Passes> {
    optimizer(parameters, DType::F32, device, |variables| Sgd::new(variables, SGD))
}

pub(crate) fn lion(parameters: Parameters, device: &Device) -> Result<Passes> {
    let make = |variables| Lion::new(variables, LionConfig::default());
    optimizer(parameters, DType::F32, device, make)
}

pub(crate) fn lamb(parameters: Parameters, device: &Device) -> Result<Passes> {
    let make = |variables| Lamb::new(variables, LambConfig::default());
    optimizer(parameters, DType::F32, device, make)
}

pub(crate) fn adamw(parameters: Parameters, storage: Storage, device: &Device) -> Result<Passes> {
    let (dtype, masters) = match storage {
        Storage::F32 => (DType::F32, Masters::F32),
        Storage::Bf16Masters => (DType::BF16, Masters::F32),
        Storage::Bf16Remainder => (DType::BF16, Masters::Remainder),
    };
    optimizer(parameters, dtype, device, |variables| {
        AdamW::new(variables, AdamWConfig::default())?.with_masters(masters)
    })
}

pub(crate) fn ema(parameters: Parameters, device: &Device) -> Result<Passes> {
    let variables = variables(parameters, DType::F32, device)?;
    let named = variables.iter().enumerate().map(|(i, var)| (i.to_string(), var.clone()));
    let varmap = VarMap::new();
    varmap.data().lock().map_err(|_| anyhow::anyhow!("a poisoned lock"))?.extend(named);
    let mut ema = Ema::new(&candle_amp::Parameters::from_varmap(&varmap), EmaConfig::default())?;
    Ok(alone(parameters, device, move || Ok(ema.update()?)))
}

/// F32 masters into the BF16 variables that an optimizer keeps them for.
pub(crate) fn refresh_weights(parameters: Parameters, device: &Device) -> Result<Passes> {
    let variables = variables(parameters, DType::BF16, device)?;
    let masters = MasterWeights::<candle_nn::SGD>::new(variables, 0.01)?;
    Ok(alone(parameters, device, move || Ok(masters.refresh()?)))
}

/// F32 variables into the BF16 tensors that a model got in their place.
pub(crate) fn refresh_vars(parameters: Parameters, device: &Device) -> Result<Passes> {
    let masters = MasterVars::new(DType::BF16, device);
    let vb = masters.var_builder();
    let normal = Init::Randn { mean: 0.0, stdev: 1.0 };
    for (i, length) in parameters.lengths().into_iter().enumerate() {
        vb.get_with_hints(length, &i.to_string(), normal)?;
    }
    Ok(alone(parameters, device, move || Ok(masters.refresh()?)))
}
