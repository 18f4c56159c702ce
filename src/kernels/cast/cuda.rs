use candle_core::{DType, Result, Tensor};

use crate::kernels::cuda::{Gpu, Grid, Source, Strided, pack, suffix};

static SOURCE: Source = Source { name: "cast", code: include_str!("cast.cu") };

/// `x`, of any strides, in `dtype`: a new tensor, in one launch.
pub(super) fn cast(gpu: &Gpu, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let y = gpu.empty(x.shape(), dtype)?;
    cast_into(gpu, &y, x)?;
    Ok(y)
}

/// Overwrites `y`, contiguous, with `x`.
pub(super) fn cast_into(gpu: &Gpu, y: &Tensor, x: &Tensor) -> Result<()> {
    let (from, to, n) = (suffix(x.dtype())?, suffix(y.dtype())?, x.elem_count());
    let each = pack(x.dtype(), y.dtype());
    // Elements `i` of both are there for `i < n`, the number of elements of both: that of `x` at
    // `i`, or where its dimensions and strides say.
    if x.is_contiguous() {
        let launch = gpu.launch(&SOURCE, &format!("cast_{from}_{to}"))?.write(y)?.read(x)?;
        return launch.size(n).run(Grid::over(n, each));
    }
    let Some(view) = Strided::of([x]) else { return cast_into(gpu, y, &x.contiguous()?) };
    let packs = view.packs(each);
    gpu.launch(&SOURCE, &format!("cast_strided_{from}_{to}"))?
        .write(y)?
        .read_strided(x)?
        .size(n)
        .int(packs.into())
        .sizes(&view.words())
        .run(Grid::over(n, if packs { each } else { 1 }))
}
