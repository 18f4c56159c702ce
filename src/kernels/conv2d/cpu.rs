//! Convolutions on the CPU, as products with matrices of columns.
//!
//! A thread gathers the columns of a tile of output pixels, a few rows of an image or a few small
//! images, into memory that stays in its cache, widened to the arithmetic type, and multiplies them
//! there. Images are spread over the threads.

use std::ops::Range;

use candle_core::{Result, Tensor};
use rayon::prelude::*;

use super::columns::{crop, gather, pad, scatter_add};
use super::shape::Shape;
use crate::kernels::element::{Element, tensor};
use crate::kernels::gemm::{Arithmetic, Matrix, Source, Threads, narrow, product};

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
    let weight = widened::<O::Acc>(weight)?;
    let bias = bias.map(widened::<O::Acc>).transpose()?;
    let out = convolve::<O>(&*O::Acc::open(x)?, &weight, bias.as_deref(), shape);
    Ok(tensor(out, &shape.out_dims()))
}

/// See [`super::input_gradient`]; operands as for [`forward`].
pub(super) fn input_gradient<O: Element>(
    grad: &Tensor,
    weight: &Tensor,
    shape: &Shape,
) -> Result<Tensor>
where
    O::Acc: Arithmetic,
{
    let weight = widened::<O::Acc>(weight)?;
    let grad = O::Acc::open(grad)?;
    let out = match shape.transposed() {
        Some(transposed) => convolve(&*grad, &turned(&weight, shape), None, &transposed),
        None => scatter(&*grad, &weight, shape),
    };
    Ok(tensor::<O>(out, &shape.input_dims()))
}

/// See [`super::weight_gradient`]; operands as for [`forward`], result in `A`.
pub(super) fn weight_gradient<A: Arithmetic>(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
) -> Result<Tensor> {
    let sums = correlate(&*A::open(x)?, &*A::open(grad)?, shape);
    Ok(tensor(sums, &shape.weight_dims()))
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

/// What a thread works on at a time.
#[derive(Clone, Copy, Debug)]
struct Tile {
    images: usize,
    /// Output rows; fewer than all only where `images` is 1.
    rows: usize,
}

/// Elements of a tile's columns: half of a level 2 cache of 2 MiB, in F32.
const COLUMNS: usize = 1 << 18;

impl Tile {
    /// About `pixels` output pixels, or fewer where their columns take too much memory.
    fn new(shape: &Shape, pixels: usize) -> Self {
        let wanted = pixels.min(COLUMNS / shape.taps()).max(1);
        if wanted < shape.pixels() || shape.pointwise() {
            let parts = shape.pixels().div_ceil(wanted);
            return Self { images: 1, rows: shape.out_height.div_ceil(parts) };
        }
        Self { images: (wanted / shape.pixels()).clamp(1, shape.batch), rows: shape.out_height }
    }

    /// Columns of a tile's matrix, at most.
    fn pixels(&self, shape: &Shape) -> usize {
        self.images * self.rows * shape.out_width
    }

    /// The output rows of each tile of an image, or of all where there are several images.
    fn row_ranges(&self, shape: &Shape) -> impl Iterator<Item = Range<usize>> {
        let (rows, height) = (self.rows, shape.out_height);
        (0..height).step_by(rows).map(move |start| start..height.min(start + rows))
    }
}

/// Calls `f` with the padded images of `range`, widened.
fn with_images<A: Arithmetic>(
    source: &dyn Source<A>,
    range: Range<usize>,
    shape: &Shape,
    f: impl FnOnce(&[A]),
) {
    let plain = if source.borrowed().is_some() { 0 } else { range.len() * shape.image() };
    let unpadded = shape.geometry.padding == 0;
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

/// The columns of a tile of padded images, gathered into `buffer` where they are not the image.
fn columns<'a, A: Arithmetic>(
    padded: &'a [A],
    images: usize,
    group: usize,
    rows: Range<usize>,
    shape: &Shape,
    buffer: &'a mut [A],
) -> Matrix<'a, A> {
    let pixels = images * rows.len() * shape.out_width;
    if shape.pointwise() {
        let start = group * shape.group_in() * shape.pixels() + rows.start * shape.out_width;
        return Matrix {
            data: &padded[start..],
            rows: shape.taps(),
            cols: pixels,
            row_stride: shape.pixels(),
            col_stride: 1,
        };
    }
    let buffer = &mut buffer[..shape.taps() * pixels];
    gather(padded, shape, group, rows, buffer);
    Matrix::new(buffer, shape.taps(), pixels)
}

