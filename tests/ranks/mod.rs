//! Programs that train on several ranks: tests/it runs them on threads, tests/mpi on processes.

pub(crate) mod sharded;
pub(crate) mod trajectory;

use std::sync::Arc;

use candle_amp::dist::{Communicator, DataParallel, DataParallelConfig};
use candle_amp::{GradScaler, Parameters, Result, ops};
use candle_core::{DType, Device, Tensor, Var};

use crate::util::{assert_same, random};

/// Three layers of weights, in `dtype`, that differ from rank to rank until rank 0's are everywhere.
pub(crate) fn layers(dtype: DType, rank: usize) -> Result<(Vec<Var>, Parameters)> {
    let shapes = [[5, 4], [3, 5], [2, 3]];
    let var = |(at, shape): (usize, [usize; 2])| {
        Var::from_tensor(&random((10 * rank + at) as u64, (shape[0], shape[1]), dtype))
    };
    let vars: Vec<Var> = shapes.into_iter().enumerate().map(var).collect::<Result<_, _>>()?;
    let named = vars.iter().enumerate().map(|(at, var)| (format!("layer{at}"), var.clone()));
    Ok((vars.clone(), Parameters::named(named)?))
}

/// The mean square of what the layers make of `x`, in F32.
pub(crate) fn loss(vars: &[Var], x: &Tensor) -> candle_core::Result<Tensor> {
    let mut y = x.clone();
    for var in vars {
        y = ops::tanh(&ops::linear(&y, var, None)?)?;
    }
    ops::mean(&ops::mul(&y, &y)?.to_dtype(DType::F32)?)
}

/// Small buckets, so that there are several.
pub(crate) fn small_buckets() -> DataParallelConfig {
    DataParallelConfig { first_bucket_bytes: 30, bucket_bytes: 100, ..Default::default() }
}

pub(crate) fn attached(
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
pub(crate) fn samples(rank: usize, dtype: DType) -> Tensor {
    random(100 + rank as u64, (6, 4), dtype)
}

pub(crate) fn cpu() -> Device {
    Device::Cpu
}

/// Asserts that all ranks have the same bits.
fn assert_same_everywhere(what: &str, communicator: &dyn Communicator, x: &Tensor) -> Result<()> {
    let all = communicator.all_gather(&x.flatten_all()?)?;
    let first = all.narrow(0, 0, x.elem_count())?.reshape(x.shape())?;
    assert_same(&format!("{what}, rank {} and rank 0", communicator.rank()), x, &first);
    Ok(())
}
