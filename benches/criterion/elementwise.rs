//! Operators on elements, and casts: bound by memory, if nothing else.

mod common;

use anyhow::Result;
use candle_amp::{Autocast, ops};
use candle_amp_benches::{normal, tracked};
use candle_core::{DType, Result as CandleResult, Tensor};
use criterion::Throughput;

use common::{backward, forward, short};

type Operator = fn(&Tensor) -> CandleResult<Tensor>;

const LENGTH: usize = 1 << 21;

fn main() -> Result<()> {
    let mut criterion = short();
    let operators: [(&str, Operator); 5] = [
        ("relu", ops::relu),
        ("gelu_tanh", ops::gelu_tanh),
        ("sigmoid", ops::sigmoid),
        ("mul", |x| ops::mul(x, &x.detach())),
        ("chain", |x| ops::relu(&ops::mul(&ops::sigmoid(x)?, &x.detach())?)),
    ];
    for (name, operator) in operators {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let mut group = criterion.benchmark_group(format!("{name} {dtype:?}"));
            group.throughput(Throughput::Elements(LENGTH as u64));
            let (x, gradient) = (tracked(&normal(LENGTH, dtype)?)?, normal(LENGTH, dtype)?);
            group.bench_function("forward", |b| forward(b, || operator(&x)));
            group.bench_function("backward", |b| backward(b, &gradient, || operator(&x)));
        }
    }

    // A cast has no operator of its own. A sum with values of a wider dtype has one in it; what it
    // costs is the difference to the sum that needs none.
    let mut group = criterion.benchmark_group("cast");
    group.throughput(Throughput::Elements(LENGTH as u64));
    let (x, other) = (normal(LENGTH, DType::F32)?, normal(LENGTH, DType::F32)?);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (amp, x) = (Autocast::new(DType::BF16), x.to_dtype(dtype)?);
        group.bench_function(format!("{dtype:?} and add in F32"), |b| {
            forward(b, || amp.scope(|| ops::add(&x, &other)));
        });
    }
    group.finish();
    criterion.final_summary();
    Ok(())
}
