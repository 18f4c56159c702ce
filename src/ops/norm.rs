//! Batch normalisation.

use std::sync::{Arc, OnceLock};

use candle_core::{Result, Tensor};

use super::check::{check_dims, check_eps, check_operand, shape_error};
use super::elementwise::relu_backward;
use crate::Op;
use crate::autograd::{self, Backward, Gradient, Operator, apply};
use crate::error::bail;
use crate::kernels::batch_norm::{self as kernel, Affine, Finish, Rectifier, Running};
use crate::kernels::tensors::format::Format;
use crate::kernels::{accumulator, cast};

/// The statistics of one batch, for running averages: `F32`, `(c)`, detached.
#[derive(Clone, Debug)]
pub struct BatchStatistics {
    /// The mean of each channel.
    pub mean: Tensor,
    /// The biased variance of each channel.
    pub var: Tensor,
    /// How many values each is taken over.
    pub count: usize,
}

/// Normalises each channel of a batch by the batch's own mean and variance, then scales and
/// shifts it. For training.
///
/// # Shapes
///
/// `x (n, c, …)`, `weight (c)`, `bias (c)` → that of `x`, and the batch's statistics. Running averages are yours to update, as
/// [`nn::BatchNorm`](crate::nn::BatchNorm) does.
///
/// # Precision
///
/// `x` in any floating-point dtype, which the result has too; `weight` and `bias` in any.
/// Statistics (taken about a shift, so that a large mean costs no digits), normalisation and all
/// gradients in `F32`; rounded once. Sums over a channel, in the statistics and in the gradients, are `F32` within a block
/// of elements and `F64` over the blocks.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; only one value per channel, which has no variance.
///
/// # References
///
/// Ioffe and Szegedy, [Batch Normalization](https://arxiv.org/abs/1502.03167);
/// `torch.nn.functional.batch_norm`.
pub fn batch_norm(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, BatchStatistics)> {
    let (y, of) = batch_norm_of(Format::ChannelsFirst, x, Affine { weight, bias }, eps)?;
    Ok((y, of.vectors()?))
}

pub(crate) fn batch_norm_of(
    format: Format,
    x: &Tensor,
    affine: Affine<'_>,
    eps: f64,
) -> Result<(Tensor, OfBatch)> {
    let statistics = Arc::new(OnceLock::new());
    let mode = Mode::Train(statistics.clone());
    let y = run(format, x, affine, eps, mode)?;
    Ok((y, OfBatch::taken(&statistics)?))
}

/// [`BatchStatistics`] as kernels leave them.
#[derive(Clone, Debug)]
pub(crate) struct OfBatch {
    pub(crate) statistics: kernel::Statistics,
    pub(crate) count: usize,
}

impl OfBatch {
    /// What forward has left.
    pub(crate) fn taken(left: &OnceLock<Self>) -> Result<Self> {
        match left.get() {
            Some(left) => Ok(left.clone()),
            None => bail!("batch_norm left no statistics"),
        }
    }

    pub(super) fn vectors(self) -> Result<BatchStatistics> {
        let Self { statistics, count } = self;
        Ok(BatchStatistics { mean: statistics.mean()?, var: statistics.var()?, count })
    }
}

/// [`batch_norm`], an optional `residual` added, and a [`relu`](super::relu): how the layers of a
/// residual network end, in one pass over memory fewer than one after the other.
///
/// # Shapes
///
/// As [`batch_norm`]; `residual` as `x`.
///
/// # Precision
///
/// As [`batch_norm`]; `residual` in the dtype of `x`. All arithmetic on elements is in `F32`, and rounded once, where
/// three operators round three times. Where the result is NaN its gradient is passed on, as by
/// [`relu`](super::relu).
///
/// # Errors
///
/// As [`batch_norm`]; a residual of another shape, dtype or device.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32], [3.0]], &Device::Cpu)?; // normalised: -1, 1
/// let residual = Tensor::new(&[[0f32], [2.0]], &Device::Cpu)?;
/// let (y, _) = ops::batch_norm_relu(&x, None, None, Some(&residual), 0.0)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0.0], [3.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.ao.nn.intrinsic.BNReLU2d`, in training.
pub fn batch_norm_relu(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, BatchStatistics)> {
    let affine = Affine { weight, bias };
    let (y, of) = batch_norm_relu_of(Format::ChannelsFirst, x, affine, residual, eps)?;
    Ok((y, of.vectors()?))
}

pub(crate) fn batch_norm_relu_of(
    format: Format,
    x: &Tensor,
    affine: Affine<'_>,
    residual: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, OfBatch)> {
    batch_norm_rectified(format, x, affine, residual, eps, Rectifier::Relu)
}

