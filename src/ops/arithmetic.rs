//! Arithmetic on two tensors.

use candle_core::{DType, Result, Tensor};

use super::check::{check_operand, shape_error};
use super::wants::reads_other_operand;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::accumulator;
use crate::kernels::{cast, contiguous, elementwise, reduce};
use crate::{Op, autocast};

/// `a + b`: a residual, a bias, an embedding of positions.
///
/// # Shapes
///
/// Any two that broadcast → their common shape.
///
/// # Precision
///
/// Under autocast, operands of different dtypes are cast to the wider (`F16` with `BF16` to
/// `F32`); outside they share a dtype. The sum in `F32`, rounded once. Where an operand was
/// broadcast its gradient is summed over the repeats, in `F32` within a block of elements and in `F64` over the blocks;
/// elsewhere it is handed on as it is.
///
/// # Errors
///
/// Shapes that do not broadcast; dtypes or devices that differ.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{DType, Device, Tensor, Var};
///
/// let (x, bias) = (Tensor::zeros((4096, 2), DType::F16, &Device::Cpu)?, Var::zeros(2, DType::F16, &Device::Cpu)?);
/// let grads = ops::sum(&ops::add(&x, &bias)?)?.backward()?;
/// let gradient = grads.get(&bias).unwrap().to_dtype(DType::F32)?;
/// assert_eq!(gradient.to_vec1::<f32>()?, [4096.0; 2]); // candle's `broadcast_add` says 2048
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.add`.
pub fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Arithmetic::Add, &[a, b])
}

/// `a - b`; otherwise as [`add`].
///
/// # References
///
/// `torch.sub`.
pub fn sub(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Arithmetic::Sub, &[a, b])
}

/// `a * b`, element by element; otherwise as [`add`].
///
/// # References
///
/// `torch.mul`.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Arithmetic::Mul, &[a, b])
}

/// `a / b`; otherwise as [`add`].
///
/// # References
///
/// `torch.div`.
pub fn div(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Arithmetic::Div, &[a, b])
}

/// The larger of `a` and `b`, element by element; NaN where either is. Otherwise as [`add`].
///
/// # Precision
///
/// Under autocast, operands of different dtypes are cast to the wider; outside they share a dtype. Nothing else is
/// rounded. Where the two are equal, each gets half of the gradient; where either is NaN, each gets all of it.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Var};
///
/// let (a, b) = (Var::new(&[1f32, 2.0, 3.0], &Device::Cpu)?, Var::new(&[3f32, 2.0, 1.0], &Device::Cpu)?);
/// let larger = ops::maximum(&a, &b)?;
/// assert_eq!(larger.to_vec1::<f32>()?, [3.0, 2.0, 3.0]);
/// let grads = ops::sum(&larger)?.backward()?;
/// assert_eq!(grads.get(&a).unwrap().to_vec1::<f32>()?, [0.0, 0.5, 1.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.maximum`; `candle_core::Tensor::broadcast_maximum`.
pub fn maximum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Arithmetic::Maximum, &[a, b])
}

/// The smaller of `a` and `b`, element by element; NaN where either is. Otherwise as [`maximum`].
///
/// # References
///
/// `torch.minimum`; `candle_core::Tensor::broadcast_minimum`.
pub fn minimum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(Arithmetic::Minimum, &[a, b])
}

#[derive(Clone, Copy)]
enum Arithmetic {
    Add,
    Sub,
    Mul,
    Div,
    Maximum,
    Minimum,
}

/// What gradients are made of; those of sums need only shapes.
struct Saved {
    a_dims: Vec<usize>,
    b_dims: Vec<usize>,
    /// The operands, but those of a sum.
    pair: Option<(Tensor, Tensor)>,
}

impl Operator for Arithmetic {
    type Saved = Saved;

    fn op(&self) -> Op {
        match self {
            Self::Add => Op::Add,
            Self::Sub => Op::Sub,
            Self::Mul => Op::Mul,
            Self::Div => Op::Div,
            Self::Maximum => Op::Maximum,
            Self::Minimum => Op::Minimum,
        }
    }

    fn reads(&self, input: usize, wanted: &[bool]) -> bool {
        match self {
            Self::Add | Self::Sub => false,
            Self::Mul => reads_other_operand(input, wanted),
            Self::Div | Self::Maximum | Self::Minimum => true,
        }
    }

