//! NCHW convolutions on CUDA: what cuDNN does not do of them.
//!
//! im2col writes a row for each tap of a tile of output pixels, as the weights lie. The product of the weights and the
//! columns is `(channels, pixels of the tile)`, so another kernel moves it into NCHW, and adds the bias. dgrad goes
//! the other way: its product is a gradient of columns, and col2im adds those of each pixel.

use candle_core::{DType, Result, Tensor};

use super::pass::{CudaPass, WORKSPACE, rows, sizes, sum_of_tiles};
use crate::kernels::conv::geometry::Geometry;
use crate::kernels::conv::shape::Shape;
use crate::kernels::cuda::{Gpu, Grid, Launch, Matrices, PassKind, Product, Source, pack, suffix};
use crate::kernels::elementwise::add;
use crate::kernels::in_dtype;
use crate::kernels::tensors::format::Format;

pub(super) static SOURCE: Source = Source {
    name: "conv2d",
    code: concat!(include_str!("../shape.cuh"), include_str!("../conv2d.cu")),
};

/// From this many pixels of an output channel on, one product per image is large enough to use the GPU well.
const LARGE: usize = 64;

/// im2col, a product, and its rows moved into images.
pub(super) fn forward(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [x, _], bias, .. } = *pass;
    let (dtype, product_dtype) = (x.dtype(), pass.product_dtype());
    let y = gpu.empty(&pass.result_dims(), pass.moved_dtype())?;
    let tiles = ImageTiles::new(shape, dtype, product_dtype);
    let columns = gpu.scratch(0, tiles.columns(), dtype)?;
    let products = gpu.scratch(1, tiles.outputs(), product_dtype)?;
    let from_rows = ["from_rows", suffix(product_dtype)?, suffix(y.dtype())?];
    for tile in tiles.all() {
        tile.im2col(gpu, x, &columns)?;
        gpu.product(&product_of(pass, [&columns, &products], tile.count, tiles.ld))?;
        let kernel = gpu.launch(&SOURCE, from_rows)?.read(&products)?.write(&y)?;
        // A row per channel, of the tile's pixels, which the images have; an element per thread.
        let kernel = tile.rows(kernel.read_or_null(bias)?, tile.count);
        kernel.run(tile.grid(shape.c_out, 1))?;
    }
    in_dtype(&y, pass.out)
}

/// Images moved into rows, a product, and col2im.
pub(super) fn dgrad(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [grad, _], bias, wide, .. } = *pass;
    let dtype = grad.dtype();
    let dx = gpu.empty(&pass.result_dims(), pass.moved_dtype())?;
    // Summed after the product, so not rounded by it.
    let tiles = ImageTiles::of_images(shape, wide, dtype);
    let columns = gpu.scratch(0, tiles.columns(), wide)?;
    let outputs = gpu.scratch(1, tiles.outputs(), dtype)?;
    let col2im = ["col2im", suffix(wide)?, suffix(dx.dtype())?];
    for tile in tiles.all() {
        tile.to_rows(gpu, grad, &outputs)?;
        gpu.product(&product_of(pass, [&outputs, &columns], tile.count, tiles.ld))?;
        let images = tile.count / shape.pixels();
        // A thread writes one element of the tile's images, from those of their columns.
        let kernel = gpu.launch(&SOURCE, col2im)?.read(&columns)?.write(&dx)?;
        let kernel = kernel.read_or_null(bias)?;
        let kernel = kernel.sizes(&[tile.first / shape.pixels(), images, tile.count]);
        kernel.sizes(&sizes(shape)).run(Grid::over(images * shape.image(), 1))?;
    }
    in_dtype(&dx, pass.out)
}

/// The sum over tiles of their outputs' gradients times their columns.
pub(super) fn wgrad(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [x, grad], .. } = *pass;
    let (dtype, outs, taps) = (x.dtype(), shape.group_out(), shape.taps());
    let tiles = ImageTiles::new(shape, dtype, dtype);
    let columns = gpu.scratch(0, tiles.columns(), dtype)?;
    let outputs = gpu.scratch(1, tiles.outputs(), dtype)?;
    let dw = sum_of_tiles(pass, &shape.weight_dims(), tiles.all(), |tile, part| {
        tile.im2col(gpu, x, &columns)?;
        tile.to_rows(gpu, grad, &outputs)?;
        gpu.product(&Product {
            batch: shape.geometry.groups,
            m: outs,
            k: tile.count,
            n: taps,
            lhs: rows(&outputs, tiles.ld, outs * tiles.ld),
            rhs: Matrices { transposed: true, ..rows(&columns, tiles.ld, taps * tiles.ld) },
            out: rows(part, taps, outs * taps),
        })
    })?;
    in_dtype(&dw, pass.out)
}

/// The weights, transposed in dgrad, times `n` columns of each group. In `from`, rows are `ld` elements apart.
fn product_of<'t>(
    pass: &CudaPass<'t>,
    [from, to]: [&'t Tensor; 2],
    n: usize,
    ld: usize,
) -> Product<'t> {
    let (outs, taps) = (pass.shape.group_out(), pass.shape.taps());
    let transposed = pass.kind == PassKind::Dgrad;
    let (m, k) = if transposed { (taps, outs) } else { (outs, taps) };
    Product {
        batch: pass.shape.geometry.groups,
        m,
        k,
        n,
        lhs: Matrices { tensor: pass.operands[1], transposed, ld: taps, stride: outs * taps },
        rhs: rows(from, ld, k * ld),
        out: rows(to, n, m * n),
    }
}

