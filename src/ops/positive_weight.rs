//! Binary cross entropy with weights for positive targets.

use candle_core::{DType, Result, Tensor};

use super::check::{check_dims, check_operand, shape_error};
use super::{Reduction, mean, sum};
use crate::Op;
use crate::autograd::{Backward, Gradient, Operator, apply, of_one_16_bit_dtype};
use crate::error::bail;
use crate::kernels::loss::{LossArgument, Pairwise, pairwise_backward, pairwise_forward};
use crate::kernels::{cast, contiguous};

/// The binary cross entropy of `σ(logits)` with `target`, where the part of a positive target counts `pos_weight` times.
pub(crate) fn positive_weighted(
    logits: &Tensor,
    target: &Tensor,
    pos_weight: &Tensor,
    reduction: Reduction,
) -> Result<Tensor> {
    for (name, constant) in [("target", target), ("pos_weight", pos_weight)] {
        if constant.track_op() {
            let op = PositiveWeighted.op().name();
            bail!("{op}: {name} is tracked, and gets no gradient with a pos_weight: `detach` it")
        }
    }
    let terms = apply(PositiveWeighted, &[logits, target, pos_weight])?;
    match reduction {
        Reduction::Mean => mean(&terms),
        Reduction::Sum => sum(&terms),
        Reduction::None => Ok(terms),
    }
}

/// The loss of each element, in `F32`. It is linear in the target: that of 1 times one factor, and that of 0 times
/// another.
struct PositiveWeighted;

const LOSS: Pairwise = Pairwise::BinaryCrossEntropyWithLogit;

struct Saved {
    logits: Tensor,
    /// The targets 0 and 1, in the dtype of the logits, and how much the loss of each counts.
    parts: [(Tensor, Tensor); 2],
}

impl Operator for PositiveWeighted {
    type Saved = Saved;

    fn op(&self) -> Op {
        Op::BinaryCrossEntropyWithLogit
    }

    fn widens(&self, inputs: &[DType]) -> bool {
        of_one_16_bit_dtype(inputs)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Saved)> {
        let (logits, target, pos_weight) = (&inputs[0], &inputs[1], &inputs[2]);
        check_operand(self.op(), logits, "input", logits, false)?;
        check_operand(self.op(), logits, "target", target, true)?;
        check_operand(self.op(), logits, "pos_weight", pos_weight, false)?;
        check_dims(self.op(), "target", target, logits.dims())?;
        let wide = crate::kernels::accumulator(logits.dtype());
        let target = cast(target, wide)?;
        let Ok(spread) = pos_weight.broadcast_as(logits.shape()) else {
            let expected = format!("one that broadcasts to that of input, {:?}", logits.shape());
            return shape_error(self.op(), "pos_weight", pos_weight, expected);
        };
        let positive = (&target * cast(&contiguous(&spread)?, wide)?)?;
        let parts =
            [(logits.zeros_like()?, target.affine(-1.0, 1.0)?), (logits.ones_like()?, positive)];
        let [none, all] = &parts;
        let term = |(target, factor): &(Tensor, Tensor)| {
            pairwise_forward(LOSS, Reduction::None, logits, target)? * factor
        };
        let terms = (term(none)? + term(all)?)?;
        Ok((terms, Saved { logits: logits.clone(), parts }))
    }

    fn backward(&self, ctx: &Backward<'_, Saved>) -> Result<Vec<Option<Gradient>>> {
        let Saved { logits, parts: [none, all] } = ctx.saved;
        let Some(out) = ctx.wants[0] else { return Ok(vec![None; 3]) };
        let wide = ctx.gradient.dtype();
        let part = |(target, factor): &(Tensor, Tensor)| {
            let gradient = (ctx.gradient * factor)?;
            let tensors = [logits, target, &gradient];
            pairwise_backward((LOSS, LossArgument::Input), Reduction::None, tensors, wide)
        };
        let dx = cast(&(part(none)? + part(all)?)?, out)?;
        Ok(vec![Some(Gradient::owned(dx)), None, None])
    }
}