    /// A sum of `F32` and of 16 bits, in either order.
    fn widens(&self, inputs: &[DType]) -> bool {
        let is_16_bit = |dtype| matches!(dtype, DType::F16 | DType::BF16);
        match (self, inputs) {
            (Self::Add, &[a, b]) => {
                (a == DType::F32 && is_16_bit(b)) || (is_16_bit(a) && b == DType::F32)
            }
            _ => false,
        }
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let (a, b) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), a, "a", a, false)?;
        // Others have been cast; outside of a scope nothing is.
        let dtypes = [a.dtype(), b.dtype()];
        let same = !(self.widens(&dtypes)
            && autocast::target(self.op(), dtypes.into_iter())? == Some(DType::F32));
        check_operand(self.op(), a, "b", b, same)?;
        let Some(dims) = common_dims(a.dims(), b.dims()) else {
            let expected = format!("one that broadcasts with that of a, {:?}", a.shape());
            return shape_error(self.op(), "b", b, expected);
        };
        let (wide_a, wide_b) = (a.broadcast_as(dims.as_slice())?, b.broadcast_as(dims)?);
        let y = match self {
            Self::Add => elementwise::add(&wide_a, &wide_b),
            Self::Sub => elementwise::sub(&wide_a, &wide_b),
            Self::Mul => elementwise::mul(&wide_a, &wide_b, a.dtype()),
            Self::Div => elementwise::div(&wide_a, &wide_b, a.dtype()),
            Self::Maximum => elementwise::maximum(&wide_a, &wide_b),
            Self::Minimum => elementwise::minimum(&wide_a, &wide_b),
        }?;
        let pair = (!matches!(self, Self::Add | Self::Sub)).then(|| (a.clone(), b.clone()));
        let saved = Saved { a_dims: a.dims().to_vec(), b_dims: b.dims().to_vec(), pair };
        Ok((y, saved))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let (gradient, Saved { a_dims, b_dims, pair }) = (ctx.gradient, ctx.saved);
        let dims = gradient.dims();
        if let (Self::Mul, Some((a, b))) = (self, pair) {
            let (i, other) = if ctx.wants[0].is_some() { (0, b) } else { (1, a) };
            let only = ctx.wants[1 - i].is_none() && ctx.wants[i] == Some(gradient.dtype());
            let like = other.dims() == dims && [a_dims, b_dims][i] == dims;
            if only && like && other.dtype() == gradient.dtype() && ctx.owns_gradient {
                let product = elementwise::mul_assign(gradient.clone(), other)?;
                let mut gradients = vec![None, None];
                gradients[i] = Some(Gradient::owned(product));
                return Ok(gradients);
            }
        }
        let da = ctx.wants[0].map(|want| {
            let Some((a, b)) = pair else { return handed_on(gradient, a_dims, want) };
            let (a, b) = (a.broadcast_as(dims)?, b.broadcast_as(dims)?);
            let products = |out| match self {
                Self::Div => elementwise::div(gradient, &b, out),
                Self::Maximum => cast(&elementwise::selection_gradient(&a, &b, gradient)?, out),
                Self::Minimum => cast(&elementwise::selection_gradient(&b, &a, gradient)?, out),
                _ => elementwise::mul(gradient, &b, out),
            };
            summed(products, a_dims, dims, want)
        });
        let db = ctx.wants[1].map(|want| match (self, pair) {
            (_, Some((a, b))) => {
                let (a, b) = (a.broadcast_as(dims)?, b.broadcast_as(dims)?);
                let products = |out| match self {
                    Self::Div => elementwise::divisor_gradient(&a, &b, gradient, out),
                    Self::Maximum => cast(&elementwise::selection_gradient(&b, &a, gradient)?, out),
                    Self::Minimum => cast(&elementwise::selection_gradient(&a, &b, gradient)?, out),
                    _ => elementwise::mul(gradient, &a, out),
                };
                summed(products, b_dims, dims, want)
            }
            (Self::Sub, None) => {
                let sum = handed_on(gradient, b_dims, want)?.into_tensor();
                Ok(Gradient::owned(sum.affine(-1.0, 0.0)?))
            }
            (_, None) => handed_on(gradient, b_dims, want),
        });
        Ok(vec![da.transpose()?, db.transpose()?])
    }
}

/// The gradient of an operand that the output follows one to one.
fn handed_on(gradient: &Tensor, dims: &[usize], want: DType) -> Result<Gradient> {
    if gradient.dims() == dims {
        return Ok(Gradient::shared(gradient.clone()));
    }
    Ok(Gradient::owned(reduce::sum_to(gradient, dims, want)?))
}

