//! Operators on elements, and reshaping.

use candle_core::{DType, Result, Tensor};

use super::activation::in_order_of_memory;
use super::check::{check_dims, check_operand};
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::{contiguous, elementwise};
use crate::{Op, autocast, random};

/// `max(x, 0)`; NaN stays NaN.
///
/// # Shapes
///
/// `x` of any shape → the same. The result has the strides of `x`; it is contiguous where `x` has gaps or repeats elements.
///
/// # Precision
///
/// The dtype of `x` in and out; nothing is rounded. The gradient is 0 where `x <= 0`; where `x` is NaN it is
/// passed on.
///
/// # References
///
/// `torch.relu`.
pub fn relu(x: &Tensor) -> Result<Tensor> {
    in_order_of_memory(x, &|x| apply(Relu, &[x]))
}

struct Relu;

impl Operator for Relu {
    type Saved = ();
    const KEEPS_OUTPUT: bool = true;

    fn op(&self) -> Op {
        Op::Relu
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        check_operand(self.op(), &inputs[0], "x", &inputs[0], false)?;
        Ok((elementwise::relu(&inputs[0])?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        Ok(vec![Some(Gradient::owned(relu_backward(ctx)?))])
    }
}

/// The gradient before the relu that an operator ends in: in the place of that after it, where it may be.
pub(super) fn relu_backward<S>(ctx: &Backward<'_, S>) -> Result<Tensor> {
    let y = ctx.kept_output()?;
    match ctx.owns_gradient {
        true => elementwise::relu_backward_assign(ctx.gradient.clone(), y),
        false => elementwise::relu_backward(y, ctx.gradient),
    }
}

/// `max(a + b, 0)`: how a residual block ends, in one pass.
///
/// # Shapes
///
/// Two of one shape → the same. Nothing is broadcast.
///
/// # Precision
///
/// As [`add`](super::add), and rounded once. The gradient is 0 where the sum is not above 0; where it is NaN the
/// gradient is passed on, as that of [`relu`].
///
/// # Errors
///
/// Shapes, dtypes or devices that differ.
///
/// # References
///
/// `torch.nn.functional.relu(a + b)`.
pub fn add_relu(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    apply(AddRelu, &[a, b])
}

struct AddRelu;

impl Operator for AddRelu {
    type Saved = ();
    const KEEPS_OUTPUT: bool = true;

    fn op(&self) -> Op {
        Op::AddRelu
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        let (a, b) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), a, "a", a, false)?;
        check_operand(self.op(), a, "b", b, true)?;
        check_dims(self.op(), "b", b, a.dims())?;
        Ok((elementwise::add_relu(&inputs[0], &inputs[1])?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let gradient = Gradient::shared(relu_backward(ctx)?);
        Ok(vec![Some(gradient.clone()), Some(gradient)])
    }
}

/// `x` with each element dropped with probability `p`, and the rest divided by `1 - p`. Always, also under
/// [`no_grad`](crate::no_grad): call it in training alone, or use [`nn::Dropout`](crate::nn::Dropout).
///
/// # Shapes
///
/// `x` of any shape → the same.
///
/// # Random numbers
///
/// Which are dropped is drawn from the crate's generator, [`random`](crate::random). With a `p` of 0 nothing is drawn,
/// and the result is `x` itself, unless the policy casts it.
///
/// # Precision
///
/// Scaled in `F32`, rounded once to the dtype of `x`. A dropped element is exactly 0, whatever it
/// was.
///
/// # Errors
///
/// A `p` below 0 or above 1.
///
/// # References
///
/// `torch.nn.functional.dropout`.
pub fn dropout(x: &Tensor, p: f32) -> Result<Tensor> {
    if !(0.0..=1.0).contains(&p) {
        let expected = "a probability, from 0 to 1";
        return Err(ArgumentError::Setting { name: "p", got: p.into(), expected }.into());
    }
    let mask = if p == 0.0 {
        check_operand(Op::Dropout, x, "x", x, false)?;
        let cast = autocast::target(Op::Dropout, std::iter::once(x.dtype()))?;
        if cast.is_none_or(|dtype| dtype == x.dtype()) {
            return Ok(x.clone());
        }
        Tensor::ones(x.shape(), DType::U8, x.device())?
    } else {
        random::keep_mask(x.shape(), 1.0 - f64::from(p), x.device())?
    };
    let scale = if p < 1.0 { 1.0 / (1.0 - f64::from(p)) } else { 0.0 };
    apply(Dropout { mask, scale }, &[x])
}

struct Dropout {
    mask: Tensor,
    scale: f64,
}

impl Operator for Dropout {
    type Saved = ();

    fn op(&self) -> Op {
        Op::Dropout
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        check_operand(self.op(), &inputs[0], "x", &inputs[0], false)?;
        Ok((elementwise::dropout(&inputs[0], &self.mask, self.scale)?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let dx = elementwise::dropout(ctx.gradient, &self.mask, self.scale)?;
        Ok(vec![Some(Gradient::owned(dx))])
    }
}

/// All dimensions but the first as one.
///
/// # Shapes
///
/// `x (n, …)` → `(n, product of the rest)`. One dimension stays as it is, and none becomes one of 1.
///
/// # Precision
///
/// The dtype of `x` in and out. A tracked `x` is copied, so that its gradient need not travel
/// candle's edges.
///
/// # References
///
/// `torch.flatten` with `start_dim=1`.
pub fn flatten(x: &Tensor) -> Result<Tensor> {
    apply(Flatten, &[x])
}

struct Flatten;

impl Operator for Flatten {
    /// The dimensions of the input.
    type Saved = Vec<usize>;

    fn op(&self) -> Op {
        Op::Flatten
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Vec<usize>)> {
        // candle copies a strided tensor element by element.
        let x = &contiguous(&inputs[0])?;
        let y = if x.rank() > 1 { x.flatten_from(1)? } else { x.reshape(x.elem_count())? };
        Ok((y, x.dims().to_vec()))
    }

    fn backward(&self, ctx: &Backward<'_, Vec<usize>>) -> Result<Vec<Option<Gradient>>> {
        let dx = ctx.gradient.reshape(ctx.saved.as_slice())?;
        Ok(vec![Some(Gradient::shared(dx))])
    }
}
