//! NCHW convolutions on CUDA.
//!
//! The first of these that applies computes a pass:
//!
//! 1. A kernel of this crate, if each group has one input channel (depthwise).
//! 2. cuDNN, if it can be loaded and has a deterministic algorithm without transforms. 16 bits with channels last run
//!    by an engine of its graph API, all else by its older functions.
//! 3. cuBLAS on the images as they are, if they are their own columns (1 × 1 kernels) and there is no bias.
//! 4. im2col and cuBLAS: a kernel writes the columns of a tile of output pixels, so many that they fit
//!    [`WORKSPACE`], and cuBLAS multiplies them by the weights. The product is `(channels, pixels of all images)`, so
//!    another kernel moves it into NCHW, and adds the bias.
//!
//! Forward, dgrad and wgrad are mirror images. Each multiplies two of the matrices weights, columns and outputs,
//! and the third is the result. For dgrad, col2im follows, which adds each pixel's columns.
//!
//! Products read 16-bit operands if both have the same 16-bit dtype, else F32 (F64), and sum in F32 (F64). The sums
//! are rounded once: to 16 bits if nothing is added to them later, else to F32.

mod nhwc;

use candle_core::{DType, Result, Tensor};

use super::super::gemm::arithmetic;
use super::Geometry;
use super::shape::Shape;
use crate::kernels::cast::cast_into;
use crate::kernels::choice::algorithm::{chosen, fell_back};
use crate::kernels::cuda::{
    Bias, Convolution, Gpu, Grid, Launch, Matrices, PassKind, Product, Source, pack, suffix,
};
use crate::kernels::elementwise::{add, add_assign, plain};
use crate::kernels::in_dtype;
use crate::kernels::tensors::format::Format;

static SOURCE: Source =
    Source { name: "conv2d", code: concat!(include_str!("shape.cuh"), include_str!("conv2d.cu")) };

/// Bytes of columns at a time, unless a single image has more.
const WORKSPACE: usize = 256 << 20;
/// From this many pixels of an output channel on, one product an image is large enough to use the GPU well.
const LARGE: usize = 64;

