//! FlashAttention-2 (Tri Dao) on tensor cores: forward in one launch, backward in two.
//!
//! A forward block takes some queries of one head and reads the keys and values tile by tile. It keeps the largest
//! score, the sum and the output in registers, so no score is written to memory.
//!
//! Backward recomputes the probabilities from the maximum and the inverse sum of each query. The first kernel writes
//! the gradient of queries and, for each query, output times gradient; the second reads that for the gradient of keys.
//! So one block adds up each gradient, in one order. The output is also kept in F32: rounded to 16 bits, its error
//! would exceed the gradient of a score if values are far from zero.
//!
//! Products are by `mma.sync`, or by `wgmma` on Hopper ([`Products`]); both save the same for backward. An F32 operand
//! is the sum of two TF32 terms, or is rounded to one where [`allow_tf32`] is set.

use candle_core::{DType, IndexOp, Result, Tensor};

use super::mask::Mask;
use super::saved::{Kept, Saved};
use super::settings::Settings;
use crate::kernels::choice::tf32::allow_tf32;
use crate::kernels::cuda::{Gpu, Grid, Launch, Source, address, start, suffix};
use crate::kernels::elementwise::plain;
use crate::kernels::{cast, in_dtype};

static FORWARD: Source = Source {
    name: "flash",
    code: concat!(
        include_str!("scores.cuh"),
        include_str!("tiles.cuh"),
        include_str!("warps.cuh"),
        include_str!("wgmma.cuh"),
        include_str!("flash.cu")
    ),
};
static BACKWARD: Source = Source {
    name: "flash_backward",
    code: concat!(
        include_str!("scores.cuh"),
        include_str!("tiles.cuh"),
        include_str!("warps.cuh"),
        include_str!("wgmma.cuh"),
        include_str!("flash_backward.cu")
    ),
};

/// The place of backward's averages in [`Gpu::scratch`].
const AVERAGES: usize = 11;

/// The widest heads there are kernels for.
const WIDEST: usize = 128;

/// What multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Products {
    /// A warp, by `mma.sync`.
    OfWarps,
    /// Four warps together, by `wgmma`, which compute capability 9.0 has, and no later one.
    OfGroups,
}

impl Products {
    pub(super) fn of(gpu: &Gpu, dtype: DType) -> Result<Self> {
        let hopper = gpu.compute_capability()? == (9, 0);
        Ok(if hopper && dtype != DType::F32 { Self::OfGroups } else { Self::OfWarps })
    }

    /// The grid for so many heads of `rows` each, as wide as those of `q`. Blocks have matrices of their own rows in shared
    /// memory, one in forward and two in backward, or none, as in the sources.
    fn grid(self, q: &Tensor, heads: usize, rows: usize, is_backward: bool) -> Result<Grid> {
        let (wide, is_f32) = (wide(q)?, q.dtype() == DType::F32);
        let (block, shared) = match self {
            Self::OfWarps if is_f32 && wide == WIDEST && is_backward => (64, 2 * 64 * 4 * wide),
            Self::OfWarps => (64, 0), // in registers
            Self::OfGroups => {
                let block = if is_backward == (wide == WIDEST) { 128 } else { 192 };
                let own = if is_backward { 2 } else { 1 };
                // With two tiles of 64 rows of each of two tensors, from a multiple of 1024 bytes on.
                (block, (4 * 64 + own * block) * 2 * wide + 1024)
            }
        };
        Ok(Grid { shared, ..Grid::flat(heads * rows.div_ceil(block), 2 * block) })
    }
}

/// The most queries, and keys, of a head: kernels count rows in 32 bits, which takes fewer registers.
const MOST_ROWS: usize = i32::MAX as usize;

/// Whether it is meant for attention of these queries, whatever their width.
pub(super) fn is_for(q: &Tensor) -> bool {
    matches!(q.dtype(), DType::F16 | DType::BF16 | DType::F32) && q.elem_count() > 0
}

