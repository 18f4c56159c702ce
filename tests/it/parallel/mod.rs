//! Ranks that train one model together, as threads.

mod averages;
mod batch_norm;
mod checks;
mod overlap;
mod sharded;
mod trajectory;

use std::sync::Arc;
use std::time::Duration;

use candle_amp::dist::{Communicator, DataParallel, DataParallelConfig, Threads};
use candle_amp::{GradScaler, Parameters, Result, ops};
use candle_core::{DType, Device, Tensor, Var};

use crate::util::random;

/// Runs `function` on `size` ranks; a test that hangs fails.
fn on_ranks<T: Send>(
    size: usize,
    function: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    Threads::run_within(Duration::from_secs(120), size, function)
}

/// Three layers of weights, in `dtype`, that differ from rank to rank until rank 0's are everywhere.
fn layers(dtype: DType, rank: usize) -> Result<(Vec<Var>, Parameters)> {
    let shapes = [[5, 4], [3, 5], [2, 3]];
    let var = |(at, shape): (usize, [usize; 2])| {
        Var::from_tensor(&random((10 * rank + at) as u64, (shape[0], shape[1]), dtype))
    };
    let vars: Vec<Var> = shapes.into_iter().enumerate().map(var).collect::<Result<_, _>>()?;
    let named = vars.iter().enumerate().map(|(at, var)| (format!("layer{at}"), var.clone()));
    Ok((vars.clone(), Parameters::named(named)?))
}

/// The mean square of what the layers make of `x`, in F32.
fn loss(vars: &[Var], x: &Tensor) -> candle_core::Result<Tensor> {
    let mut y = x.clone();
    for var in vars {
        y = ops::tanh(&ops::linear(&y, var, None)?)?;
    }
    ops::mean(&ops::mul(&y, &y)?.to_dtype(DType::F32)?)
}

/// Small buckets, so that there are several.
fn small_buckets() -> DataParallelConfig {
    DataParallelConfig { first_bucket_bytes: 30, bucket_bytes: 100, ..Default::default() }
}

fn attached(
    communicator: Arc<dyn Communicator>,
    parameters: &Parameters,
    config: DataParallelConfig,
) -> Result<(DataParallel, GradScaler)> {
    let parallel = DataParallel::with_config(communicator, parameters, config)?;
    let mut scaler = GradScaler::default();
    parallel.attach(&mut scaler)?;
    Ok((parallel, scaler))
}

/// Samples of a rank.
fn samples(rank: usize, dtype: DType) -> Tensor {
    random(100 + rank as u64, (6, 4), dtype)
}

fn cpu() -> Device {
    Device::Cpu
}
