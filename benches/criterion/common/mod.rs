//! What these benchmarks share, though none needs all of it.

#![allow(dead_code)]

use std::time::Duration;

use candle_amp::{GradScaler, no_grad};
use candle_amp_benches::loss_with;
use candle_core::{Result, Tensor};
use criterion::{BatchSize, Bencher, Criterion};

/// Seconds for all of a file, not minutes; the command line can ask for more.
pub(crate) fn short() -> Criterion {
    let criterion = Criterion::default().sample_size(10);
    let criterion = criterion.warm_up_time(Duration::from_millis(100));
    criterion.measurement_time(Duration::from_millis(400)).configure_from_args()
}

/// Times `f` without a graph.
pub(crate) fn forward(bencher: &mut Bencher<'_>, mut f: impl FnMut() -> Result<Tensor>) {
    bencher.iter(|| no_grad(&mut f).expect("the arguments fit"));
}

/// Times backward alone, from `gradient`, of what `f` returns.
pub(crate) fn backward(
    bencher: &mut Bencher<'_>,
    gradient: &Tensor,
    mut f: impl FnMut() -> Result<Tensor>,
) {
    let loss = || loss_with(&[&f().expect("the arguments fit")], vec![gradient.clone()]);
    let backward = |loss: Result<Tensor>| {
        let loss = loss.expect("the output can be given a gradient");
        let mut scaler = GradScaler::disabled();
        let scaled = scaler.scale(&loss).expect("the loss is one number");
        scaled.backward().expect("the graph is whole");
        (scaler, loss) // dropped after the clock has stopped
    };
    bencher.iter_batched(loss, backward, BatchSize::PerIteration);
}
