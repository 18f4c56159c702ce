//! Sums on CUDA, in two launches: partial sums in F64, and then all parts of each sum (`reduce.cu`).
//!
//! Memory decides which kernel makes the parts. If at least [`SHORT`] elements of a channel follow each other, as in
//! NCHW, a block sums runs of one channel (`sum_runs`). Otherwise, as in NHWC, neighbouring threads sum neighbouring
//! columns (`sum_columns`), so that their reads are contiguous. A column is then one element of `channels × inner`, and
//! the second launch adds up a channel's columns too.
//!
//! How many parts there are depends on constants and on the tensor, not on the GPU. So every GPU adds in one order.
//! Parts are in scratch memory, which is kept between calls.

use candle_core::{DType, Result, Tensor};

use super::channels::Channels;
use crate::kernels::cuda::{Gpu, Grid, Source, is_aligned, pack, suffix};

static SOURCE: Source = Source { name: "reduce", code: include_str!("reduce.cu") };

/// Below this, the elements of a channel that follow each other are too few for a block.
const SHORT: usize = 64;
/// Enough blocks for any GPU. A constant, so that sums have the same order on every GPU.
const BLOCKS: usize = 1024;
/// Elements of a run, as in the source.
const RUN: usize = 8192;
/// Rows of a part for every thread, at least.
const ROWS: usize = 8;

/// The place of the parts of sums in [`Gpu::scratch`].
const PARTS: usize = 9;

/// The sums of each channel of `x`, contiguous: `(channels)`, in `out`.
pub(super) fn sums(gpu: &Gpu, x: &Tensor, layout: Channels, out: DType) -> Result<Tensor> {
    let Channels { outer, channels, inner } = layout;
    if inner < SHORT && channels * inner > 1 {
        let (parts, count) = columns(gpu, x, outer, channels * inner)?;
        return finish(gpu, &parts, [count, channels, inner], out);
    }
    let runs = outer * inner.div_ceil(RUN);
    let count = BLOCKS.div_ceil(channels.max(1)).clamp(1, runs.max(1));
    let parts = gpu.scratch_from(PARTS, count * channels, DType::F64)?;
    // Block `p * channels + c` writes that element of the parts, and reads runs before `runs`, each
    // of `inner` elements of its channel at most.
    gpu.launch(&SOURCE, ["sum_runs", suffix(x.dtype())?])?
        .write_new(&parts)?
        .read(x)?
        .sizes(&[outer, channels, inner, count])
        .run(Grid::flat(count * channels, inner.next_multiple_of(32).clamp(32, 256)))?;
    finish(gpu, &parts, [count, channels, 1], out)
}

/// Threads of a block that goes over columns.
const THREADS: usize = 256;

/// How columns are shared out, as `Columns` in `common.cuh` takes them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiling {
    /// Whether a thread has several columns.
    pub(crate) packed: bool,
    pub(crate) tiles: usize,
    pub(crate) parts: usize,
}

impl Tiling {
    /// Of `rows` of `columns`, of which `each` lie in 16 bytes.
    pub(crate) fn of(rows: usize, columns: usize, each: usize) -> Self {
        let packed = each > 1 && columns.is_multiple_of(each);
        let packs = if packed { columns / each } else { columns };
        let lanes = match packs {
            0..=8 => 8,
            9..=16 => 16,
            _ => 32,
        };
        let tiles = packs.div_ceil(lanes);
        let most = rows.div_ceil(ROWS * (THREADS / lanes)).max(1);
        let parts = BLOCKS.div_ceil(tiles.max(1)).clamp(1, most);
        Self { packed, tiles, parts }
    }

    /// Of contiguous tensors of so many rows and columns, of one dtype.
    pub(crate) fn over(tensors: &[&Tensor], rows: usize, columns: usize) -> Result<Self> {
        let mut each = 1;
        for (i, tensor) in tensors.iter().enumerate() {
            let own = if is_aligned(tensor)? { pack(tensor.dtype(), tensor.dtype()) } else { 1 };
            each = if i == 0 { own } else { own.min(each) };
        }
        Ok(Self::of(rows, columns, each))
    }

    pub(crate) fn grid(self) -> Grid {
        Grid::flat(self.parts * self.tiles, THREADS)
    }
}

/// Sums of `rows` of `columns` in parts, F64, one after another, and how many parts there are: until the next call.
fn columns(gpu: &Gpu, x: &Tensor, rows: usize, columns: usize) -> Result<(Tensor, usize)> {
    let tiling = Tiling::over(&[x], rows, columns)?;
    let parts = gpu.scratch_from(PARTS, tiling.parts * columns, DType::F64)?;
    // Block `p * tiles + t` reads rows before `rows` and columns before `columns`, and writes those
    // columns of part `p`.
    gpu.launch(&SOURCE, ["sum_columns", suffix(x.dtype())?])?
        .write_new(&parts)?
        .read(x)?
        .sizes(&[rows, columns, tiling.parts, tiling.tiles])
        .int(tiling.packed.into())
        .run(tiling.grid())?;
    Ok((parts, tiling.parts))
}

/// The sums over the first and the last dimension of parts, `(count, channels, inner)`, in `out`.
pub(crate) fn finish(
    gpu: &Gpu,
    parts: &Tensor,
    [count, channels, inner]: [usize; 3],
    out: DType,
) -> Result<Tensor> {
    let y = gpu.empty(channels, out)?;
    // A warp writes an element of `channels`, from as many of the parts as there are.
    gpu.launch(&SOURCE, ["finish", suffix(out)?])?
        .write_new(&y)?
        .read(parts)?
        .sizes(&[count, channels, inner])
        .run(Grid::flat(channels.div_ceil(8), 256))?;
    Ok(y)
}
