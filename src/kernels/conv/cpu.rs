//! NCHW convolutions on any CPU, by im2col and products.
//!
//! A thread takes a tile of output pixels: some rows of an image, or some small images. It widens their inputs to
//! the type of the arithmetic and gathers their row panels, which stay in its cache, and multiplies the weights by
//! them there. There is one product for each row of the kernel, added into the same sums, because all rows of the
//! kernel share the row panels: see [`super::columns`].
//!
//! dgrad at stride 1 is a convolution with the kernel turned by 180°. At other strides it is a product with the
//! transposed weights, scattered back (col2im). The gradient of the weight (wgrad) is a product over pixels. Runs of
//! images have sums of their own, which are added in a fixed order. Images are spread over the threads.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::columns::{PixelBlock, RowPanels, crop, pad};
use super::shape::Shape;
use crate::error::bail;
use crate::kernels::cpu::dtype::{Element, tensor};
use crate::kernels::cpu::guard::hold;
use crate::kernels::cpu::parallel;
use crate::kernels::cpu::simd::vectorise;
use crate::kernels::gemm::{Arithmetic, ElementsAs, Matrix, Threads, narrow, product};

/// See [`super::forward`]; the operands are contiguous and of formats whose arithmetic is `O::Acc`.
pub(super) fn forward<O: Element>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
) -> Result<Tensor>
where
    O::Acc: Arithmetic,
{
    check_memory::<O::Acc>(shape)?;
    let weight = widened::<O::Acc>(weight)?;
    let bias = bias.map(widened::<O::Acc>).transpose()?;
    let out = convolve::<O>(&*O::Acc::open(x)?, &weight, bias.as_deref(), shape);
    Ok(tensor(out, &shape.out_dims()))
}

/// See [`super::dgrad`]; operands as for [`forward`].
pub(super) fn dgrad<O: Element>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
) -> Result<Tensor>
where
    O::Acc: Arithmetic,
{
    check_memory::<O::Acc>(shape.transposed().as_ref().unwrap_or(shape))?;
    let weight = widened::<O::Acc>(weight)?;
    let bias = bias.map(widened::<O::Acc>).transpose()?;
    let (grad, bias) = (O::Acc::open(grad)?, bias.as_deref());
    let out = match shape.transposed() {
        Some(transposed) => convolve(&*grad, &turned(&weight, shape), bias, &transposed),
        None => scatter(&*grad, &weight, bias, shape),
    };
    Ok(tensor::<O>(out, &shape.input_dims()))
}

/// See [`super::wgrad`]; operands as for [`forward`], result in `A`.
pub(super) fn wgrad<A: Arithmetic>(x: &Tensor, grad: &Tensor, shape: &Shape) -> Result<Tensor> {
    check_memory::<A>(shape)?;
    let _held = hold([x, grad]);
    let sums = wgrad_batch(&*A::open(x)?, &*A::open(grad)?, shape);
    Ok(tensor(sums, &shape.weight_dims()))
}

/// Fails where there is no memory for the padded images that threads have at a time: where it is asked for within a pass, to
/// be refused ends the program.
fn check_memory<A>(shape: &Shape) -> Result<()> {
    /// Elements that any machine has room for.
    const FEW: usize = 1 << 28;
    let nothing = [shape.batch, shape.pixels(), shape.taps()].contains(&0);
    if nothing || shape.geometry.padding == (0, 0) {
        return Ok(());
    }
    let images = TileSize::new(shape).images.saturating_mul(parallel::threads()).min(shape.batch);
    let elements = images.saturating_mul(shape.padded_image());
    if elements > FEW && Vec::<A>::new().try_reserve_exact(elements).is_err() {
        let (height, width) = (shape.padded_height(), shape.padded_width());
        bail!(
            "conv: there is no memory for padded images of {height} x {width} pixels, which this convolution lays out whole: \
             choose a smaller padding"
        )
    }
    Ok(())
}

/// A small tensor's elements, widened.
fn widened<A: Arithmetic>(tensor: &Tensor) -> Result<Vec<A>> {
    let mut data = vec![A::zero(); tensor.elem_count()];
    A::open(tensor)?.widen(0, &mut data);
    Ok(data)
}

