//! Element-wise arithmetic, ReLU and dropout on CUDA: one launch of `elementwise.cu` each, beside copies and casts.
//!
//! [`binary`] reads views by their strides, so that broadcast operands are not copied first. It copies only views that
//! [`Strided`] cannot describe. The other functions take contiguous tensors. Kernels write the dtype of an operand or
//! that of the arithmetic; for another dtype, [`in_dtype`] adds a cast.
//!
//! Every tensor of a launch has `n` elements, and the kernel reaches no others. It finds an element by its number, or
//! by the dimensions and strides of a view of `n` elements.

use candle_core::{DType, Result, Shape, Tensor};
use rand_chacha::ChaCha8Rng;

use super::plain::plain;
use crate::kernels::accumulator;
use crate::kernels::capture;
use crate::kernels::cast;
use crate::kernels::cuda::{Gpu, Grid, Source, Strided, pack, suffix};

static SOURCE: Source = Source { name: "elementwise", code: include_str!("elementwise.cu") };

/// Runs `kernel` for a result in `out`: kernels write the dtype of their arguments or that of the
/// arithmetic, and other pairs are rare.
pub(crate) fn in_dtype(
    dtype: DType,
    out: DType,
    kernel: impl FnOnce(DType) -> Result<Tensor>,
) -> Result<Tensor> {
    let near = if out == dtype { dtype } else { accumulator(dtype) };
    let y = kernel(near)?;
    if near == out { Ok(y) } else { cast(&y, out) }
}

fn named(name: &'static str, t: DType, o: DType) -> Result<[&'static str; 3]> {
    Ok([name, suffix(t)?, suffix(o)?])
}

/// `name` of `a` and `b`, of any strides, in `out`.
pub(super) fn binary(
    gpu: &Gpu,
    name: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: DType,
) -> Result<Tensor> {
    in_dtype(a.dtype(), out, |out| {
        if a.is_contiguous() && b.is_contiguous() {
            return flat(gpu, name, a, b, out);
        }
        let Some(view) = Strided::of([a, b]) else {
            return flat(gpu, name, &plain(a)?, &plain(b)?, out);
        };
        let (y, n) = (gpu.empty(a.shape(), out)?, a.elem_count());
        let each = pack(a.dtype(), out);
        let packs = view.packs(each);
        gpu.launch(&SOURCE, [name, "strided", suffix(a.dtype())?, suffix(out)?])?
            .write_new(&y)?
            .read_strided(a)?
            .read_strided(b)?
            .size(n)
            .int(packs.into())
            .sizes(&view.words())
            .run(Grid::over(n, if packs { each } else { 1 }))?;
        Ok(y)
    })
}

/// `name` of `a` and `b`, both contiguous.
pub(super) fn flat(
    gpu: &Gpu,
    name: &'static str,
    a: &Tensor,
    b: &Tensor,
    out: DType,
) -> Result<Tensor> {
    let (y, n) = (gpu.empty(a.shape(), out)?, a.elem_count());
    let launch = gpu.launch(&SOURCE, named(name, a.dtype(), out)?)?;
    let launch = launch.write_new(&y)?.read(a)?.read(b)?.size(n);
    launch.run(Grid::over(n, pack(a.dtype(), out)))?;
    Ok(y)
}

/// As [`flat`], all of one dtype, in the place of `y`, one of the two: each thread reads an element before it writes it.
pub(super) fn flat_over(
    gpu: &Gpu,
    name: &'static str,
    [a, b]: [&Tensor; 2],
    y: &Tensor,
) -> Result<()> {
    let (dtype, n) = (y.dtype(), y.elem_count());
    let launch = gpu.launch(&SOURCE, named(name, dtype, dtype)?)?;
    launch.write(y)?.read(a)?.read(b)?.size(n).run(Grid::over(n, pack(dtype, dtype)))
}