/// Output pixels of a tile of the forward pass: the columns pass through the first level cache
/// once per few output channels.
const FORWARD_PIXELS: usize = 384;

/// `weight × columns + bias`, rounded.
fn convolve<O: Element>(
    x: &dyn Source<O::Acc>,
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
    let (taps, outs) = (shape.taps(), shape.group_out());
    let tile = Tile::new(shape, FORWARD_PIXELS);
    let blocks = out.par_chunks_mut(tile.images * shape.out_image());
    let threads = threads(blocks.len());
    blocks.enumerate().for_each(|(block, out)| {
        let images = out.len() / shape.out_image();
        let first = block * tile.images;
        let work = |padded: &[O::Acc]| {
            let space = taps * tile.pixels(shape);
            O::Acc::with_scratch(space + outs * tile.pixels(shape), |buffer| {
                let (buffer, result) = buffer.split_at_mut(space);
                for group in 0..shape.geometry.groups {
                    for rows in tile.row_ranges(shape) {
                        let columns = columns(padded, images, group, rows.clone(), shape, buffer);
                        let weight = &weight[group * outs * taps..][..outs * taps];
                        let result = &mut result[..outs * columns.cols];
                        if let Some(bias) = bias {
                            let channels = result.chunks_exact_mut(columns.cols);
                            channels.zip(&bias[group * outs..]).for_each(|(c, b)| c.fill(*b));
                        }
                        let weight = Matrix::new(weight, outs, taps);
                        product(weight, columns, result, bias.is_some(), threads);
                        store(result, group, rows, shape, out);
                    }
                }
            });
        };
        with_images(x, first..first + images, shape, work);
    });
    out
}

/// One thread a task where there are enough tasks.
fn threads(tasks: usize) -> Threads {
    if tasks < rayon::current_num_threads() { Threads::All } else { Threads::One }
}

/// Rounds a tile of a group's channels, `(channels, images × rows × width)`, into output images.
fn store<O: Element>(
    tile: &[O::Acc],
    group: usize,
    rows: Range<usize>,
    shape: &Shape,
    out: &mut [O],
) {
    let images = out.len() / shape.out_image();
    let run = rows.len() * shape.out_width;
    for (index, src) in tile.chunks_exact(run).enumerate() {
        let (channel, image) = (index / images + group * shape.group_out(), index % images);
        let start = (image * shape.c_out + channel) * shape.pixels() + rows.start * shape.out_width;
        narrow(src, &mut out[start..start + run]);
    }
}

/// `weightᵀ × grad`, each column added back to the pixels it would be gathered from, rounded.
fn scatter<O: Element>(grad: &dyn Source<O::Acc>, weight: &[O::Acc], shape: &Shape) -> Vec<O>
where
    O::Acc: Arithmetic,
{
    let mut out = vec![O::default(); shape.batch * shape.image()];
    if out.is_empty() || shape.pixels() == 0 {
        return out;
    }
    let (taps, outs) = (shape.taps(), shape.group_out());
    let tile = Tile { images: 1, ..Tile::new(shape, FORWARD_PIXELS) };
    let images = out.par_chunks_mut(shape.image());
    let threads = threads(images.len());
    images.enumerate().for_each(|(index, out)| {
        let (space, image) = (taps * tile.pixels(shape), shape.image());
        let plain = if grad.borrowed().is_some() { 0 } else { shape.out_image() };
        O::Acc::with_scratch(space + plain + shape.padded_image() + image, |buffer| {
            let (columns, buffer) = buffer.split_at_mut(space);
            let (plain, buffer) = buffer.split_at_mut(plain);
            let (padded, cropped) = buffer.split_at_mut(shape.padded_image());
            let start = index * shape.out_image();
            let grad = grad.read(start..start + shape.out_image(), plain);
            padded.fill(O::Acc::default());
            for group in 0..shape.geometry.groups {
                for rows in tile.row_ranges(shape) {
                    let weight = &weight[group * outs * taps..][..outs * taps];
                    let grad = output_rows(grad, group, rows.clone(), shape);
                    let columns = &mut columns[..taps * grad.cols];
                    product(Matrix::new(weight, outs, taps).t(), grad, columns, false, threads);
                    scatter_add(columns, shape, group, rows, padded);
                }
            }
            crop(padded, shape, cropped);
            narrow(cropped, out);
        });
    });
    out
}

