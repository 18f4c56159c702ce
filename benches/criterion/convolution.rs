//! The three passes of a convolution.

mod common;

use anyhow::Result;
use candle_amp::nn::Conv2dConfig;
use candle_amp::{no_grad, ops};
use candle_amp_benches::{normal, tracked};
use candle_core::{DType, Var};

use common::{backward, forward, short};

/// Backward has no parts in public, but it leaves out a pass whose result nobody wants.
fn main() -> Result<()> {
    let mut criterion = short();
    for (batch, from, to, size, kernel, stride) in [
        (128, 3, 16, 32, 3, 1),
        (128, 16, 16, 32, 3, 1),
        (128, 16, 32, 32, 3, 2),
        (128, 16, 32, 32, 1, 2),
        (128, 32, 32, 16, 3, 1),
        (128, 64, 64, 8, 3, 1),
        (64, 64, 64, 32, 3, 1),
    ] {
        for dtype in [DType::F32, DType::BF16] {
            let shape = format!("{from}->{to} {size}x{size} {kernel}x{kernel} stride {stride}");
            let mut group = criterion.benchmark_group(format!("conv {shape} {dtype:?}"));
            let config = Conv2dConfig { padding: kernel / 2, stride, ..Default::default() };
            let x = normal((batch, from, size, size), dtype)?;
            let weight = normal((to, from, kernel, kernel), dtype)?;
            let y = no_grad(|| ops::conv2d(&x, &weight, None, config))?;
            let gradient = normal(y.shape(), dtype)?;
            let (earlier, variable) = (tracked(&x)?, Var::from_tensor(&weight)?);
            group.bench_function("forward", |b| {
                forward(b, || ops::conv2d(&x, &weight, None, config));
            });
            group.bench_function("input gradient", |b| {
                backward(b, &gradient, || ops::conv2d(&earlier, &weight, None, config));
            });
            group.bench_function("weight gradient", |b| {
                backward(b, &gradient, || ops::conv2d(&x, &variable, None, config));
            });
        }
    }
    criterion.final_summary();
    Ok(())
}