/// `a`, `F32`, and `b`, of 16 bits, both contiguous.
pub(super) fn add_mixed(gpu: &Gpu, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (y, n) = (gpu.empty(a.shape(), a.dtype())?, a.elem_count());
    let launch = gpu.launch(&SOURCE, ["add_mixed", suffix(b.dtype())?])?;
    let launch = launch.write_new(&y)?.read(a)?.read(b)?.size(n);
    launch.run(Grid::over(n, pack(a.dtype(), b.dtype())))?;
    Ok(y)
}

pub(super) fn relu(gpu: &Gpu, x: &Tensor) -> Result<Tensor> {
    let (y, n) = (gpu.empty(x.shape(), x.dtype())?, x.elem_count());
    let launch = gpu.launch(&SOURCE, ["relu", suffix(x.dtype())?])?;
    launch.write_new(&y)?.read(x)?.size(n).run(Grid::over(n, pack(x.dtype(), x.dtype())))?;
    Ok(y)
}

pub(super) fn divisor_gradient(
    gpu: &Gpu,
    [a, b, grad]: [&Tensor; 3],
    out: DType,
) -> Result<Tensor> {
    in_dtype(a.dtype(), out, |out| {
        let (y, n) = (gpu.empty(a.shape(), out)?, a.elem_count());
        let launch = gpu.launch(&SOURCE, named("divisor", a.dtype(), out)?)?;
        let launch = launch.write_new(&y)?.read(a)?.read(b)?.read(grad)?.size(n);
        launch.run(Grid::over(n, pack(a.dtype(), out)))?;
        Ok(y)
    })
}

pub(super) fn selection_gradient(gpu: &Gpu, [a, b, grad]: [&Tensor; 3]) -> Result<Tensor> {
    let (y, n) = (gpu.empty(a.shape(), a.dtype())?, a.elem_count());
    let launch = gpu.launch(&SOURCE, ["selection", suffix(a.dtype())?])?;
    let launch = launch.write_new(&y)?.read(a)?.read(b)?.read(grad)?.size(n);
    launch.run(Grid::over(n, pack(a.dtype(), a.dtype())))?;
    Ok(y)
}

/// `dst` is contiguous, and `src` of its dtype, or cast to that of its arithmetic.
pub(super) fn add_assign(gpu: &Gpu, dst: &Tensor, src: &Tensor) -> Result<()> {
    let wide = accumulator(dst.dtype());
    if src.dtype() != dst.dtype() && src.dtype() != wide {
        return add_assign(gpu, dst, &cast(src, wide)?);
    }
    let n = dst.elem_count();
    let launch = gpu.launch(&SOURCE, named("add_assign", dst.dtype(), src.dtype())?)?;
    let launch = launch.write(dst)?.read(src)?.size(n);
    launch.run(Grid::over(n, pack(dst.dtype(), src.dtype())))
}

pub(super) fn dropout(gpu: &Gpu, x: &Tensor, keep: &Tensor, scale: f64) -> Result<Tensor> {
    let (y, n) = (gpu.empty(x.shape(), x.dtype())?, x.elem_count());
    gpu.launch(&SOURCE, ["dropout", suffix(x.dtype())?])?
        .write_new(&y)?
        .read(x)?
        .read(keep)?
        .double(scale)
        .size(n)
        .run(Grid::over(n, pack(x.dtype(), x.dtype())))?;
    Ok(y)
}

/// See [`super::keep_mask`].
pub(super) fn keep_mask(
    gpu: &Gpu,
    shape: &Shape,
    threshold: u64,
    rng: &ChaCha8Rng,
) -> Result<Tensor> {
    let (y, n) = (gpu.empty(shape, DType::U8)?, shape.elem_count());
    let words = capture::draw_words(rng);
    // 16 elements per thread, those before `n`.
    gpu.launch(&SOURCE, "keep_mask")?
        .write_new(&y)?
        .size(n)
        .size(threshold as usize)
        .sizes(&words.map(|word| word as usize))
        .size(capture::draw(words)? as usize)
        .run(Grid::over(n, 16))?;
    Ok(y)
}
