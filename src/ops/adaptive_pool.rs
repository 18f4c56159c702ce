//! Pooling to a given size.

use candle_core::{DType, Result, Tensor, ToUsize2};

use super::check::{check_operand, shape_error};
use super::pool::{avg_pool2d_of, global_avg_pool2d_of, max_pool2d_of, shape_of};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::pool::{self, Window};
use crate::kernels::tensors::format::{Format, to_nchw, to_nhwc};
use crate::kernels::{accumulator, cast, cat, reduce};

/// The averages of windows of `x`, so many that the output has the size asked for.
///
/// # Shapes
///
/// `x (b, c, h, w)` and one number or `(height, width)` → `(b, c, height, width)`. Along an axis of `n` pixels, output
/// `i` of `m` is the average from pixel `⌊i n / m⌋` to before `⌈(i + 1) n / m⌉`, so windows may overlap, and `m` may be
/// larger than `n`.
///
/// # Precision
///
/// The dtype of `x` in and out; sums and gradients in `F32`, rounded once. Autocast treats it as `avg_pool2d`, which it
/// is where output sizes divide those of `x`. Elsewhere each row and column is summed by itself, which is slow for
/// large outputs.
///
/// # Errors
///
/// A shape that does not fit; a size of 0.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[[[1f32, 2.0, 3.0, 4.0, 5.0]]]], &Device::Cpu)?;
/// let y = ops::adaptive_avg_pool2d(&x, (1, 3))?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [1.5, 3.0, 4.5]); // of 1 2, of 2 3 4, of 4 5
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.adaptive_avg_pool2d`.
pub fn adaptive_avg_pool2d(x: &Tensor, output: impl ToUsize2) -> Result<Tensor> {
    adaptive_avg_pool2d_of(Format::ChannelsFirst, x, output)
}

pub(super) fn adaptive_avg_pool2d_of(
    format: Format,
    x: &Tensor,
    output: impl ToUsize2,
) -> Result<Tensor> {
    let adaptive = Adaptive::new(Op::AvgPool2d, format, x, output.to_usize2())?;
    match adaptive.kernel() {
        Some(_) if adaptive.output == (1, 1) => {
            let [n, c, ..] = format.split(x.dims4()?.into());
            let [a, b, c, d] = format.join([n, c, 1, 1]);
            global_avg_pool2d_of(format, x)?.reshape((a, b, c, d))
        }
        Some(kernel) => avg_pool2d_of(format, x, kernel, kernel, 0),
        None => apply(AdaptiveAvg(adaptive), &[x]),
    }
}

/// The maxima of windows of `x`, so many that the output has the size asked for.
///
/// # Shapes
///
/// As [`adaptive_avg_pool2d`].
///
/// # Precision
///
/// As [`max_pool2d`](super::max_pool2d), also under autocast, and which it is where output sizes divide those
/// of `x`. NaN wins; the gradient of a window goes to its first maximum.
///
/// # Errors
///
/// As [`adaptive_avg_pool2d`]; an image of more than 2³² - 1 pixels.
///
/// # References
///
/// `torch.nn.functional.adaptive_max_pool2d`.
pub fn adaptive_max_pool2d(x: &Tensor, output: impl ToUsize2) -> Result<Tensor> {
    adaptive_max_pool2d_of(Format::ChannelsFirst, x, output)
}

pub(super) fn adaptive_max_pool2d_of(
    format: Format,
    x: &Tensor,
    output: impl ToUsize2,
) -> Result<Tensor> {
    let adaptive = Adaptive::new(Op::MaxPool2d, format, x, output.to_usize2())?;
    match adaptive.kernel() {
        Some(kernel) => max_pool2d_of(format, x, kernel, kernel, 0),
        None => apply(AdaptiveMax(adaptive), &[x]),
    }
}

/// A first element, and how many.
type Range = (usize, usize);

/// Sizes that were checked.
#[derive(Clone, Copy)]
struct Adaptive {
    format: Format,
    input: (usize, usize),
    output: (usize, usize),
}

impl Adaptive {
    fn new(op: Op, format: Format, x: &Tensor, output: (usize, usize)) -> Result<Self> {
        check_operand(op, x, "x", x, false)?;
        let input = match x.dims4() {
            Ok(dims) => format.split(dims.into()),
            Err(_) => [0; 4],
        };
        let input = (input[2], input[3]);
        let fits = |pixels: (usize, usize)| {
            pixels.0.checked_mul(pixels.1).is_some_and(|pixels| pixels <= u32::MAX as usize)
        };
        if input.0 == 0 || input.1 == 0 || !fits(input) {
            let expected = format!("{} of 1 to {} pixels an image", shape_of(format), u32::MAX);
            return shape_error(op, "x", x, expected);
        }
        if output.0 == 0 || output.1 == 0 || !fits(output) {
            let got = if fits(output) { 0.0 } else { output.0.max(output.1) as f64 };
            let expected = "at least 1, and at most 4294967295 pixels an image";
            return Err(ArgumentError::Setting { name: "output", got, expected }.into());
        }
        Ok(Self { format, input, output })
    }

    /// The one size of all windows, where sizes divide.
    fn kernel(self) -> Option<(usize, usize)> {
        let (input, output) = (self.input, self.output);
        let divides = input.0.is_multiple_of(output.0) && input.1.is_multiple_of(output.1);
        divides.then(|| (input.0 / output.0, input.1 / output.1))
    }

    /// The windows along an axis.
    fn windows(input: usize, output: usize) -> Vec<Range> {
        let window = |i: usize| {
            let start = i * input / output;
            (start, ((i + 1) * input).div_ceil(output) - start)
        };
        (0..output).map(window).collect()
    }

    /// For every pixel of an axis, the windows that it is in.
    fn windows_of(input: usize, output: usize) -> Vec<Range> {
        let windows = Self::windows(input, output);
        let of = |pixel: usize| {
            let first = windows.partition_point(|(start, count)| start + count <= pixel);
            let end = windows.partition_point(|(start, _)| *start <= pixel);
            (first, end - first)
        };
        (0..input).map(of).collect()
    }

    /// `t`, of the output's size, divided by how many pixels each window has.
    fn divide(self, t: &Tensor) -> Result<Tensor> {
        let axis = |input, output| Self::windows(input, output).into_iter().map(|(_, count)| count);
        let columns: Vec<_> = axis(self.input.1, self.output.1).collect();
        let counts = axis(self.input.0, self.output.0)
            .flat_map(|rows| columns.iter().map(move |columns| (rows * columns) as f64));
        let [a, b, c, d] = self.format.join([1, 1, self.output.0, self.output.1]);
        let counts = Tensor::from_vec(counts.collect(), (a, b, c, d), &candle_core::Device::Cpu)?;
        t.broadcast_div(&counts.to_dtype(t.dtype())?.to_device(t.device())?)
    }

    /// The sums of `t` over ranges of rows, and of these over ranges of columns.
    fn sums(self, t: &Tensor, rows: &[Range], columns: &[Range]) -> Result<Tensor> {
        let along = |t: &Tensor, dim: usize, ranges: &[Range]| {
            let mut dims = t.dims().to_vec();
            dims[dim] = 1;
            let sum = |&(start, count): &Range| {
                reduce::sum_to(&t.narrow(dim, start, count)?, &dims, t.dtype())?.reshape(&dims[..])
            };
            cat(&ranges.iter().map(sum).collect::<Result<Vec<_>>>()?, dim)
        };
        let height = self.format.height();
        along(&along(t, height, rows)?, height + 1, columns)
    }
}

struct AdaptiveAvg(Adaptive);

impl Operator for AdaptiveAvg {
    type Saved = ();

    fn op(&self) -> Op {
        Op::AvgPool2d
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        let (Adaptive { input, output, .. }, x) = (self.0, &inputs[0]);
        let axis = Adaptive::windows;
        let wide = cast(x, accumulator(x.dtype()))?;
        let sums = self.0.sums(&wide, &axis(input.0, output.0), &axis(input.1, output.1))?;
        Ok((cast(&self.0.divide(&sums)?, x.dtype())?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let Adaptive { input, output, .. } = self.0;
        let dx = ctx.wants[0].map(|out| {
            let axis = Adaptive::windows_of;
            let share = self.0.divide(&cast(ctx.gradient, accumulator(ctx.gradient.dtype()))?)?;
            let dx = self.0.sums(&share, &axis(input.0, output.0), &axis(input.1, output.1))?;
            cast(&dx, out)
        });
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}

struct AdaptiveMax(Adaptive);

impl AdaptiveMax {
    /// The maxima of `x (b, c, h, w)`, and the pixel of each.
    fn maxima(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let Adaptive { input: (h, w), output, .. } = self.0;
        let format = Format::ChannelsFirst;
        let max = |x: &Tensor, kernel| {
            pool::max_forward(x, Window { kernel, stride: (1, 1), padding: (0, 0), format })
        };
        // The first of a row's maxima, then the first row: the first in the order of pixels.
        let (mut rows, mut at) = (Vec::new(), Vec::new());
        for (start, count) in Adaptive::windows(w, output.1) {
            let (y, index) = max(&x.narrow(3, start, count)?, (1, count))?;
            // A pixel of `count` columns as one of `w`.
            let moved = (0..h).map(|row| (row * (w - count) + start) as u32).collect();
            let moved = Tensor::from_vec(moved, (1, 1, h, 1), x.device())?;
            rows.push(y);
            at.push(index.broadcast_add(&moved)?);
        }
        let (x, at) = (cat(&rows, 3)?, Tensor::cat(&at, 3)?.flatten_from(2)?);
        let (mut columns, mut index) = (Vec::new(), Vec::new());
        for (start, count) in Adaptive::windows(h, output.0) {
            let (y, found) = max(&x.narrow(2, start, count)?, (count, 1))?;
            let moved = Tensor::new((start * output.1) as u32, x.device())?;
            columns.push(y);
            index.push(found.broadcast_add(&moved)?);
        }
        let index = Tensor::cat(&index, 2)?.flatten_from(2)?;
        Ok((cat(&columns, 2)?, at.gather(&index.contiguous()?, 2)?))
    }
}

impl Operator for AdaptiveMax {
    /// The pixel of each maximum, `(b, c, windows)`; the dimensions of the input, channels first.
    type Saved = (Tensor, (usize, usize, usize, usize));

    fn op(&self) -> Op {
        Op::MaxPool2d
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let last = self.0.format == Format::ChannelsLast;
        let x = inputs[0].detach();
        let x = if last { to_nchw(&x)? } else { x };
        let (y, index) = self.maxima(&x)?;
        Ok((if last { to_nhwc(&y)? } else { y }, (index, x.dims4()?)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (index, dims) = ctx.saved;
        let dx = ctx.wants[0].map(|out| self.gradient(ctx.gradient, index, *dims, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}

impl AdaptiveMax {
    fn gradient(
        &self,
        gradient: &Tensor,
        index: &Tensor,
        dims: (usize, usize, usize, usize),
        out: DType,
    ) -> Result<Tensor> {
        if self.0.format == Format::ChannelsFirst {
            return pool::max_scatter(gradient, index, dims, out);
        }
        to_nhwc(&pool::max_scatter(&to_nchw(gradient)?, index, dims, out)?)
    }
}
