//! Batch norm in training, forward and backward.

mod common;

use anyhow::Result;
use candle_amp::ops;
use candle_amp_benches::{normal, tracked};
use candle_core::{DType, Device, Var};

use common::{backward, forward, short};

fn main() -> Result<()> {
    let mut criterion = short();
    for (channels, size) in [(16, 32), (32, 16), (64, 8)] {
        for dtype in [DType::F32, DType::BF16] {
            let name = format!("batch_norm {channels}x{size}x{size} {dtype:?}");
            let mut group = criterion.benchmark_group(name);
            let x = tracked(&normal((128, channels, size, size), dtype)?)?;
            let gradient = normal(x.shape(), dtype)?;
            let weight = Var::ones(channels, DType::F32, &Device::Cpu)?;
            let bias = Var::zeros(channels, DType::F32, &Device::Cpu)?;
            let norm = || Ok(ops::batch_norm(&x, Some(&weight), Some(&bias), 1e-5)?.0);
            group.bench_function("forward", |b| forward(b, norm));
            group.bench_function("backward", |b| backward(b, &gradient, norm));
        }
    }
    criterion.final_summary();
    Ok(())
}