/// [`batch_norm`] and a [`relu6`](super::relu6): how the layers of a mobile network end, in one pass over memory fewer than
/// one after the other.
///
/// # Shapes, errors
///
/// As [`batch_norm`].
///
/// # Precision
///
/// As [`batch_norm`]. The gradient is 0 where the result, rounded, is 0 or 6; where the result is NaN its
/// gradient is passed on, as by [`relu6`](super::relu6).
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[1f32], [3.0]], &Device::Cpu)?; // normalised: -1, 1
/// let weight = Tensor::new(&[10f32], &Device::Cpu)?;
/// let (y, _) = ops::batch_norm_relu6(&x, Some(&weight), None, 0.0)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0.0], [6.0]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.nn.functional.relu6` of `torch.nn.functional.batch_norm`.
pub fn batch_norm_relu6(
    x: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, BatchStatistics)> {
    let affine = Affine { weight, bias };
    let (y, of) = batch_norm_relu6_of(Format::ChannelsFirst, x, affine, eps)?;
    Ok((y, of.vectors()?))
}

pub(crate) fn batch_norm_relu6_of(
    format: Format,
    x: &Tensor,
    affine: Affine<'_>,
    eps: f64,
) -> Result<(Tensor, OfBatch)> {
    batch_norm_rectified(format, x, affine, None, eps, Rectifier::Relu6)
}

/// With a residual, the rectifier is relu.
fn batch_norm_rectified(
    format: Format,
    x: &Tensor,
    Affine { weight, bias }: Affine<'_>,
    residual: Option<&Tensor>,
    eps: f64,
    by: Rectifier,
) -> Result<(Tensor, OfBatch)> {
    check_eps(eps)?;
    if residual.is_some() && by != Rectifier::Relu {
        bail!("a residual is added before a relu, not before {by:?}");
    }
    let statistics = Arc::new(OnceLock::new());
    let (mode, weighted) = (Mode::Train(statistics.clone()), weight.is_some());
    let op = match by {
        Rectifier::Relu => Op::BatchNormRelu,
        Rectifier::Relu6 => Op::BatchNormRelu6,
    };
    let norm = BatchNorm { op, format, eps, mode, weight: weighted };
    let inputs: Vec<&Tensor> = [Some(x), residual, weight, bias].into_iter().flatten().collect();
    let y = apply(RectifiedBatchNorm { norm, residual: residual.is_some(), by }, &inputs)?;
    Ok((y, OfBatch::taken(&statistics)?))
}

/// Its inputs are `x`, the residual if any, and the parameters.
struct RectifiedBatchNorm {
    norm: BatchNorm,
    residual: bool,
    by: Rectifier,
}

impl Operator for RectifiedBatchNorm {
    type Saved = Saved;
    const KEEPS_OUTPUT: bool = true;

    fn op(&self) -> Op {
        self.norm.op
    }

    /// All but the residual.
    fn reads(&self, input: usize, _wanted: &[bool]) -> bool {
        !(self.residual && input == 1)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let x = &inputs[0];
        let (residual, parameters) = match self.residual {
            true => (Some(&inputs[1]), &inputs[2..]),
            false => (None, &inputs[1..]),
        };
        if let Some(residual) = residual {
            check_operand(self.op(), x, "residual", residual, true)?;
            check_dims(self.op(), "residual", residual, x.dims())?;
        }
        let finish = residual.map_or(Finish::Rectified(self.by), Finish::AddRelu);
        self.norm.normalise(x, parameters, finish)
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        if !self.residual {
            return self.norm.gradients(ctx, Some((self.by, ctx.kept_output()?)));
        }
        let gradient = relu_backward(ctx)?;
        let mut wants = vec![ctx.wants[0]];
        wants.extend(&ctx.wants[2..]);
        let inner = ctx.within(&gradient, &wants);
        let mut gradients = self.norm.gradients(&inner, None)?;
        let wanted = ctx.wants[1].map(|_| Gradient::owned(gradient));
        gradients.insert(1, wanted);
        Ok(gradients)
    }
}

/// Normalises each channel by a given mean and variance, then scales and shifts it. For
/// evaluation.
///
/// # Shapes, precision, errors
///
/// As [`batch_norm`]; `mean (c)` and `var (c)` in any floating-point dtype, without gradient.
pub fn batch_norm_eval(
    x: &Tensor,
    mean: &Tensor,
    var: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let running = Running { mean, var, eps };
    batch_norm_eval_of(Format::ChannelsFirst, x, running, Affine { weight, bias })
}

pub(super) fn batch_norm_eval_of(
    format: Format,
    x: &Tensor,
    running: Running<'_>,
    affine: Affine<'_>,
) -> Result<Tensor> {
    // Backward reads them, and a training step may rewrite running statistics before it does.
    let own = |statistics: &Tensor| match autograd::no_grad_is_active() {
        true => Ok(statistics.detach()),
        false => statistics.detach().force_contiguous(),
    };
    let (mean, var) = (own(running.mean)?, own(running.var)?);
    let given = [running.mean, running.var].map(Tensor::detach);
    let mode = Mode::Eval { mean, var, given };
    run(format, x, affine, running.eps, mode)
}

fn run(
    format: Format,
    x: &Tensor,
    Affine { weight, bias }: Affine<'_>,
    eps: f64,
    mode: Mode,
) -> Result<Tensor> {
    check_eps(eps)?;
    let op = BatchNorm { op: Op::BatchNorm, format, eps, mode, weight: weight.is_some() };
    let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    apply(op, &inputs)
}