/// Some rows of a group's channels of one output image, `(channels, rows × width)`.
fn output_rows<'a, A>(
    image: &'a [A],
    group: usize,
    rows: Range<usize>,
    shape: &Shape,
) -> Matrix<'a, A> {
    let start = group * shape.group_out() * shape.pixels() + rows.start * shape.out_width;
    Matrix {
        data: &image[start..],
        rows: shape.group_out(),
        cols: rows.len() * shape.out_width,
        row_stride: shape.pixels(),
        col_stride: 1,
    }
}

/// Output pixels of a tile of the weight gradient: the length of its products' inner dimension.
const GRADIENT_PIXELS: usize = 1024;

/// Runs of images whose sums are kept apart, then added in order: enough for the threads of most
/// processors, and few enough that the sums stay small beside the images.
const RUNS: usize = 16;

/// `grad × columnsᵀ` over the batch.
fn correlate<A: Arithmetic>(x: &dyn Source<A>, grad: &dyn Source<A>, shape: &Shape) -> Vec<A> {
    let (taps, outs) = (shape.taps(), shape.group_out());
    let mut weight = vec![A::zero(); shape.c_out * taps];
    if shape.batch * shape.pixels() == 0 {
        return weight;
    }
    let len = shape.batch.div_ceil(RUNS);
    let runs = (0..shape.batch.div_ceil(len)).into_par_iter();
    let sums: Vec<Vec<A>> = runs
        .map(|run| {
            let images = run * len..shape.batch.min((run + 1) * len);
            correlate_run(x, grad, images, shape)
        })
        .collect();
    // A sum is (groups, taps, channels): the channels, being fewer, are cheaper to reorder.
    for sum in sums {
        for (group, sum) in sum.chunks_exact(taps * outs).enumerate() {
            let weight = &mut weight[group * taps * outs..][..taps * outs];
            for (channel, weight) in weight.chunks_exact_mut(taps).enumerate() {
                let sum = sum[channel..].iter().step_by(outs);
                weight.iter_mut().zip(sum).for_each(|(w, s)| *w = *w + *s);
            }
        }
    }
    weight
}

/// The sum over some images, `(groups, taps, channels)`.
fn correlate_run<A: Arithmetic>(
    x: &dyn Source<A>,
    grad: &dyn Source<A>,
    images: Range<usize>,
    shape: &Shape,
) -> Vec<A> {
    let (taps, outs) = (shape.taps(), shape.group_out());
    let mut sums = vec![A::zero(); shape.c_out * taps];
    let tile = Tile::new(shape, GRADIENT_PIXELS);
    for first in images.clone().step_by(tile.images) {
        let range = first..images.end.min(first + tile.images);
        let count = range.len();
        let (space, out_space) = (taps * tile.pixels(shape), count * shape.out_image());
        let work = |padded: &[A]| {
            A::with_scratch(space + 2 * out_space, |buffer| {
                let (buffer, plain) = buffer.split_at_mut(space);
                let (plain, joined) = plain.split_at_mut(out_space);
                let pixels = range.start * shape.out_image()..range.end * shape.out_image();
                let grad = grad.read(pixels, plain);
                for group in 0..shape.geometry.groups {
                    for rows in tile.row_ranges(shape) {
                        let columns = columns(padded, count, group, rows.clone(), shape, buffer);
                        let grad = match count {
                            1 => output_rows(grad, group, rows, shape),
                            _ => join(grad, group, shape, joined),
                        };
                        let sums = &mut sums[group * taps * outs..][..taps * outs];
                        product(columns, grad.t(), sums, true, Threads::One);
                    }
                }
            });
        };
        with_images(x, range.clone(), shape, work);
    }
    sums
}

/// A group's channels of several output images, `(channels, images × pixels)`.
fn join<'a, A: Arithmetic>(
    images: &[A],
    group: usize,
    shape: &Shape,
    joined: &'a mut [A],
) -> Matrix<'a, A> {
    let (count, outs) = (images.len() / shape.out_image(), shape.group_out());
    let joined = &mut joined[..outs * count * shape.pixels()];
    for (index, dst) in joined.chunks_exact_mut(shape.pixels()).enumerate() {
        let (channel, image) = (index / count + group * outs, index % count);
        let start = (image * shape.c_out + channel) * shape.pixels();
        dst.copy_from_slice(&images[start..start + shape.pixels()]);
    }
    Matrix::new(joined, outs, count * shape.pixels())
}
