//! What the command lines have in common.

use std::fmt;

use anyhow::{Result, ensure};
use candle_amp::Autocast;
use candle_core::{DType, Device};
use clap::ValueEnum;
use serde::{Serialize, Serializer};

/// What convolutions and matrix products compute in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Precision {
    F32,
    F16,
    Bf16,
}

impl Precision {
    fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    /// The dtype that a model's variables are stored in.
    pub(crate) fn storage(self, master_weights: bool) -> DType {
        if master_weights { self.dtype() } else { DType::F32 }
    }

    pub(crate) fn autocast(self) -> Autocast {
        match self {
            Self::F32 => Autocast::disabled(),
            half => Autocast::new(half.dtype()),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.dtype().as_str())
    }
}

impl Serialize for Precision {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A whole number from one to a million: what it counts fits in memory.
pub(crate) fn up_to_a_million(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| (1..=1_000_000).contains(number));
    number.ok_or_else(|| "expected a whole number from 1 to 1000000".to_owned())
}

/// A number above zero that F32 can hold.
pub(crate) fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|&x: &f64| x as f32 > 0. && (x as f32).is_finite());
    number.ok_or_else(|| "expected a number above zero".to_owned())
}

/// A wrong use of the command line, as opposed to a failure.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Where a dynamic loss scale starts if `--init-scale` does not say.
pub(crate) const INIT_SCALE: f64 = 65536.;

/// Checks that there is a loss scale to start where `--init-scale` says.
pub(crate) fn check_init_scale(init_scale: f64, is_dynamic: bool) -> Result<()> {
    ensure!(
        is_dynamic || init_scale == INIT_SCALE,
        Usage("--init-scale needs a dynamic loss scale, such as that of --precision f16".into())
    );
    Ok(())
}

/// Checks what ranks and options ask of each other.
pub(crate) fn check_ranks(ranks: usize, batch_size: usize, gpu: bool, sharded: bool) -> Result<()> {
    ensure!(
        ranks > 1 || !sharded,
        Usage(
            "--sharded divides the optimizer's state among ranks: start several by mpirun -n N, in a \
             build with --features mpi"
                .into()
        )
    );
    ensure!(
        batch_size.is_multiple_of(ranks),
        Usage(format!(
            "--batch-size is {batch_size}, of all ranks together, and {ranks} ranks do not divide it"
        ))
    );
    ensure!(
        ranks == 1 || !gpu,
        Usage("--gpu trains on one device: start one process, without mpirun".into())
    );
    Ok(())
}

/// Checks that `--gpu` can be followed.
pub(crate) fn check_gpu(gpu: bool) -> Result<()> {
    ensure!(
        !gpu || candle_core::utils::cuda_is_available(),
        Usage("--gpu needs a build with CUDA: add --features cuda to cargo's options".into())
    );
    Ok(())
}

/// The device to train on.
pub(crate) fn device(gpu: bool) -> Result<Device> {
    if !gpu {
        return Ok(Device::Cpu);
    }
    let device = Device::new_cuda(0)
        .map_err(|error| anyhow::anyhow!("no CUDA device to train on: {error}"))?;
    candle_amp::backend::keep_memory(&device)?; // as PyTorch does
    Ok(device)
}