struct BatchNorm {
    op: Op,
    format: Format,
    eps: f64,
    mode: Mode,
    /// Whether the second input is the weight.
    weight: bool,
}

enum Mode {
    Train(Arc<OnceLock<OfBatch>>),
    Eval {
        mean: Tensor,
        var: Tensor,
        /// What those are copies of.
        given: [Tensor; 2],
    },
}

struct Saved {
    x: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    statistics: Option<kernel::Statistics>,
}

impl Operator for BatchNorm {
    type Saved = Saved;

    fn op(&self) -> Op {
        self.op
    }

    fn captured(&self, in_backward: bool) -> Vec<&Tensor> {
        match &self.mode {
            Mode::Eval { given, .. } if !in_backward => given.iter().collect(),
            _ => Vec::new(),
        }
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        self.normalise(&inputs[0], &inputs[1..], Finish::Plain)
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        self.gradients(ctx, None)
    }
}

impl BatchNorm {
    /// The gradients of `x` and of the parameters; with a rectifier, that of its output is given, and the output.
    fn gradients(
        &self,
        ctx: &Backward<'_, Saved>,
        rectified: Option<(Rectifier, &Tensor)>,
    ) -> Result<Vec<Option<Gradient>>> {
        let Saved { x, weight, bias, statistics } = ctx.saved;
        let (weight, bias, format) = (weight.as_ref(), bias.as_ref(), self.format);
        let gradient = ctx.gradient;
        let (dx, dweight, dbias) = match (&self.mode, statistics) {
            (Mode::Eval { mean, var, .. }, _) => {
                let [mean, var] = self.given(x, mean, var)?;
                let running = Running { mean: &mean, var: &var, eps: self.eps };
                kernel::backward_eval(format, x, gradient, weight, running)?
            }
            (_, Some(statistics)) => match rectified {
                Some((by, y)) => {
                    let affine = Affine { weight, bias };
                    kernel::backward_rectified(format, by, [x, y], gradient, affine, statistics)?
                }
                None => kernel::backward_train(format, x, gradient, weight, statistics)?,
            },
            (_, None) => bail!("batch_norm saved no statistics"),
        };
        let mut gradients = vec![dx];
        gradients.extend(self.weight.then_some(dweight));
        if gradients.len() < ctx.wants.len() {
            gradients.push(dbias);
        }
        Ok(gradients.into_iter().map(|g| Some(Gradient::owned(g))).collect())
    }

    fn normalise(
        &self,
        x: &Tensor,
        parameters: &[Tensor],
        finish: Finish<'_>,
    ) -> Result<(Tensor, Saved)> {
        check_operand(self.op(), x, "x", x, false)?;
        let c = match (x.dims(), self.format) {
            (&[_, c, ..], Format::ChannelsFirst) | (&[_, .., c], Format::ChannelsLast) => c,
            (_, Format::ChannelsFirst) => {
                return shape_error(self.op(), "x", x, "(n, c, …)".into());
            }
            (_, Format::ChannelsLast) => {
                return shape_error(self.op(), "x", x, "(n, …, c)".into());
            }
        };
        let mut parameters = parameters.iter();
        let weight = if self.weight { parameters.next() } else { None };
        let affine = Affine { weight, bias: parameters.next() };
        for (name, tensor) in [("weight", weight), ("bias", affine.bias)] {
            let Some(tensor) = tensor else { continue };
            check_operand(self.op(), x, name, tensor, false)?;
            check_dims(self.op(), name, tensor, &[c])?;
        }
        let (y, statistics) = match &self.mode {
            Mode::Train(out) => {
                let count = x.elem_count() / c.max(1);
                if count < 2 {
                    let expected = "more than one value a channel to take a variance of";
                    return shape_error(self.op(), "x", x, expected.into());
                }
                let (y, statistics) =
                    kernel::forward_train(self.format, x, affine, finish, self.eps)?;
                out.get_or_init(|| OfBatch { statistics: statistics.clone(), count });
                (y, Some(statistics))
            }
            Mode::Eval { mean, var, .. } => {
                for (name, tensor) in [("mean", mean), ("var", var)] {
                    check_operand(self.op(), x, name, tensor, false)?;
                    check_dims(self.op(), name, tensor, &[c])?;
                }
                let [mean, var] = self.given(x, mean, var)?;
                let running = Running { mean: &mean, var: &var, eps: self.eps };
                (kernel::forward_eval(self.format, x, running, affine)?, None)
            }
        };
        let (weight, bias) = (weight.cloned(), affine.bias.cloned());
        Ok((y, Saved { x: x.clone(), weight, bias, statistics }))
    }

    /// Given statistics in the dtype of the arithmetic.
    fn given(&self, x: &Tensor, mean: &Tensor, var: &Tensor) -> Result<[Tensor; 2]> {
        let dtype = accumulator(x.dtype());
        Ok([cast(mean, dtype)?, cast(var, dtype)?])
    }
}