/// Whether there are kernels for these, on compute capability 8.0 and later. Heads of F32 or 16 bits have at most 128
/// elements and start at multiples of 16 bytes. Keys and values have one size, which is not 0.
pub(super) fn fits(gpu: &Gpu, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<bool> {
    let d = q.dim(3)?;
    Ok(is_for(q)
        && k.elem_count() > 0
        && d.is_multiple_of(16 / q.dtype().size_in_bytes())
        && d <= WIDEST
        && v.dim(3)? == d
        && q.dim(2)?.max(k.dim(2)?) <= MOST_ROWS
        && lies_well(q)?
        && lies_well(k)?
        && lies_well(v)?
        && gpu.compute_capability()? >= (8, 0))
}

/// Whether rows are read 16 bytes at a time.
fn lies_well(x: &Tensor) -> Result<bool> {
    Ok(lies_well_from(x, start(x)?))
}

/// The same, of a tensor that is known to start there.
fn lies_well_from(x: &Tensor, start: u64) -> bool {
    let (strides, last) = x.stride().split_at(3);
    let pack = 16 / x.dtype().size_in_bytes();
    let rows = strides.iter().all(|stride| stride.is_multiple_of(pack));
    rows && last == [1] && start.is_multiple_of(16)
}

/// Where the rows of a tensor are: asked for once for both kernels of backward, which both read them.
#[derive(Clone, Copy)]
struct StridedRows<'a> {
    start: u64,
    strides: &'a [usize],
}

impl<'a> StridedRows<'a> {
    fn of(x: &'a Tensor) -> Result<Self> {
        Ok(Self { start: start(x)?, strides: &x.stride()[..3] })
    }

    /// Adds the address, and the strides of a row.
    fn read(self, launch: Launch) -> Launch {
        launch.address(self.start).sizes(self.strides)
    }
}

/// The width of the kernels for heads as wide as those of `q`.
fn wide(q: &Tensor) -> Result<usize> {
    Ok(if q.dim(3)? <= 64 { 64 } else { WIDEST })
}

/// The kernel `name` for heads as wide as those of `q`.
fn launch(
    gpu: &Gpu,
    source: &'static Source,
    products: Products,
    name: &'static str,
    q: &Tensor,
) -> Result<Launch> {
    let groups = if products == Products::OfGroups { "groups" } else { "" };
    let width = if wide(q)? == WIDEST { "128" } else { "64" };
    let rounded = if q.dtype() == DType::F32 && allow_tf32() { "tf32" } else { "" };
    gpu.launch(source, [name, groups, width, rounded, suffix(q.dtype())?])
}

