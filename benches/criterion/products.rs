//! Matrix products, and their weight gradients.

mod common;

use anyhow::Result;
use candle_amp::ops;
use candle_amp_benches::normal;
use candle_core::DType;
use criterion::Throughput;

use common::{forward, short};

fn main() -> Result<()> {
    let mut criterion = short();
    let shapes = [
        [1024, 1024, 1024],
        [2048, 256, 768],
        [2048, 256, 1024],
        [2048, 1024, 256],
        [64, 512, 512],
    ];
    for [m, k, n] in shapes {
        for dtype in [DType::F32, DType::BF16] {
            let mut group = criterion.benchmark_group(format!("product {m}x{k}x{n} {dtype:?}"));
            group.throughput(Throughput::Elements(2 * (m * k * n) as u64)); // operations
            let (x, weight, gradient) =
                (normal((m, k), dtype)?, normal((k, n), dtype)?, normal((m, n), dtype)?);
            let transposed = x.t()?;
            group.bench_function("forward", |b| forward(b, || ops::matmul(&x, &weight)));
            group.bench_function("weight gradient", |b| {
                forward(b, || ops::matmul(&transposed, &gradient));
            });
        }
    }
    criterion.final_summary();
    Ok(())
}
