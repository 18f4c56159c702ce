//! Upsampling, and downsampling.

use candle_core::{Result, Tensor};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::interpolate::{self, SamplingGrid};
use crate::kernels::tensors::MOST_ELEMENTS;

/// `x` stretched to `target_size`, each element the nearest one of `x`.
///
/// # Shapes
///
/// `x (b, c, l)` → `(b, c, target_size)`, of any ratio.
///
/// # Precision
///
/// The dtype of `x` in and out, nothing rounded; the gradients of elements repeated are summed in
/// `F32`. (candle's gradient takes whole ratios, and forgets what other operators added to it.)
///
/// # Errors
///
/// A shape that does not fit; a target of 0.
///
/// # References
///
/// `torch.nn.functional.interpolate`, mode `nearest`.
pub fn upsample_nearest1d(x: &Tensor, target_size: usize) -> Result<Tensor> {
    apply(UpsampleNearest1d(target("target_size", target_size)?), &[x])
}

/// `x` stretched to `(target_h, target_w)`, each pixel the nearest one of `x`.
///
/// # Shapes
///
/// `x (b, c, h, w)` → `(b, c, target_h, target_w)`, of any ratio.
///
/// # Precision
///
/// As [`upsample_nearest1d`].
///
/// # Errors
///
/// As [`upsample_nearest1d`].
///
/// # References
///
/// `torch.nn.functional.interpolate`, mode `nearest`.
pub fn upsample_nearest2d(x: &Tensor, target_h: usize, target_w: usize) -> Result<Tensor> {
    let size = (target("target_h", target_h)?, target("target_w", target_w)?);
    apply(Upsample2d { op: Op::UpsampleNearest2d, size, mode: Interpolation::Nearest }, &[x])
}

/// `x` stretched to `(target_h, target_w)`, each pixel the average of the four around its place.
///
/// With `align_corners`, the centres of the corner pixels stay where they are; without, the image's
/// corners do.
///
/// # Shapes
///
/// `x (b, c, h, w)` → `(b, c, target_h, target_w)`, of any ratio.
///
/// # Precision
///
/// The dtype of `x` in and out; arithmetic and the sums of gradients in `F32`, rounded once.
/// (candle's has no gradient.)
///
/// # Errors
///
/// A shape that does not fit; a target of 0.
///
/// # References
///
/// `torch.nn.functional.interpolate`, mode `bilinear`, without antialiasing.
pub fn upsample_bilinear2d(
    x: &Tensor,
    target_h: usize,
    target_w: usize,
    align_corners: bool,
) -> Result<Tensor> {
    let size = (target("target_h", target_h)?, target("target_w", target_w)?);
    let mode = Interpolation::Bilinear { align_corners, scales: None };
    apply(Upsample2d { op: Op::UpsampleBilinear2d, size, mode }, &[x])
}

/// As [`upsample_bilinear2d`], to the size of `x` times the scales, rounded down. Pixels are placed
/// by the scales as given, not by the sizes. An axis that keeps its size, such as one of 3 pixels times 1.3, is copied.
///
/// # Errors
///
/// A shape that does not fit; a scale that is not above 0 and finite, or leaves no pixel, or more than memory has
/// addresses for.
///
/// # References
///
/// `torch.nn.functional.interpolate` with `scale_factor`, on a CPU. Its CUDA kernel copies an image that keeps both
/// sizes, and places the pixels of one that keeps one of them by the scale.
pub fn upsample_bilinear2d_with_scale(
    x: &Tensor,
    scale_h: f64,
    scale_w: f64,
    align_corners: bool,
) -> Result<Tensor> {
    for (name, got) in [("scale_h", scale_h), ("scale_w", scale_w)] {
        if !(got > 0.0 && got.is_finite()) {
            let expected = "a finite number above 0";
            return Err(ArgumentError::Setting { name, got, expected }.into());
        }
    }
    let &[_, _, h, w] = x.dims() else {
        return shape_error(Op::UpsampleBilinear2d, "x", x, "(b, c, h, w)".into());
    };
    // Of a number too large, the largest.
    let scaled = |size: usize, scale: f64| (size as f64 * scale).floor() as usize;
    let size = (scaled(h, scale_h), scaled(w, scale_w));
    if size.0 == 0 || size.1 == 0 {
        let expected = format!("(b, c, h, w), large enough for scales {scale_h} and {scale_w}");
        return shape_error(Op::UpsampleBilinear2d, "x", x, expected);
    }
    let scales = if size == (h, w) { None } else { Some((scale_h, scale_w)) };
    let mode = Interpolation::Bilinear { align_corners, scales };
    apply(Upsample2d { op: Op::UpsampleBilinear2d, size, mode }, &[x])
}

