//! Casts on CUDA: one tensor in a launch (`cast.cu`), or many contiguous pairs in one (`many.cu`).
//!
//! A view is read by its strides in the launch that casts it, so that it is not copied first. [`Strided`] joins
//! dimensions that one stride can walk. Only a view that then has more than four is copied.
//!
//! `cast.cu` has a kernel for each pair of dtypes. Pairs of one launch of `many.cu` may differ in dtypes: a table has
//! both of each pair, and its blocks branch by them. A launch takes up to [`TensorList::ROWS`] pairs.

use candle_core::{DType, Result, Tensor};

use crate::error::bail;
use crate::kernels::cuda::{
    Gpu, Grid, Launch, Many, Source, Strided, address, address_mut, pack, suffix,
};

static SOURCE: Source = Source { name: "cast", code: include_str!("cast.cu") };
static MANY: Source = Source { name: "cast_many", code: include_str!("many.cu") };

/// Of as many words per tensor as `Row` in `many.cu`.
type TensorList = Many<5>;

/// `x`, of any strides, in `dtype`: a new tensor, in one launch.
pub(super) fn cast(gpu: &Gpu, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let y = gpu.empty(x.shape(), dtype)?;
    cast_to(gpu, &y, x, Launch::write_new)?;
    Ok(y)
}

/// Overwrites `y`, contiguous, with `x`.
pub(super) fn cast_into(gpu: &Gpu, y: &Tensor, x: &Tensor) -> Result<()> {
    cast_to(gpu, y, x, Launch::write)
}

/// The same, with `y` among the arguments by `write`.
fn cast_to(
    gpu: &Gpu,
    y: &Tensor,
    x: &Tensor,
    write: fn(Launch, &Tensor) -> Result<Launch>,
) -> Result<()> {
    let (from, to, n) = (suffix(x.dtype())?, suffix(y.dtype())?, x.elem_count());
    let each = pack(x.dtype(), y.dtype());
    // Elements `i` of both are there for `i < n`, the number of elements of both: that of `x` at
    // `i`, or where its dimensions and strides say.
    if x.is_contiguous() {
        let launch = write(gpu.launch(&SOURCE, ["cast", from, to])?, y)?.read(x)?;
        return launch.size(n).run(Grid::over(n, each));
    }
    let Some(view) = Strided::of([x]) else { return cast_to(gpu, y, &x.contiguous()?, write) };
    let packs = view.packs(each);
    write(gpu.launch(&SOURCE, ["cast_strided", from, to])?, y)?
        .read_strided(x)?
        .size(n)
        .int(packs.into())
        .sizes(&view.words())
        .run(Grid::over(n, if packs { each } else { 1 }))
}

/// Overwrites each first tensor with the second, all contiguous and on `gpu`.
pub(super) fn cast_all(gpu: &Gpu, pairs: &[(&Tensor, &Tensor)]) -> Result<()> {
    let code = |tensor: &Tensor| {
        Ok(match tensor.dtype() {
            DType::F32 => 0u64,
            DType::F16 => 1,
            DType::BF16 => 2,
            DType::F64 => 3,
            other => bail!("expected a tensor of F16, BF16, F32 or F64, got {other:?}"),
        })
    };
    for part in pairs.chunks(TensorList::ROWS) {
        let mut rows = TensorList::new();
        for (dst, src) in part {
            let kinds = code(src)? | code(dst)? << 4;
            rows.add(dst.elem_count(), &[address_mut(dst)?, address(src)?, kinds]);
        }
        // Both tensors of a row have its `len`.
        let (table, grid) = rows.table();
        gpu.launch(&MANY, "cast_many")?.table(table).run(grid)?;
    }
    Ok(())
}
