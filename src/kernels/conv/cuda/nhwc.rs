//! NHWC convolutions on CUDA, where cuDNN does not do them.
//!
//! im2row writes a row for each pixel of the batch: its taps, in the order `(kh, kw, channels)`. The weights are
//! transposed to `(c_out, kh, kw, c_in / groups)`. Then `rows × weightsᵀ` is the output in NHWC already, so nothing has
//! to be moved after the product, and cuBLASLt can add the bias in it.

use candle_core::{DType, Result, Tensor};

use super::{Shape, WORKSPACE, library, library_gradient, rows, sizes, without_cudnn};
use crate::kernels::choice::algorithm::chosen;
use crate::kernels::cuda::{Gpu, Grid, Matrices, PassKind, Product, Source, pack, suffix};
use crate::kernels::elementwise::cuda::in_dtype as near;
use crate::kernels::elementwise::{add_assign, plain};
use crate::kernels::gemm::add_bias;
use crate::kernels::in_dtype;
use crate::kernels::reduce::cuda::Tiling;

static SOURCE: Source = Source {
    name: "conv2d_nhwc",
    code: concat!(include_str!("../shape.cuh"), include_str!("../conv2d_nhwc.cu")),
};

/// Pixels a thread lays out, as in the source.
const PIXELS: usize = 4;

/// See [`super::forward`], of operands in `wide` or a 16-bit dtype.
pub(super) fn forward(
    gpu: &Gpu,
    [x, weight]: [&Tensor; 2],
    bias: Option<&Tensor>,
    shape: &Shape,
    wide: DType,
    out: DType,
) -> Result<Tensor> {
    let (dtype, dims) = (x.dtype(), shape.out_dims());
    if shape.depthwise() {
        chosen(PassKind::Forward.name(), "depthwise kernel", shape);
        let y = gpu.empty(&dims, if out == dtype { out } else { wide })?;
        return depthwise(gpu, "depthwise", [x, weight, &y], bias, shape, out);
    }
    let product_dtype = if bias.is_none() && out == dtype { dtype } else { wide };
    if let Some(y) = library(gpu, PassKind::Forward, shape, [x, weight], product_dtype, None)? {
        return biased(gpu, &y, bias, out);
    }
    without_cudnn(gpu, PassKind::Forward, "im2col, cublas", shape, dtype);
    let tiles = ImageTiles::new(shape, dtype);
    let weight = tiles.weight(gpu, weight)?;
    let groups = shape.geometry.groups;
    with_bias(gpu, &dims, [dtype, wide, out], bias, groups, |y, bias| {
        for tile in tiles.all() {
            let part = tile.of(y)?;
            let done = product(
                gpu,
                Product {
                    batch: groups,
                    m: tile.count,
                    k: tiles.row,
                    n: shape.group_out(),
                    lhs: tiles.columns(gpu, x, &tile)?.matrices(),
                    rhs: Matrices { transposed: true, ..tiles.weights(&weight) },
                    out: rows(&part, shape.c_out, shape.group_out()),
                },
                bias,
            )?;
            if !done {
                return Ok(false);
            }
        }
        Ok(true)
    })
}

/// See [`super::dgrad`], of operands in `wide` or a 16-bit dtype.
pub(super) fn dgrad(
    gpu: &Gpu,
    [grad, weight]: [&Tensor; 2],
    bias: Option<&Tensor>,
    shape: &Shape,
    wide: DType,
    out: DType,
) -> Result<Tensor> {
    let (dtype, dims) = (grad.dtype(), shape.input_dims());
    if shape.depthwise() {
        chosen(PassKind::Dgrad.name(), "depthwise kernel", shape);
        let dx = gpu.empty(&dims, if out == dtype { out } else { wide })?;
        return depthwise(gpu, "depthwise_dgrad", [grad, weight, &dx], bias, shape, out);
    }
    let product_dtype = if bias.is_none() && out == dtype { dtype } else { wide };
    if let Some(dx) = library(gpu, PassKind::Dgrad, shape, [grad, weight], product_dtype, None)? {
        return biased(gpu, &dx, bias, out);
    }
    // Summed after the product, so not rounded by it.
    without_cudnn(gpu, PassKind::Dgrad, "im2col, cublas", shape, dtype);
    let tiles = ImageTiles::of_images(shape, wide);
    let weight = tiles.weight(gpu, weight)?;
    let (groups, outs) = (shape.geometry.groups, shape.group_out());
    let of = |tile: &ImageTile, grad: &Tensor, to: Matrices<'_>, bias: Option<&Tensor>| {
        let product_of = Product {
            batch: groups,
            m: tile.count,
            k: outs,
            n: tiles.row,
            lhs: rows(grad, shape.c_out, outs),
            rhs: tiles.weights(&weight),
            out: to,
        };
        product(gpu, product_of, bias)
    };
    if shape.pointwise() {
        return with_bias(gpu, &dims, [dtype, wide, out], bias, groups, |dx, bias| {
            let tile = ImageTile { first: 0, count: shape.batch * shape.pixels() };
            of(&tile, grad, rows(dx, shape.c_in, shape.group_in()), bias)
        });
    }
    let near = if wide == DType::F32 && out != DType::F64 { out } else { wide };
    let dx = gpu.empty(&dims, near)?;
    let row2im = ["row2im", suffix(wide)?, suffix(near)?];
    let columns = gpu.scratch(0, tiles.elements(), wide)?;
    for tile in tiles.all() {
        of(&tile, &tile.of(grad)?, rows(&columns, groups * tiles.row, tiles.row), None)?;
        let images = tile.count / shape.pixels();
        // A thread writes a few channels of a pixel of the tile's images, from those of its rows.
        let kernel = gpu.launch(&SOURCE, row2im)?.read(&columns)?.write(&dx)?;
        let kernel = kernel.read_or_null(bias)?;
        let kernel = kernel.sizes(&[tile.first / shape.pixels(), images, tiles.row, groups]);
        let each = pack(wide, wide);
        kernel.sizes(&sizes(shape)).run(Grid::over(images * shape.image(), each))?;
    }
    in_dtype(&dx, out)
}

