//! Cumulative sums on CUDA: one launch of `cumsum.cu`, a team of threads for each row or a thread for each line.
//!
//! With few lines side by side, a thread for each would leave most of a GPU idle. If they are long too, they are
//! transposed into rows, and the result is transposed back. [`MANY_LINES`] and [`LONG`] are the limits.

use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::{Gpu, Grid, Source, suffix};
use crate::kernels::elementwise::cuda::in_dtype;
use crate::kernels::elementwise::plain;
use crate::kernels::reduce::channels::Channels;

static SOURCE: Source = Source { name: "cumsum", code: include_str!("cumsum.cu") };

/// Lines side by side that keep a GPU busy with a thread each.
const MANY_LINES: usize = 4096;
/// A line so long that two copies cost less than a thread that adds it up alone.
const LONG: usize = 256;

/// See [`super::cumsum`]; `x` is contiguous, and not empty. Few long lines are copied to be rows, and back.
pub(super) fn cumsum(
    gpu: &Gpu,
    x: &Tensor,
    dim: usize,
    from_end: bool,
    out: DType,
) -> Result<Tensor> {
    let Channels { outer, channels: count, inner } = Channels::of(x.dims(), dim);
    let (lines, last) = (outer * inner, x.rank() - 1);
    if inner > 1 && lines < MANY_LINES && count > LONG {
        let rows = plain(&x.transpose(dim, last)?)?;
        return plain(&cumsum(gpu, &rows, last, from_end, out)?.transpose(dim, last)?);
    }
    in_dtype(x.dtype(), out, |out| {
        let y = gpu.empty(x.shape(), out)?;
        let of = |name| Ok::<_, candle_core::Error>([name, suffix(x.dtype())?, suffix(out)?]);
        // Both tensors have `outer * count * inner` elements, and the kernels reach no others.
        if inner == 1 {
            let (grid, team) = Grid::rows(lines, count);
            let launch = gpu.launch(&SOURCE, of("cumsum_rows")?)?.write_new(&y)?.read(x)?;
            launch.sizes(&[lines, count]).int(from_end.into()).int(team).run(grid)?;
        } else {
            let launch = gpu.launch(&SOURCE, of("cumsum_lines")?)?.write_new(&y)?.read(x)?;
            let launch = launch.sizes(&[lines, count, inner]).int(from_end.into());
            launch.run(Grid::over(lines, 1))?;
        }
        Ok(y)
    })
}