/// The weight of [`Shape::transposed`], `(c_in, c_out / groups, kh, kw)`.
fn turned<A: Arithmetic>(weight: &[A], shape: &Shape) -> Vec<A> {
    let (ins, outs) = (shape.group_in(), shape.group_out());
    let kernel = shape.kernel_height * shape.kernel_width;
    let mut turned = Vec::with_capacity(weight.len());
    for group in weight.chunks_exact(outs * ins * kernel) {
        for c_in in 0..ins {
            for c_out in 0..outs {
                let start = (c_out * ins + c_in) * kernel;
                turned.extend(group[start..start + kernel].iter().rev());
            }
        }
    }
    turned
}

/// The size of a tile: what a thread works on at a time.
#[derive(Clone, Copy, Debug)]
struct TileSize {
    images: usize,
    /// Output rows; fewer than all only where `images` is 1.
    rows: usize,
    /// Columns of them; fewer than all only where `rows` is 1.
    columns: usize,
}

/// Output pixels of a tile: enough for a product to run at speed, and a multiple of the 64 rows its
/// innermost loop takes at a time.
const PIXELS: usize = 512;

/// The fewest pixels a row is cut into.
const LEAST: usize = 64;

/// Elements of a tile's row panels: half of a level 2 cache of 2 MiB, in F32.
const ROW_PANELS: usize = 1 << 18;

impl TileSize {
    /// About [`PIXELS`] output pixels, or fewer where their row panels take too much memory.
    fn new(shape: &Shape) -> Self {
        let wanted = PIXELS.min(ROW_PANELS / (shape.row_taps() * RowPanels::phases(shape))).max(1);
        let (height, width) = (shape.out_height, shape.out_width);
        if wanted < shape.pixels() || shape.pointwise() {
            let rows = height.div_ceil(shape.pixels().div_ceil(wanted));
            // A long row, as of a sequence, in equal parts.
            let parts = if rows == 1 { (width / wanted.max(LEAST)).max(1) } else { 1 };
            return Self { images: 1, rows, columns: width.div_ceil(parts) };
        }
        let images = (wanted / shape.pixels()).clamp(1, shape.batch);
        Self { images, rows: height, columns: width }
    }

    /// Output pixels, at most.
    fn pixels(&self) -> usize {
        self.images * self.rows * self.columns
    }

    /// Elements of the row panels, at most.
    fn row_panels(&self, shape: &Shape) -> usize {
        if shape.pointwise() { 0 } else { self.largest(shape).len(shape) }
    }

    fn largest(&self, shape: &Shape) -> RowPanels {
        RowPanels::new(
            shape,
            self.images,
            PixelBlock { rows: 0..self.rows, columns: 0..self.columns },
        )
    }

    /// The tiles of an image, or of all where there are several images.
    fn parts(&self, shape: &Shape) -> impl Iterator<Item = PixelBlock> {
        let ranges = |len: usize, step: usize| {
            (0..len).step_by(step).map(move |start| start..len.min(start + step))
        };
        let (columns, width) = (self.columns, shape.out_width);
        ranges(shape.out_height, self.rows).flat_map(move |rows| {
            ranges(width, columns).map(move |columns| PixelBlock { rows: rows.clone(), columns })
        })
    }
}

/// Calls `f` with the padded images of `range`, widened.
fn with_images<A: Arithmetic>(
    source: &dyn ElementsAs<A>,
    range: Range<usize>,
    shape: &Shape,
    f: impl FnOnce(&[A]),
) {
    let plain = if source.borrowed().is_some() { 0 } else { range.len() * shape.image() };
    let unpadded = shape.geometry.padding == (0, 0);
    let padded = if unpadded { 0 } else { range.len() * shape.padded_image() };
    A::with_scratch(plain + padded, |buffer| {
        let (plain, padded) = buffer.split_at_mut(plain);
        let images = source.read(range.start * shape.image()..range.end * shape.image(), plain);
        if unpadded {
            return f(images);
        }
        pad(images, shape, padded);
        f(padded)
    });
}