/// See [`super::wgrad`], of operands in `wide` or a 16-bit dtype.
pub(super) fn wgrad(
    gpu: &Gpu,
    [x, grad]: [&Tensor; 2],
    shape: &Shape,
    wide: DType,
    out: DType,
) -> Result<Tensor> {
    let dtype = x.dtype();
    if shape.depthwise() {
        chosen(PassKind::Wgrad.name(), "depthwise kernel", shape);
        return in_dtype(&depthwise_wgrad(gpu, x, grad, shape, wide)?, out);
    }
    let written = library_gradient(dtype, out, wide);
    if let Some(dw) = library(gpu, PassKind::Wgrad, shape, [x, grad], written, None)? {
        return from_taps(gpu, &dw, shape, shape.taps(), out);
    }
    without_cudnn(gpu, PassKind::Wgrad, "im2col, cublas", shape, dtype);
    let tiles = ImageTiles::new(shape, dtype);
    let (groups, outs) = (shape.geometry.groups, shape.group_out());
    let mut sum: Option<Tensor> = None;
    for tile in tiles.all() {
        let dims = (shape.c_out, tiles.row);
        let part = match &sum {
            None => gpu.empty(dims, wide)?,
            Some(_) => gpu.scratch(2, shape.c_out * tiles.row, wide)?.reshape(dims)?,
        };
        let outputs = tile.of(grad)?;
        let columns = tiles.columns(gpu, x, &tile)?;
        gpu.product(&Product {
            batch: groups,
            m: outs,
            k: tile.count,
            n: tiles.row,
            lhs: Matrices { transposed: true, ..rows(&outputs, shape.c_out, outs) },
            rhs: columns.matrices(),
            out: tiles.weights(&part),
        })?;
        // One tile after the other.
        sum = Some(match sum {
            None => part,
            Some(sum) => add_assign(sum, &part)?,
        });
    }
    let Some(sum) = sum else { return gpu.zeros(&shape.weight_dims()[..], out) };
    from_taps(gpu, &sum, shape, tiles.row, out)
}

/// The place of a weight with the channels of a tap side by side in [`Gpu::scratch`], or of its gradient.
pub(super) const TURNED: usize = 10;

/// Whether weights in rows of so many elements lie otherwise than the operator's.
pub(super) fn turns(shape: &Shape, row: usize) -> bool {
    shape.kernel_height * shape.kernel_width != 1 || row != shape.taps()
}

/// Transposes `weight` so that the channels of a tap are contiguous, and pads each row with zeros to `row` elements.
/// They are the first elements of the result, which is there until the next call.
pub(super) fn to_taps(gpu: &Gpu, weight: &Tensor, shape: &Shape, row: usize) -> Result<Tensor> {
    if !turns(shape, row) {
        return Ok(weight.clone());
    }
    let taps = shape.kernel_height * shape.kernel_width;
    let to = gpu.scratch_from(TURNED, shape.c_out * row, weight.dtype())?;
    turn(gpu, weight, [shape.c_out, shape.group_in(), taps], [shape.taps(), row], &to)?;
    Ok(to)
}

