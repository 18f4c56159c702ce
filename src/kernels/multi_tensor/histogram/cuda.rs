//! One launch, and one read of a few thousand counts.

use candle_core::{DType, Result, Tensor};

use super::counts::{BINS, Counts};
use crate::error::bail;
use crate::kernels::cuda::{Gpu, Grid, Source, suffix};

static SOURCE: Source = Source { name: "histogram", code: include_str!("histogram.cu") };

/// Elements a block counts at least, and blocks at most: each counts below 2^32.
const EACH: usize = 1 << 14;
const BLOCKS: usize = 1 << 12;

/// See [`super::exponents`]; `x` is contiguous.
pub(super) fn exponents(gpu: &Gpu, x: &Tensor, factor: f32) -> Result<Counts> {
    let n = x.elem_count();
    let counts = gpu.zeros(BINS * 3 + 3, DType::I64)?;
    // Elements before `n`; as many counts as the kernel has.
    gpu.launch(&SOURCE, ["exponents", suffix(x.dtype())?])?
        .write(&counts)?
        .read(x)?
        .size(n)
        .float(factor)
        .run(Grid::flat(n.div_ceil(EACH).min(BLOCKS), Grid::THREADS))?;
    let counts: Vec<u64> = Gpu::to_host::<i64>(&counts)?.into_iter().map(|n| n as u64).collect();
    let (bins, rest) = counts.split_at(BINS * 3);
    let &[zero, infinite, nan] = rest else { bail!("counts that were not made here") };
    Ok(Counts { bins: bins.as_chunks::<3>().0.to_vec(), zero, infinite, nan })
}