/// The matrices of a tile of padded images, one per row of the kernel, each `(row_taps, pixels)`;
/// gathered into `buffer` where they are not the image itself.
fn matrices<'a, A: Arithmetic>(
    padded: &'a [A],
    images: usize,
    group: usize,
    part: PixelBlock,
    shape: &'a Shape,
    buffer: &'a mut [A],
) -> impl Iterator<Item = Matrix<'a, A>> {
    let row_panels = RowPanels::new(shape, images, part.clone());
    if !shape.pointwise() {
        row_panels.gather(padded, shape, group, buffer);
    }
    let buffer = &*buffer;
    (0..shape.kernel_height).map(move |kernel_row| {
        if !shape.pointwise() {
            return row_panels.matrix(buffer, shape, kernel_row);
        }
        let start = group * shape.group_in() * shape.pixels() + part.start(shape);
        Matrix {
            data: &padded[start..],
            rows: shape.row_taps(),
            cols: part.len(),
            row_stride: shape.pixels(),
            col_stride: 1,
        }
    })
}

/// The weight as one matrix a group and row of the kernel, `(groups, kh, c_out / groups, c_in /
/// groups, kw)`.
fn by_kernel_row<A: Arithmetic>(weight: &[A], shape: &Shape) -> Vec<A> {
    let width = shape.kernel_width;
    let mut rows = Vec::with_capacity(weight.len());
    for group in weight.chunks_exact(shape.group_out() * shape.taps()) {
        for kernel_row in 0..shape.kernel_height {
            for kernel in group.chunks_exact(shape.kernel_height * width) {
                rows.extend(&kernel[kernel_row * width..(kernel_row + 1) * width]);
            }
        }
    }
    rows
}

/// `weight × columns + bias`, rounded.
fn convolve<O: Element>(
    x: &dyn ElementsAs<O::Acc>,
    weight: &[O::Acc],
    bias: Option<&[O::Acc]>,
    shape: &Shape,
) -> Vec<O>
where
    O::Acc: Arithmetic,
{
    let mut out = vec![O::default(); shape.batch * shape.out_image()];
    if out.is_empty() {
        return out;
    }
    let (taps, outs) = (shape.row_taps(), shape.group_out());
    let weight = by_kernel_row(weight, shape);
    let tile = TileSize::new(shape);
    let threads = threads(shape.batch.div_ceil(tile.images));
    parallel::for_each_chunk(&mut out, tile.images * shape.out_image(), |block, out| {
        let images = out.len() / shape.out_image();
        let first = block * tile.images;
        let work = |padded: &[O::Acc]| {
            let space = tile.row_panels(shape);
            O::Acc::with_scratch(space + outs * tile.pixels(), |buffer| {
                let (row_panels, result) = buffer.split_at_mut(space);
                for group in 0..shape.geometry.groups {
                    let weight = &weight[group * outs * shape.taps()..];
                    for part in tile.parts(shape) {
                        let pixels = images * part.len();
                        let result = &mut result[..outs * pixels];
                        if let Some(bias) = bias {
                            let channels = result.chunks_exact_mut(pixels);
                            channels.zip(&bias[group * outs..]).for_each(|(c, b)| c.fill(*b));
                        }
                        let matrices =
                            matrices(padded, images, group, part.clone(), shape, row_panels);
                        for (index, matrix) in matrices.enumerate() {
                            let weight = Matrix::new(&weight[index * outs * taps..], outs, taps);
                            let accumulate = index > 0 || bias.is_some();
                            product(weight, matrix, result, pixels, accumulate, threads);
                        }
                        store(result, group, part, shape, out);
                    }
                }
            });
        };
        with_images(x, first..first + images, shape, work);
    });
    out
}

/// One thread per task where there are enough tasks.
fn threads(tasks: usize) -> Threads {
    if tasks < parallel::threads() { Threads::All } else { Threads::One }
}

