//! Activations: functions of one number.

use candle_core::{D, Result, Tensor};

use super::{check_operand, shape_error};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply, share_storage};
use crate::kernels::activation::{self, Curve, prelu};

/// `x Φ(x)`, where `Φ` is the normal distribution, by the approximation
/// `x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.gelu` with `approximate="tanh"`; `candle_core::Tensor::gelu`.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Gelu, curve: Curve::Gelu }, &[x])
}

/// `x Φ(x)`, where `Φ` is the normal distribution.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.gelu`; `candle_core::Tensor::gelu_erf`.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::GeluErf, curve: Curve::GeluErf }, &[x])
}

/// `x σ(x)`, where `σ(x) = 1 / (1 + exp(-x))`; also known as swish.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.silu`.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Silu, curve: Curve::Silu }, &[x])
}

/// `1 / (1 + exp(-x))`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.sigmoid`.
pub fn sigmoid(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Sigmoid, curve: Curve::Sigmoid }, &[x])
}

/// The hyperbolic tangent.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.tanh`.
pub fn tanh(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Tanh, curve: Curve::Tanh }, &[x])
}

/// `min(max(x, 0), 6)`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.relu6`.
pub fn relu6(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Relu6, curve: Curve::Relu6 }, &[x])
}

/// `max(x, 0)²`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// So et al., [Primer](https://arxiv.org/abs/2109.08668).
pub fn relu2(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Relu2, curve: Curve::Relu2 }, &[x])
}

/// `min(max(x / 6 + 1/2, 0), 1)`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.hardsigmoid`.
pub fn hard_sigmoid(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::HardSigmoid, curve: Curve::HardSigmoid }, &[x])
}

/// `x hard_sigmoid(x)`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.hardswish`.
pub fn hard_swish(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::HardSwish, curve: Curve::HardSwish }, &[x])
}

/// `x tanh(softplus(x))`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.mish`.
pub fn mish(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Mish, curve: Curve::Mish }, &[x])
}

/// `ln(1 + exp(x))`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.softplus`.
pub fn softplus(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Softplus, curve: Curve::Softplus }, &[x])
}

/// `x` above 0, `alpha (exp(x) - 1)` below.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.elu`.
pub fn elu(x: &Tensor, alpha: f64) -> Result<Tensor> {
    apply(Activation { op: Op::Elu, curve: Curve::Elu { alpha, scale: 1.0 } }, &[x])
}

/// `gamma` times [`elu`] with `alpha`.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// Klambauer et al., [Self-Normalizing Neural Networks](https://arxiv.org/abs/1706.02515), has
/// `alpha` 1.6732632423543772 and `gamma` 1.0507009873554805; `torch.nn.functional.selu`.
pub fn selu(x: &Tensor, alpha: f32, gamma: f32) -> Result<Tensor> {
    let curve = Curve::Elu { alpha: alpha.into(), scale: gamma.into() };
    apply(Activation { op: Op::Elu, curve }, &[x])
}

/// `x` above 0, `negative_slope x` below.
///
/// # Precision
///
/// The dtype of `x` in and out, computed in `F32` and rounded once; the gradient likewise, from
/// `x` as it was.
///
/// # References
///
/// `torch.nn.functional.leaky_relu`.
pub fn leaky_relu(x: &Tensor, negative_slope: f64) -> Result<Tensor> {
    let curve = Curve::LeakyRelu { slope: negative_slope };
    apply(Activation { op: Op::LeakyRelu, curve }, &[x])
}

/// `exp(x)`.
///
/// # Precision
///
/// Under autocast `F32` in and out; outside, the dtype of `x`, computed in `F32` and rounded once.
///
/// # References
///
/// `torch.exp`.
pub fn exp(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Exp, curve: Curve::Exp }, &[x])
}

/// The natural logarithm.
///
/// # Precision
///
/// As [`exp`].
///
/// # References
///
/// `torch.log`.
pub fn log(x: &Tensor) -> Result<Tensor> {
    apply(Activation { op: Op::Log, curve: Curve::Log }, &[x])
}

struct Activation {
    op: Op,
    curve: Curve,
}

impl Operator for Activation {
    /// The input.
    type Saved = Tensor;

    fn op(&self) -> Op {
        self.op
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
        let x = &inputs[0];
        check_operand(self.op, x, "x", x, false)?;
        Ok((activation::value(self.curve, x)?, x.clone()))
    }

    fn backward(&self, ctx: &Backward<'_, Tensor>) -> Result<Vec<Option<Gradient>>> {
        // Somebody else's operator may have given what this one saved for a gradient of its own.
        let dx = match ctx.owns_gradient && !share_storage(ctx.gradient, ctx.saved) {
            true => activation::slope_assign(self.curve, ctx.gradient.clone(), ctx.saved),
            false => activation::slope(self.curve, ctx.saved, ctx.gradient),
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
/// A `weight` that has neither one element nor one a channel.
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