/// A product for each image, which is its own matrix of columns.
pub(super) fn products_of_images(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [images, _], .. } = *pass;
    let (y, pixels) = (gpu.empty(&pass.result_dims(), pass.product_dtype())?, shape.pixels());
    // All images have the weights of the one group.
    let one = product_of(pass, [images, &y], pixels, pixels);
    let lhs = Matrices { stride: 0, ..one.lhs };
    gpu.product(&Product { batch: shape.batch, lhs, ..one })?;
    in_dtype(&y, pass.out)
}

/// Whether [`products_of_images`] computes the pass: NCHW images that are their own columns, and large enough for a
/// product of their own.
pub(super) fn goes_by_images(pass: &CudaPass<'_>) -> bool {
    let Geometry { format, groups, .. } = pass.shape.geometry;
    let pixels = pass.shape.pixels();
    let of_images = pass.kind != PassKind::Wgrad && pass.bias.is_none();
    let one_matrix = format == Format::ChannelsFirst && groups == 1 && pass.shape.pointwise();
    of_images && one_matrix && pixels >= LARGE && pixels.is_multiple_of(8)
}

/// A block for each weight, where each group has one input channel.
pub(super) fn depthwise_wgrad(pass: &CudaPass<'_>) -> Result<Tensor> {
    let CudaPass { gpu, shape, operands: [x, grad], .. } = *pass;
    let dw = gpu.empty(&shape.weight_dims(), pass.wide)?;
    // A block writes one of `dw`'s elements, and reads those of its channels.
    let kernel = gpu.launch(&SOURCE, ["depthwise_wgrad", suffix(x.dtype())?])?;
    let kernel = kernel.read(x)?.read(grad)?.write(&dw)?.size(shape.batch);
    kernel.sizes(&sizes(shape)).run(Grid::flat(dw.elem_count(), Grid::THREADS))?;
    in_dtype(&dw, pass.out)
}

/// `y + bias`, a number for each channel, in `out`.
pub(super) fn biased(y: &Tensor, bias: &Tensor, out: DType) -> Result<Tensor> {
    let bias = bias.reshape((1, (), 1, 1))?.broadcast_as(y.shape())?;
    in_dtype(&add(y, &bias)?, out)
}

/// Tiles of output pixels, which are numbered through the batch.
struct ImageTiles<'a> {
    shape: &'a Shape,
    count: usize,
    /// Elements from a row to the next. It is padded so that cuBLAS gets aligned rows.
    ld: usize,
}

impl<'a> ImageTiles<'a> {
    /// Of columns and of outputs in these dtypes.
    fn new(shape: &'a Shape, columns: DType, outputs: DType) -> Self {
        let all = shape.batch * shape.pixels();
        let most = WORKSPACE / pixel_bytes(shape, columns, outputs) / 8 * 8;
        Self::of(shape, all.min(most.max(8)))
    }

    /// Of whole images.
    fn of_images(shape: &'a Shape, columns: DType, outputs: DType) -> Self {
        let images = WORKSPACE / (pixel_bytes(shape, columns, outputs) * shape.pixels());
        Self::of(shape, shape.pixels() * images.clamp(1, shape.batch))
    }

    fn of(shape: &'a Shape, count: usize) -> Self {
        Self { shape, count, ld: count.next_multiple_of(8) }
    }

    fn columns(&self) -> usize {
        self.shape.taps() * self.shape.geometry.groups * self.ld
    }

    fn outputs(&self) -> usize {
        self.shape.c_out * self.ld
    }

    fn all(&self) -> impl Iterator<Item = ImageTile<'_>> {
        let end = self.shape.batch * self.shape.pixels();
        (0..end).step_by(self.count).map(move |first| ImageTile {
            shape: self.shape,
            first,
            count: self.count.min(end - first),
            ld: self.ld,
        })
    }
}

/// A pixel's columns and outputs.
fn pixel_bytes(shape: &Shape, columns: DType, outputs: DType) -> usize {
    let taps = shape.taps() * shape.geometry.groups;
    taps * columns.size_in_bytes() + shape.c_out * outputs.size_in_bytes()
}

struct ImageTile<'a> {
    shape: &'a Shape,
    first: usize,
    count: usize,
    ld: usize,
}

impl ImageTile<'_> {
    fn im2col(&self, gpu: &Gpu, x: &Tensor, columns: &Tensor) -> Result<()> {
        let kernel = gpu.launch(&SOURCE, ["im2col", suffix(x.dtype())?])?;
        // Row by row of as many columns as the tile has pixels, from pixels inside images.
        let rows = self.shape.taps() * self.shape.geometry.groups;
        let kernel = self.rows(kernel.read(x)?.write(columns)?, self.ld);
        kernel.run(self.grid(rows, pack(x.dtype(), x.dtype())))
    }

    fn to_rows(&self, gpu: &Gpu, images: &Tensor, rows: &Tensor) -> Result<()> {
        let kernel = gpu.launch(&SOURCE, ["to_rows", suffix(images.dtype())?])?;
        // A row per channel, of the tile's pixels, which the images have.
        let kernel = self.rows(kernel.read(images)?.write(rows)?, self.ld);
        kernel.run(self.grid(self.shape.c_out, pack(images.dtype(), images.dtype())))
    }

    fn rows(&self, kernel: Launch, ld: usize) -> Launch {
        kernel.sizes(&[self.first, self.count, ld]).sizes(&sizes(self.shape))
    }

    /// Blocks for so many rows, a thread for every `each` pixels of one.
    fn grid(&self, rows: usize, each: usize) -> Grid {
        Grid::flat(rows * self.count.div_ceil(Grid::THREADS * each), Grid::THREADS)
    }
}