/// What [`to_taps`] turned, turned back: `(c_out, c_in / groups, kh, kw)`, in `out`.
fn from_taps(gpu: &Gpu, weight: &Tensor, shape: &Shape, row: usize, out: DType) -> Result<Tensor> {
    if !turns(shape, row) {
        let dims = shape.weight_dims();
        let weight = if weight.dims() == dims { weight } else { &weight.reshape(&dims[..])? };
        return in_dtype(weight, out);
    }
    let taps = shape.kernel_height * shape.kernel_width;
    near(weight.dtype(), out, |out| {
        let to = gpu.empty(&shape.weight_dims()[..], out)?;
        turn(gpu, weight, [shape.c_out, taps, shape.group_in()], [row, shape.taps()], &to)?;
        Ok(to)
    })
}

/// Transposes each of `count` matrices `(a, b)`, `lds` elements apart before and after, into `to`.
fn turn(
    gpu: &Gpu,
    from: &Tensor,
    [count, a, b]: [usize; 3],
    lds: [usize; 2],
    to: &Tensor,
) -> Result<()> {
    // A thread writes an element, of those that its matrix has or zero: `lds[1]` for each matrix.
    let name = ["turn", suffix(from.dtype())?, suffix(to.dtype())?];
    let kernel = gpu.launch(&SOURCE, name)?.read(from)?.write_new(to)?;
    kernel.sizes(&[count, a, b]).sizes(&lds).run(Grid::over(count * lds[1], 1))
}

/// The pass `name` of what is read, the weight and what is written.
fn depthwise(
    gpu: &Gpu,
    name: &'static str,
    [from, weight, to]: [&Tensor; 3],
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    let taps = shape.kernel_height * shape.kernel_width;
    let lds = [0, weight.elem_count()];
    let turned = gpu.scratch_from(TURNED, lds[1], weight.dtype())?;
    turn(gpu, weight, [1, shape.c_out, taps], lds, &turned)?;
    let name = [name, suffix(from.dtype())?, suffix(to.dtype())?];
    // A thread writes elements of a pixel, and reads those of their channels in its image.
    let kernel = gpu.launch(&SOURCE, name)?.read(from)?.read(&turned)?;
    let kernel = kernel.read_or_null(bias)?.write(to)?.size(shape.batch);
    kernel.sizes(&sizes(shape)).run(Grid::over(to.elem_count(), 1))?;
    in_dtype(to, out)
}

fn depthwise_wgrad(
    gpu: &Gpu,
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    wide: DType,
) -> Result<Tensor> {
    let (pixels, taps) = (shape.batch * shape.pixels(), shape.kernel_height * shape.kernel_width);
    let tiling = match shape.c_in == shape.c_out {
        true => Tiling::over(&[x, grad], pixels, shape.c_out)?,
        false => Tiling::of(pixels, shape.c_out, 1),
    };
    let sums = gpu.empty((taps, tiling.parts, shape.c_out), DType::F64)?;
    // Block `p * tiles + t` of row `y` has tap `y`: it reads pixels of part `p` and channels of tile `t`,
    // and writes its sums of those.
    let kernel = gpu.launch(&SOURCE, ["depthwise_wgrad", suffix(x.dtype())?])?;
    let kernel = kernel.write(&sums)?.read(x)?.read(grad)?.size(shape.batch);
    let kernel = kernel.sizes(&[tiling.parts, tiling.tiles]).int(tiling.packed.into());
    let grid = tiling.grid();
    kernel.sizes(&sizes(shape)).run(Grid { blocks: [grid.blocks[0], taps, 1], ..grid })?;
    let dw = gpu.empty(&shape.weight_dims()[..], wide)?;
    // A warp reads the parts of an element, and writes that.
    let kernel = gpu.launch(&SOURCE, ["depthwise_merge", suffix(wide)?])?;
    let kernel = kernel.read(&sums)?.write(&dw)?.sizes(&[taps, tiling.parts, shape.c_out]);
    kernel.run(Grid::flat(dw.elem_count().div_ceil(8), 256))?;
    Ok(dw)
}

/// Multiplies, and adds the bias of each column if there is one. Returns `false` and does nothing if cuBLASLt cannot.
fn product(gpu: &Gpu, product: Product<'_>, bias: Option<&Tensor>) -> Result<bool> {
    match bias {
        Some(bias) => gpu.biased_product(&product, bias),
        None => gpu.product(&product).map(|()| true),
    }
}