/// See [`super::forward`]. Nothing is empty.
pub(super) fn forward(
    gpu: &Gpu,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    let wide = arithmetic([Some(x), Some(weight), bias]);
    let [x, weight] = operands(gpu, [x, weight], wide)?;
    if let Some(y) = biased_library(gpu, PassKind::Forward, shape, [&x, &weight], bias, out)? {
        return Ok(y);
    }
    let bias = bias.map(|bias| plain(&in_dtype(bias, wide)?)).transpose()?;
    if shape.geometry.format == Format::ChannelsLast {
        return nhwc::forward(gpu, [&x, &weight], bias.as_ref(), shape, wide, out);
    }
    let dtype = x.dtype();
    if shape.depthwise() {
        chosen(PassKind::Forward.name(), "depthwise kernel", shape);
        let y = gpu.empty(&shape.out_dims(), if out == dtype { out } else { wide })?;
        let name = ["depthwise", suffix(dtype)?, suffix(y.dtype())?];
        // A thread writes one of `y`'s elements, and reads those of its channels in its image.
        let kernel = gpu.launch(&SOURCE, name)?.read(&x)?.read(&weight)?;
        let kernel = kernel.read_or_null(bias.as_ref())?.write(&y)?.size(shape.batch);
        kernel.sizes(&sizes(shape)).run(Grid::over(y.elem_count(), 1))?;
        return in_dtype(&y, out);
    }
    let (outs, taps) = (shape.group_out(), shape.taps());
    // What a product writes may be the result; what a bias is added to may not be rounded.
    let product_dtype = if bias.is_none() && out == dtype { dtype } else { wide };
    if let Some(y) = library(gpu, PassKind::Forward, shape, [&x, &weight], product_dtype, None)? {
        return finish(&y, bias.as_ref(), out);
    }
    if bias.is_none() && images_are_matrices(shape) {
        without_cudnn(gpu, PassKind::Forward, "cublas", shape, dtype);
        let y = gpu.empty(&shape.out_dims(), product_dtype)?;
        gpu.product(&Product {
            batch: shape.batch,
            m: outs,
            k: taps,
            n: shape.pixels(),
            lhs: Matrices { tensor: &weight, transposed: false, ld: taps, stride: 0 },
            rhs: rows(&x, shape.pixels(), shape.image()),
            out: rows(&y, shape.pixels(), shape.out_image()),
        })?;
        return in_dtype(&y, out);
    }
    without_cudnn(gpu, PassKind::Forward, "im2col, cublas", shape, dtype);
    let y = gpu.empty(
        &shape.out_dims(),
        if wide == DType::F32 && out != DType::F64 { out } else { wide },
    )?;
    let tiles = ImageTiles::new(shape, dtype, product_dtype);
    let columns = gpu.scratch(0, tiles.columns(), dtype)?;
    let products = gpu.scratch(1, tiles.outputs(), product_dtype)?;
    let from_rows = ["from_rows", suffix(product_dtype)?, suffix(y.dtype())?];
    for tile in tiles.all() {
        tile.im2col(gpu, &x, &columns)?;
        gpu.product(&Product {
            batch: shape.geometry.groups,
            m: outs,
            k: taps,
            n: tile.count,
            lhs: Matrices { tensor: &weight, transposed: false, ld: taps, stride: outs * taps },
            rhs: rows(&columns, tiles.ld, taps * tiles.ld),
            out: rows(&products, tile.count, outs * tile.count),
        })?;
        let kernel = gpu.launch(&SOURCE, from_rows)?.read(&products)?.write(&y)?;
        // As below, an element a thread.
        let kernel = tile.rows(kernel.read_or_null(bias.as_ref())?, tile.count);
        kernel.run(tile.grid(shape.c_out, 1))?;
    }
    in_dtype(&y, out)
}

