//! LSTM and GRU over all steps of a sequence, and back through time.
//!
//! Sequences are `(batch, steps, features)`, of one float dtype with the states and the weights. The projection of all
//! inputs is one product, each step one more, and each gradient of a parameter one over all steps. Gates are computed,
//! and cell states handed from step to step, in F32 (F64 for F64).
//!
//! In BF16, products over all steps round the gradients of the gates to it. Those of single steps round these gradients
//! and the hidden state: of every LSTM and GRU on a GPU, and of a small LSTM where the CPU multiplies BF16. Other
//! products of steps are F32; on a GPU TF32 inside, where `backend::set_allow_tf32` says so.
//!
//! Backward recomputes the gates from what went into their sigmoids and tangents, saved in the dtype of `x`: a gate
//! near 1, rounded itself, would lose its derivative, `gate (1 - gate)`.

mod cpu;
mod cuda;
mod gate;
mod gru;
mod lstm;
mod portable;
mod recurrent;
#[cfg(test)]
mod tests;

use candle_core::{DType, Result, Tensor};

use super::gemm::gemm;
use super::{cast, reduce};
use crate::kernels::accumulator;
pub(crate) use gru::{gru, gru_backward};
pub(crate) use lstm::{lstm, lstm_backward};

/// What a trace calls the steps on CUDA.
const CELL_KERNEL: &str = "cublas, cell kernel";

/// What backward needs of [`gru`].
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    /// What goes into the gates' functions, `(b, t, 3 n)`.
    gates: Tensor,
    /// What `r` is multiplied with, `(b, t, n)`.
    inner: Tensor,
}

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
struct Dims {
    batch: usize,
    steps: usize,
    hidden: usize,
    reverse: bool,
}

impl Dims {
    /// The steps as they are run through.
    fn order(self) -> impl DoubleEndedIterator<Item = usize> {
        let steps = if self.batch == 0 { 0 } else { self.steps };
        (0..steps).map(move |i| if self.reverse { steps - 1 - i } else { i })
    }

    /// The step run before.
    fn before(self, step: usize) -> Option<usize> {
        if self.reverse {
            Some(step + 1).filter(|&before| before < self.steps)
        } else {
            step.checked_sub(1)
        }
    }
}

impl Sequence {
    fn dims(&self) -> Result<Dims> {
        let ((batch, steps, _), (_, hidden)) = (self.x.dims3()?, self.w_hh.dims2()?);
        Ok(Dims { batch, steps, hidden, reverse: self.reverse })
    }

    /// The dtype of the arithmetic.
    fn wide(&self) -> DType {
        accumulator(self.x.dtype())
    }

    /// `x` with batch and steps in one dimension.
    fn rows(&self) -> Result<Tensor> {
        let (b, t, inputs) = self.x.dims3()?;
        self.x.reshape((b * t, inputs))
    }

    /// `x · w_ihᵀ + bias`, `(b t, gates n)`, in storage of its own.
    fn project(&self, bias: Option<&Tensor>) -> Result<Tensor> {
        gemm(&self.rows()?, &self.w_ih.t()?, bias, self.wide())
    }

    /// What went into the gates, in the dtype of `x`.
    fn save(&self, gates: Tensor) -> Result<Tensor> {
        if gates.dtype() == self.x.dtype() { Ok(gates) } else { cast(&gates, self.x.dtype()) }
    }

    /// The state every step started from, `(b t, n)`, of the states it ended in, `(b, t, n)`.
    fn previous(&self, h: &Tensor) -> Result<Tensor> {
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

/// What the gates' gradients are, in the dtype of the arithmetic: of the products with `x` and with the
/// states, `(b t, gates n)`; and the gradient of `h0`, `(b, n)`.
#[derive(Debug)]
pub(crate) struct GateGradients {
    of_x: Tensor,
    of_h: Tensor,
    h0: Tensor,
}

/// The dtypes that the gradients of a sequence are wanted in, by the names of its fields.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Wants {
    pub(crate) x: Option<DType>,
    pub(crate) h0: Option<DType>,
    pub(crate) w_ih: Option<DType>,
    pub(crate) w_hh: Option<DType>,
    pub(crate) b_ih: Option<DType>,
    pub(crate) b_hh: Option<DType>,
}

/// The gradients of a [`Sequence`], by the names of its fields.
#[derive(Debug)]
pub(crate) struct Gradients {
    pub(crate) x: Option<Tensor>,
    pub(crate) h0: Option<Tensor>,
    pub(crate) w_ih: Option<Tensor>,
    pub(crate) w_hh: Option<Tensor>,
    pub(crate) b_ih: Option<Tensor>,
    pub(crate) b_hh: Option<Tensor>,
}

impl GateGradients {
    /// The gradients wanted, each over all steps at once; `h` are the states the steps ended in.
    pub(crate) fn gradients(&self, of: &Sequence, h: &Tensor, wants: Wants) -> Result<Gradients> {
        // As what flows back into any product of BF16.
        let rounded = |gate_gradients: &Tensor| match of.x.dtype() {
            DType::BF16 => cast(gate_gradients, DType::BF16),
            _ => Ok(gate_gradients.clone()),
        };
        let of_x = rounded(&self.of_x)?;
        let same = self.of_x.id() == self.of_h.id();
        let of_h = if same { of_x.clone() } else { rounded(&self.of_h)? };
        let x =
            wants.x.map(|want| gemm(&of_x, &of.w_ih.detach(), None, want)?.reshape(of.x.shape()));
        let w_ih = wants.w_ih.map(|want| gemm(&of_x.t()?, &of.rows()?, None, want));
        let w_hh = wants.w_hh.map(|want| gemm(&of_h.t()?, &of.previous(h)?, None, want));
        let bias = |gate_gradients, want| reduce::sum_to_channel(gate_gradients, 1, want);
        Ok(Gradients {
            x: x.transpose()?,
            h0: wants.h0.map(|want| self.h0.to_dtype(want)).transpose()?,
            w_ih: w_ih.transpose()?,
            w_hh: w_hh.transpose()?,
            b_ih: wants.b_ih.map(|want| bias(&self.of_x, want)).transpose()?,
            b_hh: wants.b_hh.map(|want| bias(&self.of_h, want)).transpose()?,
        })
    }
}
