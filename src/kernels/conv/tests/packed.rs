//! The passes by an instruction set: packed GEMM, or what is chosen instead for some shapes.

use std::cell::Cell;

use candle_core::{DType, Result, Tensor};

use crate::kernels::choice::algorithm::take;
use crate::kernels::conv::algorithm::Algorithm;
use crate::kernels::conv::shape::Shape;
use crate::kernels::conv::{dgrad_by, forward_by, wgrad_by};
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::micro::{InstructionSet, Rounded};

thread_local! {
    /// What computed the last pass in place of the algorithm that was chosen.
    static STOOD_IN: Cell<Option<&'static str>> = const { Cell::new(None) };
}

pub(super) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Tensor> {
    let pass = PassKind::Forward;
    let by = |algorithm: Algorithm| forward_by(algorithm, x, weight, bias, shape, O::DTYPE);
    run(pass, shape, isa, by)
}

/// A pass, of which [`none_gave_up`] then knows.
fn run(
    pass: PassKind,
    shape: &Shape,
    isa: InstructionSet,
    by: impl Fn(Algorithm) -> Result<Option<Tensor>>,
) -> Result<Tensor> {
    take();
    let result = Algorithm::packed(pass, shape, isa).run(pass, shape, by);
    STOOD_IN.set(take());
    result
}

/// The last pass was computed by the algorithm that was chosen: of finite numbers, none gives up.
pub(super) fn none_gave_up() {
    assert_eq!(STOOD_IN.get(), None);
}

pub(super) fn dgrad<O: Rounded>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    isa: InstructionSet,
) -> Result<Tensor> {
    let pass = PassKind::Dgrad;
    let by = |algorithm: Algorithm| dgrad_by(algorithm, grad, weight, bias, shape, O::DTYPE);
    let dx = run(pass, shape, isa, by)?;
    // Only infinite weights meet padding.
    assert!(
        !matches!(STOOD_IN.get(), Some("im2col" | "via nchw")),
        "given up by {isa:?}: {shape:?}"
    );
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
    run(pass, shape, isa, by)
}
