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
mod gradients;
mod gru;
mod lstm;
mod packed;
mod portable;
mod recurrent;
mod sequence;
#[cfg(test)]
mod tests;

pub(crate) use gradients::{Gradients, Saved, Wants};
pub(crate) use gru::{gru, gru_backward};
pub(crate) use lstm::{lstm, lstm_backward};
pub(crate) use sequence::Sequence;
