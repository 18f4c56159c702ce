//! Which inputs a gradient is wanted of, and what backward then reads.

use candle_core::{DType, Result, Tensor};

/// What backward of a product reads: an operand, where the gradient of the other one is wanted, and no bias.
pub(super) fn reads_other_operand(input: usize, wanted: &[bool]) -> bool {
    input < 2 && wanted.get(1 - input).is_some_and(|&wanted| wanted)
}

/// Puts a tensor of its shape, without elements of its own, in the place of operand `input` if backward does not read
/// it.
pub(super) fn trim_operand(operand: &mut Tensor, input: usize, wanted: &[bool]) -> Result<()> {
    if !reads_other_operand(input, wanted) {
        let zero = Tensor::zeros((), operand.dtype(), operand.device())?;
        *operand = zero.broadcast_as(operand.shape())?;
    }
    Ok(())
}

/// What is wanted of `x`, weight and bias, and which of them there are, where a norm's inputs are
/// `x` and those of the others that there are.
pub(super) fn affine_wants(
    wants: &[Option<DType>],
    weight: bool,
) -> ([Option<DType>; 3], [bool; 3]) {
    let bias = 1 + usize::from(weight);
    let given = [true, weight, wants.len() > bias];
    let dbias = wants.get(bias).copied().flatten();
    ([wants[0], wants[1..bias].first().copied().flatten(), dbias], given)
}