fn target(name: &'static str, size: usize) -> Result<usize> {
    match size {
        0 => Err(ArgumentError::Setting { name, got: 0.0, expected: "at least 1" }.into()),
        _ => Ok(size),
    }
}

/// Slices hold `planes` images of that height and width, and `U32` their rows and columns.
fn check_size(op: Op, x: &Tensor, planes: usize, (height, width): (usize, usize)) -> Result<()> {
    let count = height.checked_mul(width).and_then(|pixels| pixels.checked_mul(planes.max(1)));
    if height.max(width) <= u32::MAX as usize && count.is_some_and(|count| count <= MOST_ELEMENTS) {
        return Ok(());
    }
    let expected =
        format!("one that is not to be {height} x {width}: that is more than memory has addresses");
    shape_error(op, "x", x, expected)
}

/// To that length.
struct UpsampleNearest1d(usize);

impl Operator for UpsampleNearest1d {
    /// The dimensions of the input as an image of one row, and the places in it.
    type Saved = ((usize, usize, usize, usize), SamplingGrid);

    fn op(&self) -> Op {
        Op::UpsampleNearest1d
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let (b, c, l) = match *x.dims() {
            [b, c, l] if l > 0 => (b, c, l),
            _ => return shape_error(self.op(), "x", x, "(b, c, l), at least one element".into()),
        };
        check_size(self.op(), x, b * c, (1, self.0))?;
        let grid = SamplingGrid::nearest((1, l), (1, self.0));
        let y = interpolate::forward(&x.unsqueeze(2)?, &grid)?.squeeze(2)?;
        Ok((y, ((b, c, 1, l), grid)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (dims, grid) = ctx.saved;
        let dx = ctx.wants[0].map(|out| {
            interpolate::backward(&ctx.gradient.unsqueeze(2)?, *dims, grid, out)?.squeeze(2)
        });
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}

struct Upsample2d {
    op: Op,
    /// Height and width of the output.
    size: (usize, usize),
    mode: Interpolation,
}

enum Interpolation {
    Nearest,
    Bilinear { align_corners: bool, scales: Option<(f64, f64)> },
}

impl Operator for Upsample2d {
    /// The dimensions of the input, and the places in it.
    type Saved = ((usize, usize, usize, usize), SamplingGrid);

    fn op(&self) -> Op {
        self.op
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let x = &inputs[0];
        check_operand(self.op, x, "x", x, false)?;
        let from = match *x.dims() {
            [_, _, h, w] if h > 0 && w > 0 => (h, w),
            _ => return shape_error(self.op, "x", x, "(b, c, h, w), at least one pixel".into()),
        };
        let planes = x.dims()[..2].iter().product::<usize>();
        check_size(self.op, x, planes, self.size)?;
        let grid = match self.mode {
            Interpolation::Nearest => SamplingGrid::nearest(from, self.size),
            // Nothing to average: not even infinities with nothing.
            Interpolation::Bilinear { .. } if from == self.size => {
                SamplingGrid::nearest(from, self.size)
            }
            Interpolation::Bilinear { align_corners, scales } => {
                SamplingGrid::linear(from, self.size, align_corners, scales)
            }
        };
        Ok((interpolate::forward(x, &grid)?, (x.dims4()?, grid)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (dims, grid) = ctx.saved;
        let dx = ctx.wants[0].map(|out| interpolate::backward(ctx.gradient, *dims, grid, out));
        Ok(vec![dx.transpose()?.map(Gradient::owned)])
    }
}