/// Rounds a tile of a group's channels, `(channels, rows, images, width)`, into output images.
fn store<O: Element>(
    tile: &[O::Acc],
    group: usize,
    part: PixelBlock,
    shape: &Shape,
    out: &mut [O],
) {
    let (images, width) = (out.len() / shape.out_image(), shape.out_width);
    // Of one image, all rows are one run.
    let (lines, run) =
        if images == 1 { (1, part.len()) } else { (part.rows.len(), part.columns.len()) };
    vectorise(
        #[inline(always)]
        || {
            let mut tile = tile.chunks_exact(run);
            for channel in group * shape.group_out()..(group + 1) * shape.group_out() {
                for line in 0..lines {
                    let first = part.start(shape) + line * width;
                    for (image, src) in (0..images).zip(&mut tile) {
                        let start = (image * shape.c_out + channel) * shape.pixels() + first;
                        O::narrow(src, &mut out[start..start + run]);
                    }
                }
            }
        },
    );
}

/// `weightᵀ × grad + bias`, each column added back to the pixels it would be gathered from, rounded.
fn scatter<O: Element>(
    grad: &dyn ElementsAs<O::Acc>,
    weight: &[O::Acc],
    bias: Option<&[O::Acc]>,
    shape: &Shape,
) -> Vec<O>
where
    O::Acc: Arithmetic,
{
    let mut out = vec![O::default(); shape.batch * shape.image()];
    if out.is_empty() || shape.pixels() == 0 {
        return out;
    }
    let (taps, outs) = (shape.row_taps(), shape.group_out());
    let weight = by_kernel_row(weight, shape);
    let tile = TileSize { images: 1, ..TileSize::new(shape) };
    let threads = threads(shape.batch);
    parallel::for_each_chunk(&mut out, shape.image(), |index, out| {
        let space = tile.largest(shape).len(shape);
        let plain = if grad.borrowed().is_some() { 0 } else { shape.out_image() };
        let sizes = space + plain + shape.padded_image() + shape.image();
        O::Acc::with_scratch(sizes, |buffer| {
            let (buffer, rest) = buffer.split_at_mut(space);
            let (plain, rest) = rest.split_at_mut(plain);
            let (padded, cropped) = rest.split_at_mut(shape.padded_image());
            let start = index * shape.out_image();
            let grad = grad.read(start..start + shape.out_image(), plain);
            padded.fill(O::Acc::default());
            for group in 0..shape.geometry.groups {
                let weight = &weight[group * outs * shape.taps()..];
                for part in tile.parts(shape) {
                    let grad = output_part(grad, group, &part, shape);
                    let row_panels = RowPanels::new(shape, 1, part);
                    let buffer = &mut buffer[..row_panels.len(shape)];
                    buffer.fill(O::Acc::default());
                    for kernel_row in 0..shape.kernel_height {
                        let weight = Matrix::new(&weight[kernel_row * outs * taps..], outs, taps);
                        let dst = &mut buffer[row_panels.start(shape, kernel_row)..];
                        product(weight.t(), grad, dst, row_panels.stride(shape), true, threads);
                    }
                    row_panels.scatter_add(buffer, shape, group, padded);
                }
            }
            crop(padded, shape, cropped);
            if let Some(bias) = bias {
                let channels = cropped.chunks_exact_mut(shape.height * shape.width);
                channels.zip(bias).for_each(|(c, &b)| c.iter_mut().for_each(|c| *c += b));
            }
            narrow(cropped, out);
        });
    });
    out
}

/// A part of a group's channels of one output image, `(channels, pixels)`.
fn output_part<'a, A>(
    image: &'a [A],
    group: usize,
    part: &PixelBlock,
    shape: &Shape,
) -> Matrix<'a, A> {
    let start = group * shape.group_out() * shape.pixels() + part.start(shape);
    Matrix {
        data: &image[start..],
        rows: shape.group_out(),
        cols: part.len(),
        row_stride: shape.pixels(),
        col_stride: 1,
    }
}

/// Runs of images whose sums are kept apart, then added in order: enough for the threads of most
/// processors, and few enough that the sums stay small beside the images.
const RUNS: usize = 16;

