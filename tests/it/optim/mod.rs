//! The crate's optimizers, schedules and averages.

mod ema;
mod formulas;
mod groups;
mod lr_finder;
mod masters;
mod plateau;
mod pytorch;
mod schedules;
mod settings;
mod state;

use std::collections::HashMap;

use candle_amp::optim::{
    AdamWConfig, Config, LambConfig, LionConfig, Masters, Optim, SgdConfig, Variables,
};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::util::{package, random};

/// The tensors that `tests/golden/make_optimizers.py` wrote.
fn golden() -> HashMap<String, Tensor> {
    let path = package().join("tests/golden/optimizers.safetensors");
    candle_core::safetensors::load(&path, &Device::Cpu).unwrap()
}

/// A gradient of every variable, random, or a share of one.
fn gradients(variables: &[Var], seed: u64, dtype: DType) -> Result<GradStore> {
    let mut store = GradStore::default();
    for (number, variable) in variables.iter().enumerate() {
        let dtype = if variable.dtype() == DType::F64 { DType::F64 } else { dtype };
        store.insert(variable, random(seed * 1000 + number as u64, variable.shape(), dtype));
    }
    Ok(store)
}

/// Variables of one dtype, or of several, small and past a parallel task.
fn variables(dtypes: &[DType]) -> Result<Vec<Var>> {
    let shapes: [&[usize]; 5] = [&[3, 5], &[], &[70_003], &[2, 1, 7], &[1030]];
    let all = shapes.iter().zip(dtypes.iter().cycle()).zip(1..);
    all.map(|((shape, dtype), seed)| Var::from_tensor(&random(seed, *shape, *dtype))).collect()
}

const SGD: SgdConfig = SgdConfig {
    lr: 0.03,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 0.01,
    nesterov: true,
    maximize: false,
};
const ADAMW: AdamWConfig = AdamWConfig {
    lr: 0.01,
    beta1: 0.8,
    beta2: 0.95,
    eps: 1e-7,
    weight_decay: 0.02,
    amsgrad: true,
    maximize: false,
};
const LION: LionConfig =
    LionConfig { lr: 0.004, beta1: 0.85, beta2: 0.95, weight_decay: 0.03, maximize: true };
const LAMB: LambConfig = LambConfig {
    lr: 0.02,
    beta1: 0.8,
    beta2: 0.95,
    eps: 1e-7,
    weight_decay: 0.02,
    always_adapt: false,
    trust_clip: true,
    maximize: false,
};

/// What there is to choose: how half variables are kept, the dtype of the state, and the dtypes of
/// the variables that this is for.
const CHOICES: [(Masters, DType, &[DType]); 5] = [
    (Masters::F32, DType::F32, &[DType::F32, DType::BF16, DType::F16, DType::F64]),
    (Masters::Remainder, DType::F32, &[DType::BF16, DType::F32]),
    (Masters::Stochastic, DType::F32, &[DType::F16, DType::BF16, DType::F32]),
    (Masters::F32, DType::BF16, &[DType::F32, DType::BF16, DType::F64]),
    (Masters::Remainder, DType::BF16, &[DType::BF16]),
];

fn optimizer<C: Config>(
    parameters: impl Into<Variables>,
    config: C,
    masters: Masters,
    state: DType,
) -> candle_amp::Result<Optim<C>> {
    Optim::new(parameters, config)?.with_masters(masters)?.with_state_dtype(state)
}