/// The gradient of an operand of `dims` from the `products` at every element: in `F32` until they
/// are summed.
fn summed(
    products: impl Fn(DType) -> Result<Tensor>,
    dims: &[usize],
    wide: &[usize],
    want: DType,
) -> Result<Gradient> {
    if dims == wide {
        return Ok(Gradient::owned(products(want)?));
    }
    let full = accumulator(want);
    Ok(Gradient::owned(reduce::sum_to(&products(full)?, dims, want)?))
}

/// The shape that two shapes broadcast to.
fn common_dims(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let at = |dims: &[usize], i: usize| (i + dims.len()).checked_sub(rank).map_or(1, |i| dims[i]);
    let common = |i| match (at(a, i), at(b, i)) {
        (a, b) if a == b || b == 1 => Some(a),
        (1, b) => Some(b),
        _ => None,
    };
    (0..rank).map(common).collect()
}

/// `on_true` where `condition` is not 0, else `on_false`.
///
/// # Shapes
///
/// Any three that broadcast → their common shape.
///
/// # Precision
///
/// Under autocast, the two are cast to the wider of their dtypes (`F16` with `BF16` to `F32`); outside they share a
/// dtype. Nothing else is rounded. The gradient of each is that of the output where it was chosen, and 0 elsewhere;
/// where it was broadcast, they are summed as by [`add`].
///
/// # Errors
///
/// Shapes that do not broadcast; dtypes or devices that differ; a condition that is not of integers.
///
/// # Examples
///
/// ```
/// use candle_amp::ops;
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[-1f32, 2.0], &Device::Cpu)?;
/// let y = ops::where_cond(&x.gt(0f32)?, &x, &Tensor::new(0.5f32, &Device::Cpu)?)?;
/// assert_eq!(y.to_vec1::<f32>()?, [0.5, 2.0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// `torch.where`; `candle_core::Tensor::where_cond`.
pub fn where_cond(condition: &Tensor, on_true: &Tensor, on_false: &Tensor) -> Result<Tensor> {
    apply(WhereCond, &[condition, on_true, on_false])
}

struct WhereCond;

impl Operator for WhereCond {
    /// The condition, broadcast, and the dimensions of the two.
    type Saved = (Tensor, [Vec<usize>; 2]);

    fn op(&self) -> Op {
        Op::WhereCond
    }

    fn reads(&self, input: usize, _wanted: &[bool]) -> bool {
        input == 0
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (condition, on_true, on_false) = (&inputs[0], &inputs[1], &inputs[2]);
        if !matches!(condition.dtype(), DType::U8 | DType::U32 | DType::I64) {
            let (op, got) = (self.op().name(), condition.dtype());
            let expected = "U8, U32 or I64, as comparisons give".to_string();
            return Err(ArgumentError::DType { op, name: "condition", got, expected }.into());
        }
        check_operand(self.op(), condition, "on_true", on_true, false)?;
        check_operand(self.op(), on_true, "on_false", on_false, true)?;
        let Some(dims) = common_dims(on_true.dims(), on_false.dims()) else {
            let expected =
                format!("one that broadcasts with that of on_true, {:?}", on_true.shape());
            return shape_error(self.op(), "on_false", on_false, expected);
        };
        let Some(dims) = common_dims(condition.dims(), &dims) else {
            let expected = format!("one that broadcasts with that of the others, {dims:?}");
            return shape_error(self.op(), "condition", condition, expected);
        };
        let spread = |x: &Tensor| contiguous(&x.broadcast_as(dims.as_slice())?);
        let condition = spread(condition)?;
        let y = elementwise::where_cond(&condition, &spread(on_true)?, &spread(on_false)?)?;
        Ok((y, (condition, [on_true.dims().to_vec(), on_false.dims().to_vec()])))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (gradient, (condition, [of_true, of_false])) = (ctx.gradient, ctx.saved);
        let zeros = gradient.zeros_like()?;
        let part = |number: usize, dims: &[usize], [on_true, on_false]: [&Tensor; 2]| {
            let part = ctx.wants[number].map(|want| {
                let chosen = elementwise::where_cond(condition, on_true, on_false)?;
                summed(|out| cast(&chosen, out), dims, gradient.dims(), want)
            });
            part.transpose()
        };
        let on_true = part(1, of_true, [gradient, &zeros])?;
        Ok(vec![None, on_true, part(2, of_false, [&zeros, gradient])?])
    }
}