/// Adds what all kernels take: queries before `t`, keys before `s` and columns before `d` are read;
/// head `i` has keys of head `i / (h / kv_heads)`.
fn attention(
    launch: Launch,
    [q, k]: [&Tensor; 2],
    rows: [StridedRows<'_>; 3],
    mask: &Mask,
    settings: Settings,
) -> Result<Launch> {
    let ((_, h, t, d), (_, kv_heads, s, _)) = (q.dims4()?, k.dims4()?);
    let launch = rows.into_iter().fold(launch, |launch, rows| rows.read(launch));
    let launch = mask.settings(launch, settings)?.sizes(&[h, h / kv_heads, t, s, d]);
    Ok(launch.int(settings.causal.into()))
}

/// See [`super::forward`], of what [`fits`]. With `rows` the output, in both dtypes, is a view of
/// `(b, t, h, d)`.
pub(super) fn forward(
    gpu: &Gpu,
    products: Products,
    [q, k, v]: [&Tensor; 3],
    mask: Option<&Tensor>,
    settings: Settings,
    rows: bool,
) -> Result<(Tensor, Kept)> {
    let ((b, h, t, d), s) = (q.dims4()?, k.dim(2)?);
    let output = |dtype| match rows {
        true => gpu.empty((b, t, h, d), dtype)?.transpose(1, 2),
        false => gpu.empty((b, h, t, d), dtype),
    };
    let (out, unrounded) = (output(q.dtype())?, output(DType::F32)?);
    let sums = gpu.empty((2 * b, h, t), DType::F32)?;
    let (max, inverse_sum) = (sums.narrow(0, 0, b)?, sums.narrow(0, b, b)?);
    let mask = Mask::of(mask, [b, h, t, s], DType::F32)?;
    // Queries before `t` are written, at the same places of both.
    let grid = products.grid(q, b * h, t, false)?;
    let launch = launch(gpu, &FORWARD, products, "flash", q)?.write_strided(&out)?;
    let launch = launch.write_strided(&unrounded)?.sizes(&out.stride()[..3]);
    let launch = launch.write_new(&max)?.write_new(&inverse_sum)?;
    let rows = [StridedRows::of(q)?, StridedRows::of(k)?, StridedRows::of(v)?];
    attention(launch, [q, k], rows, &mask, settings)?.run(grid)?;
    Ok((out, Kept { max, inverse_sum, unrounded: Some(unrounded) }))
}

/// See [`super::backward`], of what [`fits`] and has the `output` in F32; no mask's gradient.
pub(super) fn backward(
    gpu: &Gpu,
    products: Products,
    saved: Saved<'_>,
    output: &Tensor,
    settings: Settings,
    wants: [Option<DType>; 4],
) -> Result<[Option<Tensor>; 3]> {
    let of = |i: usize, like: &Tensor| {
        wants[i].map(|want| gpu.empty(like.shape(), written(saved.q, want))).transpose()
    };
    let all = [of(0, saved.q)?, of(1, saved.k)?, of(2, saved.v)?];
    write(gpu, products, saved, output, settings, all.each_ref().map(Option::as_ref))?;
    let as_wanted = |i: usize| match (&all[i], wants[i]) {
        (Some(gradient), Some(want)) => in_dtype(gradient, want).map(Some),
        _ => Ok(None),
    };
    Ok([as_wanted(0)?, as_wanted(1)?, as_wanted(2)?])
}

/// See [`super::backward_packed`], of what [`fits`] and has the `output` in F32.
pub(super) fn backward_packed(
    gpu: &Gpu,
    products: Products,
    saved: Saved<'_>,
    output: &Tensor,
    settings: Settings,
    want: DType,
) -> Result<Tensor> {
    let (b, h, t, d) = saved.q.dims4()?;
    let all = gpu.empty((b, t, 3, h, d), written(saved.q, want))?;
    let part = |i| all.i((.., .., i))?.transpose(1, 2);
    let parts = [part(0)?, part(1)?, part(2)?];
    write(gpu, products, saved, output, settings, parts.each_ref().map(Some))?;
    in_dtype(&all.flatten_from(2)?, want)
}

/// What kernels write, for a gradient of `want`.
fn written(q: &Tensor, want: DType) -> DType {
    if want == q.dtype() { want } else { DType::F32 }
}

/// Writes the gradients of queries, keys and values that there are tensors for: of their shapes, F32
/// or of the dtype of `q`, in rows that start at even elements.
fn write(
    gpu: &Gpu,
    products: Products,
    saved: Saved<'_>,
    output: &Tensor,
    settings: Settings,
    [dq, dk, dv]: [Option<&Tensor>; 3],
) -> Result<()> {
    let Saved { q, k, v, mask, kept, grad } = saved;
    let ((b, h, t, _), (_, kv_heads, s, _)) = (q.dims4()?, k.dims4()?);
    let copy;
    let mut grad_rows = StridedRows::of(grad)?;
    if grad.dtype() != q.dtype() || !lies_well_from(grad, grad_rows.start) {
        copy = cast(grad, q.dtype())?;
        grad_rows = StridedRows::of(&copy)?;
    }
    let (max, inverse_sum) = (plain(&kept.max)?, plain(&kept.inverse_sum)?);
    let averages = gpu.scratch_from(AVERAGES, b * h * t, DType::F32)?;
    let [averages_at, max_at, inverse_sum_at] =
        [address(&averages)?, address(&max)?, address(&inverse_sum)?];
    let rows = [StridedRows::of(q)?, StridedRows::of(k)?, StridedRows::of(v)?];
    let mask = Mask::of(mask, [b, h, t, s], DType::F32)?;
    let into = |launch: Launch, x: Option<&Tensor>| {
        let Some(x) = x else { return Ok(launch.write_or_null(None)?.sizes(&[0; 3]).int(0)) };
        let launch = launch.write_strided(x)?.sizes(&x.stride()[..3]);
        Ok::<_, candle_core::Error>(launch.int((x.dtype() == DType::F32).into()))
    };
    if dq.is_some() || dk.is_some() {
        // Rows before `t` of `dq` and the averages are written, and as many maxima, shares and rows of the output
        // read.
        let launch = into(launch(gpu, &BACKWARD, products, "flash_queries", q)?, dq)?;
        let launch = launch.address(averages_at).address(max_at).address(inverse_sum_at);
        let launch = StridedRows::of(output)?.read(grad_rows.read(launch));
        let grid = products.grid(q, b * h, t, true)?;
        attention(launch, [q, k], rows, &mask, settings)?.run(grid)?;
    }
    if dk.is_some() || dv.is_some() {
        // Rows before `s` of `dk` and `dv` are written, and averages read where there is a `dk`.
        let launch = launch(gpu, &BACKWARD, products, "flash_keys", q)?;
        let launch = into(into(launch, dk)?, dv)?;
        let launch = launch.address(averages_at).address(max_at).address(inverse_sum_at);
        let launch = grad_rows.read(launch);
        let grid = products.grid(q, b * kv_heads, s, true)?;
        attention(launch, [q, k], rows, &mask, settings)?.run(grid)?;
    }
    Ok(())
}
