//! NHWC convolutions on CUDA, where cuDNN does not do them.
//!
//! im2row writes a row for each pixel of the batch: its taps, in the order `(kh, kw, channels)`. The weights are
//! transposed to `(c_out, kh, kw, c_in / groups)`. Then `rows × weightsᵀ` is the output in NHWC already, so nothing has
//! to be moved after the product, and cuBLASLt can add the bias in it.

use candle_core::{DType, Result, Tensor};

use super::pass::{CudaPass, WORKSPACE, rows, sizes, sum_of_tiles};
use crate::kernels::conv::shape::Shape;
use crate::kernels::cuda::{Gpu, Grid, Matrices, Product, Source, pack, suffix};
use crate::kernels::elementwise::cuda::in_dtype as write_near;
use crate::kernels::gemm::add_bias;
use crate::kernels::in_dtype;
use crate::kernels::reduce::cuda::Tiling;

pub(super) static SOURCE: Source = Source {
    name: "conv2d_nhwc",
    code: concat!(include_str!("../shape.cuh"), include_str!("../conv2d_nhwc.cu")),
};

/// Pixels a thread lays out, as in the source.
const PIXELS: usize = 4;

/// im2row and a product for each tile.
pub(super) fn forward(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [x, weight], .. } = *pass;
    let tiles = ImageTiles::new(shape, x.dtype());
    let weight = tiles.weight(gpu, weight)?;
    with_bias(pass, |y, bias| {
        for tile in tiles.all() {
            let part = tile.of(y)?;
            let done = product(
                gpu,
                Product {
                    batch: shape.geometry.groups,
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

/// A product and row2im for each tile. If a row is a pixel, the product is the result.
pub(super) fn dgrad(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [grad, weight], bias, wide, .. } = *pass;
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
        return with_bias(pass, |dx, bias| {
            let tile = ImageTile { first: 0, count: shape.batch * shape.pixels() };
            of(&tile, grad, rows(dx, shape.c_in, shape.group_in()), bias)
        });
    }
    let dx = gpu.empty(&pass.result_dims(), pass.moved_dtype())?;
    let row2im = ["row2im", suffix(wide)?, suffix(dx.dtype())?];
    // Summed after the product, so not rounded by it.
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
    in_dtype(&dx, pass.out)
}

/// The sum over tiles of their outputs' gradients times their rows.
pub(super) fn wgrad(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [x, grad], .. } = *pass;
    let tiles = ImageTiles::new(shape, x.dtype());
    let outs = shape.group_out();
    let dw = sum_of_tiles(pass, &[shape.c_out, tiles.row], tiles.all(), |tile, part| {
        let outputs = tile.of(grad)?;
        let columns = tiles.columns(gpu, x, &tile)?;
        gpu.product(&Product {
            batch: shape.geometry.groups,
            m: outs,
            k: tile.count,
            n: tiles.row,
            lhs: Matrices { transposed: true, ..rows(&outputs, shape.c_out, outs) },
            rhs: columns.matrices(),
            out: tiles.weights(part),
        })
    })?;
    from_taps(pass, &dw, tiles.row)
}

/// The place of a weight with the channels of a tap side by side in [`Gpu::scratch`], or of its gradient.
pub(super) const TURNED: usize = 10;

/// Whether weights in rows of so many elements lie otherwise than the operator's.
pub(super) fn turns(shape: &Shape, row: usize) -> bool {
    shape.kernel_height * shape.kernel_width != 1 || row != shape.taps()
}

/// Transposes `weight` so that the channels of a tap are contiguous, and pads each row with zeros to `row` elements.
/// They are the first elements of the result, which is there until [`TURNED`] is taken again.
pub(super) fn to_taps(gpu: &Gpu, weight: &Tensor, shape: &Shape, row: usize) -> Result<Tensor> {
    if !turns(shape, row) {
        return Ok(weight.clone());
    }
    let taps = shape.kernel_height * shape.kernel_width;
    let to = gpu.scratch_from(TURNED, shape.c_out * row, weight.dtype())?;
    turn(gpu, weight, [shape.c_out, shape.group_in(), taps], [shape.taps(), row], &to)?;
    Ok(to)
}

/// The gradient of the weight from rows as [`to_taps`] makes them: `(c_out, c_in / groups, kh, kw)`, in `out`.
pub(super) fn from_taps(pass: &CudaPass<'_>, weight: &Tensor, row: usize) -> Result<Tensor> {
    let CudaPass { gpu, shape, out, .. } = *pass;
    if !turns(shape, row) {
        let dims = shape.weight_dims();
        let weight = if weight.dims() == dims { weight } else { &weight.reshape(&dims[..])? };
        return in_dtype(weight, out);
    }
    let taps = shape.kernel_height * shape.kernel_width;
    write_near(weight.dtype(), out, |out| {
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

/// The weight of a depthwise pass as `(kh, kw, c_out)`: the first elements of the result, which is there until
/// [`TURNED`] is taken again.
pub(super) fn depthwise_taps(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [_, weight], .. } = *pass;
    let taps = shape.kernel_height * shape.kernel_width;
    let lds = [0, weight.elem_count()];
    let turned = gpu.scratch_from(TURNED, lds[1], weight.dtype())?;
    turn(gpu, weight, [1, shape.c_out, taps], lds, &turned)?;
    Ok(turned)
}

/// Sums of parts of the pixels and then of those parts, where each group has one input channel.
pub(super) fn depthwise_wgrad(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [x, grad], wide, .. } = *pass;
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
    in_dtype(&dw, pass.out)
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
    pass: &CudaPass<'_>,
    products: impl Fn(&Tensor, Option<&Tensor>) -> Result<bool>,
) -> Result<Tensor> {
    let CudaPass { gpu, shape, bias, wide, out, .. } = *pass;
    let y = gpu.empty(&pass.result_dims(), pass.product_dtype())?;
    let can_add = shape.geometry.groups == 1 && pass.near_dtype() == wide;
    if can_add && bias.is_some() && products(&y, bias)? {
        return in_dtype(&y, out);
    }
    products(&y, None)?;
    match bias {
        Some(bias) => biased(gpu, &y, bias, out),
        None => in_dtype(&y, out),
    }
}

/// `y + bias`, a number for each channel in the dtype of `y`, in `out`.
pub(super) fn biased(gpu: &Gpu, y: &Tensor, bias: &Tensor, out: DType) -> Result<Tensor> {
    add_bias(gpu, Some(y), Some(bias), y.dtype(), y.dims().to_vec(), out)
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
