//! Pointwise operators, functions of one number, by the table in `kernels/activation/table.rs`; and gated ones.

use std::cmp::Reverse;

use candle_core::{D, Result, Tensor};

use super::check::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply, share_storage};
use crate::kernels::activation::table::pointwise;
use crate::kernels::activation::{self, Pointwise, prelu};

/// What the documentation says of dtypes, by the crate's own rule.
macro_rules! precision {
    (Full) => {
        "Under autocast `F32` in and out; outside, the dtype of `x`, computed in `F32` and rounded once. The \
         gradient likewise, from `x` as it was."
    };
    ($rule:ident) => {
        "The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from `x` as it was."
    };
}

macro_rules! functions {
    ([] $(
        $(#[$doc:meta])* $name:ident => $variant:ident (
            $($parameter:ident: $type:ty = $sample:literal),*
        ), { rule: $rule:ident, pytorch: $pytorch:ident, reason: $reason:literal }, {
            torch: $torch:literal, reference: $reference:literal,
            inputs: $low:literal, $high:literal;
            example: $x:literal, $y:literal;
            value: [$($value:expr),*];
            derivative: [$($derivative:expr),*];
        }, $arithmetic:tt;
    )*) => { $(
        $(#[$doc])*
        ///
        /// The result has the strides of `x`; it is contiguous where `x` has gaps or repeats elements.
        ///
        /// # Precision
        ///
        #[doc = precision!($rule)]
        ///
        #[doc = concat!("| `x`", $(", `", stringify!($parameter), "` = ", stringify!($sample),)* " | -∞ | 0 | ∞ | NaN |")]
        /// |---|---|---|---|---|
        #[doc = concat!("| value |", $(" `", stringify!($value), "` |"),*)]
        #[doc = concat!("| derivative |", $(" `", stringify!($derivative), "` |"),*)]
        ///
        /// # Examples
        ///
        /// ```
        /// use candle_amp::ops;
        /// use candle_core::{Device, Tensor};
        ///
        #[doc = concat!("let x = Tensor::new(", stringify!($x), "f32, &Device::Cpu)?;")]
        #[doc = concat!("let y = ops::", stringify!($name), "(&x", $(", ", stringify!($sample),)* ")?;")]
        #[doc = concat!("assert!((y.to_scalar::<f32>()? - (", stringify!($y), ")).abs() < 1e-6);")]
        /// # Ok::<(), candle_core::Error>(())
        /// ```
        ///
        /// # References
        ///
        #[doc = concat!($reference, ".")]
        pub fn $name(x: &Tensor, $($parameter: $type),*) -> Result<Tensor> {
            let function = Pointwise::$variant { $($parameter: f64::from($parameter)),* };
            in_order_of_memory(x, &|x| apply(Function { op: Op::$variant, function }, &[x]))
        }
    )* };
}
pointwise!(functions []);

/// `f`, which is pointwise, of `x` in the order of its memory: the result has the strides of `x`, and no element is moved.
/// Of what has gaps or repeats elements, `f` makes a copy.
pub(super) fn in_order_of_memory(
    x: &Tensor,
    f: &dyn Fn(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if x.is_contiguous() {
        return f(x);
    }
    let mut order: Vec<usize> = (0..x.rank()).collect();
    order.sort_by_key(|&dim| Reverse(x.stride()[dim]));
    let ordered = x.permute(&*order)?;
    if !ordered.is_contiguous() {
        return f(x);
    }
    let mut back = order.clone();
    order.iter().enumerate().for_each(|(place, &dim)| back[dim] = place);
    f(&ordered)?.permute(back)
}

struct Function {
    op: Op,
    function: Pointwise,
}

impl Function {
    /// The derivative, where it is the same everywhere: backward then needs no input.
    fn constant_derivative(&self) -> Option<f64> {
        match self.function {
            Pointwise::Neg {} => Some(-1.0),
            Pointwise::Affine { mul, .. } => Some(mul),
            _ => None,
        }
    }
}

enum Saved {
    Input(Tensor),
    Derivative(f64),
}

impl Operator for Function {
    type Saved = Saved;

    fn op(&self) -> Op {
        self.op
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        self.constant_derivative().is_none()
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let x = &inputs[0];
        check_operand(self.op, x, "x", x, false)?;
        let constant = self.constant_derivative().map(Saved::Derivative);
        let saved = constant.unwrap_or_else(|| Saved::Input(x.clone()));
        Ok((activation::value(self.function, x)?, saved))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let dx = match ctx.saved {
            Saved::Derivative(mul) => {
                activation::value(Pointwise::Affine { mul: *mul, add: 0.0 }, ctx.gradient)
            }
            // Somebody else's operator may have given what this one saved for a gradient of its own.
            Saved::Input(x) if ctx.owns_gradient && !share_storage(ctx.gradient, x) => {
                activation::derivative_assign(self.function, ctx.gradient.clone(), x)
            }
            Saved::Input(x) => activation::derivative(self.function, x, ctx.gradient),
        };
        Ok(vec![Some(Gradient::owned(dx?))])
    }
}

/// `silu(a) b`, where `a` and `b` are the halves of the last dimension of `x`.
///
/// # Shapes
///
/// `x (…, 2 n)` → `(…, n)`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once.
///
/// # Errors
///
/// A last dimension that has no halves.
///
/// # References
///
/// Shazeer, [GLU Variants Improve Transformer](https://arxiv.org/abs/2002.05202);
/// `candle_nn::ops::swiglu`.
pub fn swiglu(x: &Tensor) -> Result<Tensor> {
    apply(Swiglu, &[x])
}

struct Swiglu;

impl Operator for Swiglu {
    /// The input.
    type Saved = Tensor;

    fn op(&self) -> Op {
        Op::Swiglu
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        if x.rank() == 0 || x.dim(D::Minus1)? % 2 != 0 {
            return shape_error(self.op(), "x", x, "an even last dimension".into());
        }
        Ok((activation::swiglu(x)?, x.clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Tensor>) -> Result<Vec<Option<Gradient>>> {
        let dx = activation::swiglu_backward(ctx.saved, ctx.gradient)?;
        Ok(vec![Some(Gradient::owned(dx))])
    }
}

/// `x` above 0, `weight x` below.
///
/// # Shapes
///
/// `x (n, c, …)`, `weight (c)`; or any `x` and a `weight` of one element → that of `x`.
///
/// # Precision
///
/// Under autocast both are cast to the compute dtype, as in PyTorch; outside, `weight` may have any
/// floating-point dtype. Computed in `F32`, rounded once; the gradient of `weight` is summed in
/// `F32`.
///
/// # Errors
///
/// A `weight` that has neither one element nor one per channel.
///
/// # References
///
/// `torch.nn.functional.prelu`.
pub fn prelu(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    apply(Prelu, &[x, weight])
}

struct Prelu;

impl Operator for Prelu {
    /// Both inputs.
    type Saved = (Tensor, Tensor);

    fn op(&self) -> Op {
        Op::Prelu
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        check_operand(self.op(), x, "x", x, false)?;
        check_operand(self.op(), x, "weight", weight, false)?;
        let count = weight.elem_count();
        if count != 1 && x.dims().get(1) != Some(&count) {
            let expected = format!("one element, or one a channel of x, {:?}", x.shape());
            return shape_error(self.op(), "weight", weight, expected);
        }
        Ok((prelu::prelu(x, weight)?, (x.clone(), weight.clone())))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let (x, weight) = ctx.saved;
        let dx = ctx.wants[0].map(|_| prelu::input_gradient(x, weight, ctx.gradient));
        let dweight = ctx.wants[1].map(|out| {
            let sums = prelu::weight_gradient(x, ctx.gradient, weight.elem_count(), out)?;
            sums.reshape(weight.shape())
        });
        Ok(vec![dx.transpose()?.map(Gradient::owned), dweight.transpose()?.map(Gradient::owned)])
    }
}
