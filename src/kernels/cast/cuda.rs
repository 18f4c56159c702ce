use candle_core::{DType, Result, Tensor, bail};

use crate::kernels::cuda::{Gpu, Grid, Source, Strided, Table, address, address_mut, pack, suffix};

static SOURCE: Source = Source { name: "cast", code: include_str!("cast.cu") };
static MANY: Source = Source { name: "cast_many", code: include_str!("many.cu") };

/// Words of a row of the table, the rows of a launch, and elements of a block: as in `many.cu`.
const ROW: usize = 5;
const ROWS: usize = (Table::WORDS - 1) / ROW;
const CHUNK: usize = 1 << 14;

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
    for part in pairs.chunks(ROWS) {
        let (mut words, mut blocks) = (vec![part.len() as u64], 0);
        for (dst, src) in part {
            let len = dst.elem_count();
            let kinds = code(src)? | code(dst)? << 4;
            words.extend([blocks as u64, len as u64, address_mut(dst)?, address(src)?, kinds]);
            blocks += len.div_ceil(CHUNK);
        }
        // A block finds its row by `first_block`, and stays below that row's `len`, which both its
        // tensors have.
        let launch = gpu.launch(&MANY, "cast_many")?.table(Table::new(&words));
        launch.run(Grid::flat(blocks, Grid::THREADS))?;
    }
    Ok(())
}