/// See [`super::dgrad`]. Nothing is empty.
pub(super) fn dgrad(
    gpu: &Gpu,
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    let wide = arithmetic([Some(grad), Some(weight), bias]);
    let [grad, weight] = operands(gpu, [grad, weight], wide)?;
    if let Some(dx) = biased_library(gpu, PassKind::Dgrad, shape, [&grad, &weight], bias, out)? {
        return Ok(dx);
    }
    let bias = bias.map(|bias| plain(&in_dtype(bias, wide)?)).transpose()?;
    if shape.geometry.format == Format::ChannelsLast {
        return nhwc::dgrad(gpu, [&grad, &weight], bias.as_ref(), shape, wide, out);
    }
    let dtype = grad.dtype();
    if shape.depthwise() {
        chosen(PassKind::Dgrad.name(), "depthwise kernel", shape);
        let dx = gpu.empty(&shape.input_dims(), if out == dtype { out } else { wide })?;
        let name = ["depthwise_dgrad", suffix(dtype)?, suffix(dx.dtype())?];
        // A thread writes one of `dx`'s elements, and reads those of its channels in its image.
        let kernel = gpu.launch(&SOURCE, name)?.read(&grad)?.read(&weight)?;
        let kernel = kernel.read_or_null(bias.as_ref())?.write(&dx)?.size(shape.batch);
        kernel.sizes(&sizes(shape)).run(Grid::over(dx.elem_count(), 1))?;
        return in_dtype(&dx, out);
    }
    let (outs, taps) = (shape.group_out(), shape.taps());
    let product_dtype = if bias.is_none() && out == dtype { dtype } else { wide };
    if let Some(dx) = library(gpu, PassKind::Dgrad, shape, [&grad, &weight], product_dtype, None)? {
        return finish(&dx, bias.as_ref(), out);
    }
    if bias.is_none() && images_are_matrices(shape) {
        without_cudnn(gpu, PassKind::Dgrad, "cublas", shape, dtype);
        let dx = gpu.empty(&shape.input_dims(), product_dtype)?;
        gpu.product(&Product {
            batch: shape.batch,
            m: taps,
            k: outs,
            n: shape.pixels(),
            lhs: Matrices { tensor: &weight, transposed: true, ld: taps, stride: 0 },
            rhs: rows(&grad, shape.pixels(), shape.out_image()),
            out: rows(&dx, shape.pixels(), shape.image()),
        })?;
        return in_dtype(&dx, out);
    }
    without_cudnn(gpu, PassKind::Dgrad, "im2col, cublas", shape, dtype);
    let dx = gpu.empty(
        &shape.input_dims(),
        if wide == DType::F32 && out != DType::F64 { out } else { wide },
    )?;
    // Summed after the product, so not rounded by it.
    let tiles = ImageTiles::of_images(shape, wide, dtype);
    let columns = gpu.scratch(0, tiles.columns(), wide)?;
    let outputs = gpu.scratch(1, tiles.outputs(), dtype)?;
    let col2im = ["col2im", suffix(wide)?, suffix(dx.dtype())?];
    for tile in tiles.all() {
        tile.to_rows(gpu, &grad, &outputs)?;
        gpu.product(&Product {
            batch: shape.geometry.groups,
            m: taps,
            k: outs,
            n: tile.count,
            lhs: Matrices { tensor: &weight, transposed: true, ld: taps, stride: outs * taps },
            rhs: rows(&outputs, tiles.ld, outs * tiles.ld),
            out: rows(&columns, tile.count, taps * tile.count),
        })?;
        let images = tile.count / shape.pixels();
        // A thread writes one element of the tile's images, from those of their columns.
        let kernel = gpu.launch(&SOURCE, col2im)?.read(&columns)?.write(&dx)?;
        let kernel = kernel.read_or_null(bias.as_ref())?;
        let kernel = kernel.sizes(&[tile.first / shape.pixels(), images, tile.count]);
        kernel.sizes(&sizes(shape)).run(Grid::over(images * shape.image(), 1))?;
    }
    in_dtype(&dx, out)
}

/// See [`super::wgrad`]. Nothing is empty.
pub(super) fn wgrad(
    gpu: &Gpu,
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    out: DType,
) -> Result<Tensor> {
    let wide = arithmetic([Some(x), Some(grad)]);
    let [x, grad] = operands(gpu, [x, grad], wide)?;
    if shape.geometry.format == Format::ChannelsLast {
        return nhwc::wgrad(gpu, [&x, &grad], shape, wide, out);
    }
    let dtype = x.dtype();
    let dw = gpu.empty(&shape.weight_dims(), wide)?;
    if shape.depthwise() {
        chosen(PassKind::Wgrad.name(), "depthwise kernel", shape);
        // A block writes one of `dw`'s elements, and reads those of its channels.
        let kernel = gpu.launch(&SOURCE, ["depthwise_wgrad", suffix(dtype)?])?;
        let kernel = kernel.read(&x)?.read(&grad)?.write(&dw)?.size(shape.batch);
        let grid = Grid::flat(dw.elem_count(), Grid::THREADS);
        kernel.sizes(&sizes(shape)).run(grid)?;
        return in_dtype(&dw, out);
    }
    let (outs, taps) = (shape.group_out(), shape.taps());
    let written = library_gradient(dtype, out, wide);
    if let Some(dw) = library(gpu, PassKind::Wgrad, shape, [&x, &grad], written, None)? {
        return in_dtype(&dw, out);
    }
    without_cudnn(gpu, PassKind::Wgrad, "im2col, cublas", shape, dtype);
    let tiles = ImageTiles::new(shape, dtype, dtype);
    let columns = gpu.scratch(0, tiles.columns(), dtype)?;
    let outputs = gpu.scratch(1, tiles.outputs(), dtype)?;
    let mut sum: Option<Tensor> = None;
    for tile in tiles.all() {
        tile.im2col(gpu, &x, &columns)?;
        tile.to_rows(gpu, &grad, &outputs)?;
        let part = match &sum {
            None => dw.clone(),
            Some(_) => gpu.scratch(2, dw.elem_count(), wide)?.reshape(dw.dims())?,
        };
        gpu.product(&Product {
            batch: shape.geometry.groups,
            m: outs,
            k: tile.count,
            n: taps,
            lhs: rows(&outputs, tiles.ld, outs * tiles.ld),
            rhs: Matrices { transposed: true, ..rows(&columns, tiles.ld, taps * tiles.ld) },
            out: rows(&part, taps, outs * taps),
        })?;
        // One tile after the other.
        sum = Some(match sum {
            None => part,
            Some(sum) => add_assign(sum, &part)?,
        });
    }
    in_dtype(&sum.unwrap_or(dw), out)
}

