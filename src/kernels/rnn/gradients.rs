//! What backward needs of a forward pass besides the sequence, and the gradients that it gives.

use candle_core::{DType, Result, Tensor};

use super::sequence::Sequence;
use crate::kernels::gemm::gemm;
use crate::kernels::{cast, reduce};

/// What backward needs of [`gru`](super::gru()).
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    /// What goes into the gates' functions, `(b, t, 3 n)`.
    pub(super) gates: Tensor,
    /// What `r` is multiplied with, `(b, t, n)`.
    pub(super) inner: Tensor,
}

/// What the gates' gradients are, in the dtype of the arithmetic: of the products with `x` and with the
/// states, `(b t, gates n)`; and the gradient of `h0`, `(b, n)`.
#[derive(Debug)]
pub(crate) struct GateGradients {
    pub(super) of_x: Tensor,
    pub(super) of_h: Tensor,
    pub(super) h0: Tensor,
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