/// `columns × gradᵀ` over the batch, transposed.
fn wgrad_batch<A: Arithmetic>(
    x: &dyn ElementsAs<A>,
    grad: &dyn ElementsAs<A>,
    shape: &Shape,
) -> Vec<A> {
    let outs = shape.group_out();
    let mut weight = vec![A::zero(); shape.c_out * shape.taps()];
    if shape.batch * shape.pixels() == 0 {
        return weight;
    }
    let len = shape.batch.div_ceil(RUNS);
    let sums = parallel::map(shape.batch.div_ceil(len), |run| {
        let images = run * len..shape.batch.min((run + 1) * len);
        wgrad_run(x, grad, images, shape)
    });
    let mut total = vec![A::zero(); weight.len()];
    for sum in sums {
        total.iter_mut().zip(sum).for_each(|(total, sum)| *total += sum);
    }
    let (height, width) = (shape.kernel_height, shape.kernel_width);
    for (index, weight) in weight.iter_mut().enumerate() {
        let (column, row) = (index % width, index / width % height);
        let channel = index / (width * height) % shape.group_in();
        let (group, out) = (index / shape.taps() / outs, index / shape.taps() % outs);
        let tap = channel * width + column;
        *weight = total[((group * height + row) * shape.row_taps() + tap) * outs + out];
    }
    weight
}

/// The sum over some images, `(groups, kh, c_in / groups, kw, c_out / groups)`.
fn wgrad_run<A: Arithmetic>(
    x: &dyn ElementsAs<A>,
    grad: &dyn ElementsAs<A>,
    images: Range<usize>,
    shape: &Shape,
) -> Vec<A> {
    let (taps, outs) = (shape.taps(), shape.group_out());
    let mut sums = vec![A::zero(); shape.c_out * taps];
    let tile = TileSize::new(shape);
    let plain = if grad.borrowed().is_some() { 0 } else { tile.images * shape.out_image() };
    let space = tile.row_panels(shape);
    for first in images.clone().step_by(tile.images) {
        let range = first..images.end.min(first + tile.images);
        let count = range.len();
        let work = |padded: &[A]| {
            A::with_scratch(space + plain + outs * tile.pixels(), |buffer| {
                let (row_panels, rest) = buffer.split_at_mut(space);
                let (plain, turned) = rest.split_at_mut(plain);
                let pixels = range.start * shape.out_image()..range.end * shape.out_image();
                let plain_len = plain.len().min(pixels.len());
                let grad = grad.read(pixels, &mut plain[..plain_len]);
                for group in 0..shape.geometry.groups {
                    let sums = &mut sums[group * taps * outs..][..taps * outs];
                    for part in tile.parts(shape) {
                        let grad = by_pixel(grad, group, &part, shape, turned);
                        let matrices = matrices(padded, count, group, part, shape, row_panels);
                        let sums = sums.chunks_exact_mut(shape.row_taps() * outs);
                        for (matrix, sums) in matrices.zip(sums) {
                            product(matrix, grad, sums, outs, true, Threads::One);
                        }
                    }
                }
            });
        };
        with_images(x, range.clone(), shape, work);
    }
    sums
}

/// A part of a group's channels of output images, transposed: `(rows × images × columns,
/// channels)`.
fn by_pixel<'a, A: Arithmetic>(
    images: &[A],
    group: usize,
    part: &PixelBlock,
    shape: &Shape,
    turned: &'a mut [A],
) -> Matrix<'a, A> {
    let (count, outs, width) =
        (images.len() / shape.out_image(), shape.group_out(), part.columns.len());
    let pixels = part.len() * count;
    let turned = &mut turned[..pixels * outs];
    let mut lines = turned.chunks_exact_mut(width * outs);
    for row in 0..part.rows.len() {
        let first = part.start(shape) + row * shape.out_width;
        for (image, line) in images.chunks_exact(shape.out_image()).zip(&mut lines) {
            let start = group * outs * shape.pixels() + first;
            for channel in 0..outs {
                let src = &image[start + channel * shape.pixels()..][..width];
                line[channel..].iter_mut().step_by(outs).zip(src).for_each(|(d, s)| *d = *s);
            }
        }
    }
    Matrix::new(turned, pixels, outs)
}