/// Asks cuDNN for the convolution with its bias, if all have one dtype. The output is filled with the bias first, and
/// cuDNN adds to it before it rounds. So 16-bit outputs need no F32 copy.
fn biased_library(
    gpu: &Gpu,
    pass: PassKind,
    shape: &Shape,
    tensors: [&Tensor; 2],
    bias: Option<&Tensor>,
    out: DType,
) -> Result<Option<Tensor>> {
    match bias {
        Some(bias) if bias.dtype() == out && tensors[0].dtype() == out && !shape.depthwise() => {
            library(gpu, pass, shape, tensors, out, Some(bias))
        }
        _ => Ok(None),
    }
}

/// Asks cuDNN for the pass of these two tensors, in the dtype `written`, with a bias of that dtype if there is one.
/// A weight's gradient has the layout of cuDNN's weights. `None` if cuDNN does not do it.
fn library(
    gpu: &Gpu,
    pass: PassKind,
    shape: &Shape,
    tensors: [&Tensor; 2],
    written: DType,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let (dtype, format) = (tensors[0].dtype(), shape.geometry.format);
    if dtype == DType::F64 || !gpu.has_convolutions() {
        return Ok(None);
    }
    // The channels of a tap lie side by side where those of a pixel do.
    let [a, b] = tensors;
    let b = match format {
        Format::ChannelsLast if pass != PassKind::Wgrad => {
            &nhwc::to_taps(gpu, b, shape, shape.taps())?
        }
        _ => b,
    };
    let Geometry { stride, padding: (above, left), dilation, groups, .. } = shape.geometry;
    let Shape { batch, c_in, c_out, height, width, out_height, out_width, .. } = *shape;
    let convolution = |tf32| Convolution {
        format,
        input: [batch, c_in, height, width],
        weight: shape.weight_dims(),
        output: [batch, c_out, out_height, out_width],
        padding: [above, left],
        stride,
        dilation,
        groups,
        tf32,
    };
    let (dims, order) = match pass {
        PassKind::Forward => (shape.out_dims(), [0, 1, 2]),
        PassKind::Dgrad => (shape.input_dims(), [2, 1, 0]),
        PassKind::Wgrad => (shape.weight_dims(), [0, 2, 1]),
    };
    // A gradient that is laid out anew is no result yet.
    let result = match (pass, format) {
        (PassKind::Wgrad, Format::ChannelsLast) if nhwc::turns(shape, shape.taps()) => {
            gpu.scratch_from(nhwc::TURNED, dims.iter().product(), written)?
        }
        _ => gpu.empty(&dims, written)?,
    };
    // A number for each channel, at all pixels.
    let spread = bias.map(|bias| {
        let bias = match format {
            Format::ChannelsFirst => bias.reshape((1, (), 1, 1))?,
            Format::ChannelsLast => bias.reshape((1, 1, 1, ()))?,
        };
        bias.broadcast_as(result.shape())
    });
    let spread = spread.transpose()?;
    let spread = || spread.as_ref().map_or(Ok(()), |bias| cast_into(&result, bias));
    let values = bias.map(plain).transpose()?;
    let bias = values.as_ref().map(|values| Bias { values, spread: &spread });
    let done_by = |operands: [&Tensor; 2], tf32| {
        let all = [operands[0], operands[1], &result];
        gpu.convolution(pass, &convolution(tf32), order.map(|at| all[at]), bias.as_ref())
    };
    let mut done = done_by([a, b], crate::kernels::choice::tf32::allow_tf32())?;
    // From 16-bit operands cuDNN may have no algorithm that writes F32. But a 16-bit number is exact in TF32, and from
    // TF32 operands it has.
    if done.is_none() && dtype != written && gpu.compute_capability()? >= (8, 0) {
        let b = match pass {
            PassKind::Wgrad => b,
            _ => &b.flatten_all()?.narrow(0, 0, shape.c_out * shape.taps())?,
        };
        done = done_by([&in_dtype(a, written)?, &in_dtype(b, written)?], true)?;
    }
    if let Some(by) = done {
        chosen(pass.name(), by, shape);
    }
    Ok(done.is_some().then_some(result))
}

