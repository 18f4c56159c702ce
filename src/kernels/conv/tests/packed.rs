//! The passes by an instruction set: packed GEMM, or what is chosen instead for some shapes.

use std::cell::Cell;

use candle_core::{DType, Result, Tensor};

use crate::kernels::choice::algorithm::take;
use crate::kernels::conv::algorithm::{Algorithm, are_half};
use crate::kernels::conv::shape::Shape;
use crate::kernels::conv::{dgrad_by, forward_by, wgrad_by};
use crate::kernels::cuda::PassKind;
use crate::kernels::gemm::micro::{InstructionSet, Rounded};

thread_local! {
    /// What computed the last pass in place of the algorithm that was chosen.
    static STOOD_IN: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// The instruction set, and what passes over 16-bit operands are computed by.
#[derive(Clone, Copy)]
pub(super) struct Choice {
    isa: InstructionSet,
    /// Whether they may be computed by large tiles.
    large: bool,
}

impl From<InstructionSet> for Choice {
    fn from(isa: InstructionSet) -> Self {
        Self { isa, large: true }
    }
}

impl Choice {
    /// As passes over F32 are, whatever the dtype.
    pub(super) fn of_single(isa: InstructionSet) -> Self {
        Self { isa, large: false }
    }
}

pub(super) fn forward<O: Rounded>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    by: impl Into<Choice>,
) -> Result<Tensor> {
    run(PassKind::Forward, [x, weight], shape, by.into(), |algorithm| {
        forward_by(algorithm, x, weight, bias, shape, O::DTYPE)
    })
}

/// A pass, of which [`none_gave_up`] then knows.
fn run(
    pass: PassKind,
    operands: [&Tensor; 2],
    shape: &Shape,
    Choice { isa, large }: Choice,
    by: impl Fn(Algorithm) -> Result<Option<Tensor>>,
) -> Result<Tensor> {
    take();
    let half = large && are_half(operands);
    let result = Algorithm::packed(pass, shape, isa, half).run(pass, shape, by);
    STOOD_IN.set(take());
    result
}

/// The last pass was computed by the algorithm that was chosen: of finite numbers, none gives up.
pub(super) fn none_gave_up() {
    assert_eq!(STOOD_IN.get(), None);
}

/// Whether another algorithm computed the last pass.
pub(super) fn gave_up() -> bool {
    STOOD_IN.get().is_some()
}

pub(super) fn dgrad<O: Rounded>(
    grad: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &Shape,
    by: impl Into<Choice>,
) -> Result<Tensor> {
    let by = by.into();
    let dx = run(PassKind::Dgrad, [grad, weight], shape, by, |algorithm| {
        dgrad_by(algorithm, grad, weight, bias, shape, O::DTYPE)
    })?;
    // Only infinite weights meet padding.
    assert!(
        !matches!(STOOD_IN.get(), Some("im2col" | "via nchw")),
        "given up by {:?}: {shape:?}",
        by.isa
    );
    Ok(dx)
}

pub(super) fn wgrad(
    x: &Tensor,
    grad: &Tensor,
    shape: &Shape,
    by: impl Into<Choice>,
) -> Result<Tensor> {
    run(PassKind::Wgrad, [x, grad], shape, by.into(), |algorithm| {
        wgrad_by(algorithm, x, grad, shape, DType::F32)
    })
}
