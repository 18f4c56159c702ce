//! Group normalisation.

use candle_core::{Result, Tensor};

use super::check::{check_dims, check_eps, check_operand, shape_error};
use super::wants::affine_wants;
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::ArgumentError;
use crate::kernels::group_norm as kernel;

/// Normalises each group of `c / num_groups` channels of each sample by its own mean and variance,
/// then scales and shifts each channel.
///
/// # Shapes
///
/// `x (n, c, …)`, `weight (c)`, `bias (c)` → that of `x`.
///
/// # Precision
///
/// As [`layer_norm`](super::layer_norm).
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit; a number of groups that does not divide that of
/// channels; an `eps` below zero.
///
/// # References
///
/// Wu and He, [Group Normalization](https://arxiv.org/abs/1803.08494);
/// `torch.nn.functional.group_norm`.
pub fn group_norm(
    x: &Tensor,
    num_groups: usize,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    check_eps(eps)?;
    if num_groups == 0 {
        let (name, expected) = ("num_groups", "at least 1");
        return Err(ArgumentError::Setting { name, got: 0.0, expected }.into());
    }
    let op = GroupNorm { groups: num_groups, eps, weight: weight.is_some() };
    let inputs: Vec<&Tensor> = [Some(x), weight, bias].into_iter().flatten().collect();
    apply(op, &inputs)
}

struct GroupNorm {
    groups: usize,
    eps: f64,
    /// Whether the second input is the weight.
    weight: bool,
}

struct Saved {
    x: Tensor,
    weight: Option<Tensor>,
    statistics: Tensor,
}

impl Operator for GroupNorm {
    type Saved = Saved;

    fn op(&self) -> Op {
        Op::GroupNorm
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let x = &inputs[0];
        check_operand(self.op(), x, "x", x, false)?;
        let c = match *x.dims() {
            [_, c, ref rest @ ..] if c % self.groups == 0 && c > 0 && !rest.contains(&0) => c,
            _ => {
                let groups = self.groups;
                let expected = format!("(n, c, …), {groups} | c, at least one element a group");
                return shape_error(self.op(), "x", x, expected);
            }
        };
        let mut affine = inputs[1..].iter();
        let weight = if self.weight { affine.next() } else { None };
        let bias = affine.next();
        for (name, tensor) in [("weight", weight), ("bias", bias)] {
            let Some(tensor) = tensor else { continue };
            check_operand(self.op(), x, name, tensor, false)?;
            check_dims(self.op(), name, tensor, &[c])?;
        }
        let (y, statistics) = kernel::forward(x, self.groups, weight, bias, self.eps)?;
        Ok((y, Saved { x: x.clone(), weight: weight.cloned(), statistics }))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Saved { x, weight, statistics } = ctx.saved;
        let (wants, given) = affine_wants(ctx.wants, self.weight);
        let weight = weight.as_ref();
        let gradients = kernel::backward(x, ctx.gradient, self.groups, weight, statistics, wants)?;
        let gradients = gradients.into_iter().zip(given).filter(|&(_, given)| given);
        Ok(gradients.map(|(gradient, _)| gradient.map(Gradient::owned)).collect())
    }
}
