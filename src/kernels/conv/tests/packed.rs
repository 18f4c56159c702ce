//! The passes by an instruction set: packed GEMM, or what is chosen instead for some shapes.

use candle_core::{DType, Result, Tensor};

use crate::kernels::choice::algorithm::take;
use crate::kernels::conv::algorithm::Algorithm;
use crate::kernels::conv::shape::Shape;
use crate::kernels::conv::{dgrad_by, forward_by, wgrad_by};
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::micro::{InstructionSet, Rounded};

pub(super) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Tensor> {
    let pass = PassKind::Forward;
    let by = |algorithm: Algorithm| forward_by(algorithm, x, weight, bias, shape, O::DTYPE);
    Algorithm::packed(pass, shape, isa).run(pass, shape, by)
}

pub(super) fn dgrad<O: Rounded>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Tensor> {
    take();
    let pass = PassKind::Dgrad;
    let by = |algorithm: Algorithm| dgrad_by(algorithm, grad, weight, bias, shape, O::DTYPE);
    let dx = Algorithm::packed(pass, shape, isa).run(pass, shape, by)?;
    // Only infinite weights meet padding.
    assert!(!matches!(take(), Some("im2col" | "via nchw")), "given up by {isa:?}: {shape:?}");
    Ok(dx)
}

pub(super) fn wgrad(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Tensor> {
    let pass = PassKind::Wgrad;
    let by = |algorithm: Algorithm| wgrad_by(algorithm, x, grad, shape, DType::F32);
    Algorithm::packed(pass, shape, isa).run(pass, shape, by)
}