/// Says that `pass` runs by `algorithm`, and counts it where cuDNN was there to do it.
fn without_cudnn(gpu: &Gpu, pass: PassKind, algorithm: &'static str, shape: &Shape, dtype: DType) {
    if gpu.has_convolutions() && dtype != DType::F64 {
        fell_back(pass.name(), "cudnn", algorithm, shape);
    } else {
        chosen(pass.name(), algorithm, shape);
    }
}

/// What the library writes a weight gradient in, from operands in `dtype`: where `out` is wider than those, in
/// one pass over them, unless that is to be exact.
fn library_gradient(dtype: DType, out: DType, wide: DType) -> DType {
    let exact = out != dtype && crate::kernels::choice::cudnn::cudnn_f32_weight_gradients();
    if exact { wide } else { dtype }
}

/// Adds the bias of each channel, and rounds to `out`.
fn finish(y: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor> {
    let Some(bias) = bias else { return in_dtype(y, out) };
    let bias = bias.reshape((1, (), 1, 1))?.broadcast_as(y.shape())?;
    in_dtype(&add(y, &bias)?, out)
}

/// Whether each image is already its own matrix of columns, large enough for a product of its own.
fn images_are_matrices(shape: &Shape) -> bool {
    let pixels = shape.pixels();
    shape.pointwise() && shape.geometry.groups == 1 && pixels >= LARGE && pixels.is_multiple_of(8)
}

/// Both operands, contiguous and in the dtype that products read.
fn operands(gpu: &Gpu, tensors: [&Tensor; 2], wide: DType) -> Result<[Tensor; 2]> {
    let [a, b] = tensors;
    // Products of BF16 came with compute capability 8.0.
    let known = a.dtype() != DType::BF16 || gpu.compute_capability()? >= (8, 0);
    let dtype =
        if wide == DType::F32 && a.dtype() == b.dtype() && known { a.dtype() } else { wide };
    let operand = |x: &Tensor| plain(&in_dtype(x, dtype)?);
    Ok([operand(a)?, operand(b)?])
}

fn rows(tensor: &Tensor, ld: usize, stride: usize) -> Matrices<'_> {
    Matrices { tensor, transposed: false, ld, stride }
}

/// The sizes in the order of the kernels' parameters.
fn sizes(shape: &Shape) -> [usize; 12] {
    let Geometry { stride, padding: (above, left), dilation, .. } = shape.geometry;
    let Shape { c_in, c_out, height, width, out_height, out_width, .. } = *shape;
    let (kernel_height, kernel_width) = (shape.kernel_height, shape.kernel_width);
    [
        c_in,
        c_out,
        height,
        width,
        out_height,
        out_width,
        kernel_height,
        kernel_width,
        stride,
        above,
        left,
        dilation,
    ]
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
        // A row a channel, of the tile's pixels, which the images have.
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