/// What `products` write, with a bias for each channel, rounded once: in the products where they can,
/// which is where they are of one group.
fn with_bias(
    gpu: &Gpu,
    dims: &[usize],
    [dtype, wide, out]: [DType; 3],
    bias: Option<&Tensor>,
    groups: usize,
    products: impl Fn(&Tensor, Option<&Tensor>) -> Result<bool>,
) -> Result<Tensor> {
    // What a product writes: the dtype of what it reads, or the widest.
    let near = if out == dtype { dtype } else { wide };
    let Some(bias) = bias else {
        let y = gpu.empty(dims, near)?;
        products(&y, None)?;
        return in_dtype(&y, out);
    };
    if groups == 1 && (bias.dtype() == near || near == DType::F32) {
        let (y, bias) = (gpu.empty(dims, near)?, plain(&in_dtype(bias, near)?)?);
        if products(&y, Some(&bias))? {
            return in_dtype(&y, out);
        }
    }
    let y = gpu.empty(dims, wide)?;
    products(&y, None)?;
    biased(gpu, &y, Some(bias), out)
}

/// `y + bias`, a number for each channel, in `out`.
fn biased(gpu: &Gpu, y: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor> {
    let Some(bias) = bias else { return in_dtype(y, out) };
    let bias = plain(&in_dtype(bias, y.dtype())?)?;
    add_bias(gpu, Some(y), Some(&bias), y.dtype(), y.dims().to_vec(), out)
}

/// Tiles of a batch's pixels, small enough for their rows to fit the workspace.
struct ImageTiles<'a> {
    shape: &'a Shape,
    /// Elements of a group's row: its taps, or so many that each row begins as matrices like it.
    row: usize,
    /// Pixels of every part but the last.
    count: usize,
}

struct ImageTile {
    first: usize,
    count: usize,
}

/// The rows of a tile: of their own, or those of the images.
struct Columns {
    tensor: Tensor,
    ld: usize,
    stride: usize,
}

impl Columns {
    fn matrices(&self) -> Matrices<'_> {
        rows(&self.tensor, self.ld, self.stride)
    }
}

impl<'a> ImageTiles<'a> {
    fn new(shape: &'a Shape, dtype: DType) -> Self {
        let all = shape.batch * shape.pixels();
        if shape.pointwise() {
            return Self { shape, row: shape.taps(), count: all };
        }
        let (row, most) = Self::room(shape, dtype);
        Self { shape, row, count: all.min((most / 8 * 8).max(8)) }
    }

    /// Of whole images.
    fn of_images(shape: &'a Shape, dtype: DType) -> Self {
        if shape.pointwise() {
            return Self::new(shape, dtype);
        }
        let (row, most) = Self::room(shape, dtype);
        let images = (most / shape.pixels()).clamp(1, shape.batch);
        Self { shape, row, count: images * shape.pixels() }
    }

    /// A row's elements, and how many pixels find room.
    fn room(shape: &Shape, dtype: DType) -> (usize, usize) {
        let row = shape.taps().next_multiple_of(8);
        (row, WORKSPACE / (row * shape.geometry.groups * dtype.size_in_bytes()))
    }

    /// Of the largest tile's rows.
    fn elements(&self) -> usize {
        self.count * self.row * self.shape.geometry.groups
    }

    fn all(&self) -> impl Iterator<Item = ImageTile> + use<> {
        let (end, count) = (self.shape.batch * self.shape.pixels(), self.count);
        (0..end).step_by(count).map(move |first| ImageTile { first, count: count.min(end - first) })
    }

    fn weight(&self, gpu: &Gpu, weight: &Tensor) -> Result<Tensor> {
        to_taps(gpu, weight, self.shape, self.row)
    }

    fn weights<'t>(&self, weight: &'t Tensor) -> Matrices<'t> {
        rows(weight, self.row, self.shape.group_out() * self.row)
    }

    /// The im2row matrix of a tile of `x`.
    fn columns(&self, gpu: &Gpu, x: &Tensor, tile: &ImageTile) -> Result<Columns> {
        let (shape, groups) = (self.shape, self.shape.geometry.groups);
        if shape.pointwise() {
            return Ok(Columns { tensor: tile.of(x)?, ld: shape.c_in, stride: shape.group_in() });
        }
        let tensor = gpu.scratch(0, self.elements(), x.dtype())?;
        // A thread writes a few elements of a few rows, of the tile's, from pixels inside images.
        let kernel = gpu.launch(&SOURCE, ["im2row", suffix(x.dtype())?])?;
        let kernel = kernel.read(x)?.write(&tensor)?;
        let kernel = kernel.sizes(&[tile.first, tile.count, self.row, groups]);
        let elements = tile.count.div_ceil(PIXELS) * self.row * groups;
        kernel.sizes(&sizes(shape)).run(Grid::over(elements, pack(x.dtype(), x.dtype())))?;
        Ok(Columns { tensor, ld: groups * self.row, stride: self.row })
    }
}

impl ImageTile {
    /// The tile's pixels of `images`: `(count, c)`.
    fn of(&self, images: &Tensor) -> Result<Tensor> {
        let channels = images.dim(3)?;
        images.reshape(((), channels))?.narrow(0, self.first, self.count)
    }
}
