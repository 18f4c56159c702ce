//! A sequence, its sizes, and the order of its steps.

use candle_core::{DType, Result, Tensor};

use crate::kernels::gemm::gemm;
use crate::kernels::{accumulator, cast};

/// A sequence, and what it is run through.
#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    /// `(b, t, in)`
    pub(crate) x: Tensor,
    /// `(b, n)`
    pub(crate) h0: Tensor,
    /// `(gates n, in)`
    pub(crate) w_ih: Tensor,
    /// `(gates n, n)`
    pub(crate) w_hh: Tensor,
    /// `(gates n)`, of any dtype
    pub(crate) b_ih: Option<Tensor>,
    /// `(gates n)`, of any dtype
    pub(crate) b_hh: Option<Tensor>,
    /// From the last step to the first.
    pub(crate) reverse: bool,
}

/// The sizes of a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub(super) batch: usize,
    pub(super) steps: usize,
    pub(super) hidden: usize,
    pub(super) reverse: bool,
}

impl Dims {
    /// The steps as they are run through.
    pub(super) fn order(self) -> impl DoubleEndedIterator<Item = usize> {
        let steps = if self.batch == 0 { 0 } else { self.steps };
        (0..steps).map(move |i| if self.reverse { steps - 1 - i } else { i })
    }

    /// The step run before.
    pub(super) fn before(self, step: usize) -> Option<usize> {
        if self.reverse {
            Some(step + 1).filter(|&before| before < self.steps)
        } else {
            step.checked_sub(1)
        }
    }
}

impl Sequence {
    pub(super) fn dims(&self) -> Result<Dims> {
        let ((batch, steps, _), (_, hidden)) = (self.x.dims3()?, self.w_hh.dims2()?);
        Ok(Dims { batch, steps, hidden, reverse: self.reverse })
    }

    /// The dtype of the arithmetic.
    pub(super) fn wide(&self) -> DType {
        accumulator(self.x.dtype())
    }

    /// `x` with batch and steps in one dimension.
    pub(super) fn rows(&self) -> Result<Tensor> {
        let (b, t, inputs) = self.x.dims3()?;
        self.x.reshape((b * t, inputs))
    }

    /// `x · w_ihᵀ + bias`, `(b t, gates n)`, in storage of its own.
    pub(super) fn project(&self, bias: Option<&Tensor>) -> Result<Tensor> {
        gemm(&self.rows()?, &self.w_ih.t()?, bias, self.wide())
    }

    /// What went into the gates, in the dtype of `x`.
    pub(super) fn save(&self, gates: Tensor) -> Result<Tensor> {
        if gates.dtype() == self.x.dtype() { Ok(gates) } else { cast(&gates, self.x.dtype()) }
    }

    /// The state every step started from, `(b t, n)`, of the states it ended in, `(b, t, n)`.
    pub(super) fn previous(&self, h: &Tensor) -> Result<Tensor> {
        let Dims { batch, steps, hidden, reverse } = self.dims()?;
        if batch * steps == 0 {
            return h.reshape((0, hidden)); // a GPU has no memory of no bytes to put parts together in
        }
        let first = self.h0.reshape((batch, 1, hidden))?;
        let states = if reverse {
            Tensor::cat(&[&h.narrow(1, 1, steps - 1)?, &first], 1)?
        } else {
            Tensor::cat(&[&first, &h.narrow(1, 0, steps - 1)?], 1)?
        };
        states.reshape((batch * steps, hidden))
    }
}
