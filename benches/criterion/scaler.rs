//! What the scaler does to gradients before a step: it checks and measures them, 64 tensors of 1 MiB.

mod common;

use anyhow::Result;
use candle_amp::{GradScaler, ScaleConfig};
use candle_amp_benches::{loss_with, normal};
use candle_core::{DType, Tensor, Var};
use criterion::{BatchSize, Throughput};

use common::short;

const TENSORS: usize = 64;
const LENGTH: usize = 1 << 18;

fn main() -> Result<()> {
    let many = || (0..TENSORS).map(|_| normal(LENGTH, DType::F32));
    let gradients = many().collect::<candle_core::Result<Vec<_>>>()?;
    let variables = many().map(|values| Var::from_tensor(&values?));
    let variables = variables.collect::<candle_core::Result<Vec<_>>>()?;
    let collected = || -> candle_amp::Result<GradScaler> {
        let mut scaler = GradScaler::new(ScaleConfig::constant(1024.0))?;
        let inputs: Vec<&Tensor> = variables.iter().map(Var::as_tensor).collect();
        let loss = loss_with(&inputs, gradients.clone())?;
        scaler.scale(&loss)?.backward()?;
        Ok(scaler)
    };

    let mut criterion = short();
    let mut group = criterion.benchmark_group("scaler, 64 MiB");
    group.throughput(Throughput::Bytes((size_of::<f32>() * TENSORS * LENGTH) as u64));
    group.bench_function("unscale", |b| {
        let unscale = |scaler: candle_amp::Result<GradScaler>| {
            let mut scaler = scaler.expect("gradients collect");
            scaler.unscale().expect("there are gradients");
            scaler
        };
        b.iter_batched(collected, unscale, BatchSize::PerIteration);
    });
    group.bench_function("clip_grad_norm", |b| {
        let clip = |scaler: candle_amp::Result<GradScaler>| {
            let mut scaler = scaler.expect("gradients collect");
            scaler.clip_grad_norm(0.01).expect("there are gradients");
            scaler
        };
        b.iter_batched(collected, clip, BatchSize::PerIteration);
    });
    group.finish();
    criterion.final_summary();
    Ok(())
}
