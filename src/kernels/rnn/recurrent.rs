//! The recurrent products of LSTM and GRU, `states × weight` once a step, by a weight that is prepared once.
//!
//! A step needs the result of the one before, so its product is small, and every step reads the whole weight. There are
//! two ways to multiply, forward and backward:
//!
//! - [`WidenedWeight`]: the weight in F32 (F64 for F64), multiplied as any matrix. All threads share each step.
//! - [`super::packed`], for an LSTM of at most 512 units: the weight is packed once, where a product would pack it at
//!   every step. A thread takes some rows of the batch through all steps, so threads do not meet at every step; but
//!   where an F32 batch has too few rows for that, threads share the columns of each step.
//!
//! Sums are F32 (F64 for F64) both ways, and are not rounded: they go into or onto states and gates of that type.

use candle_core::{Result, Tensor};

use super::cpu::widened;
use super::gate::Gate;
use super::sequence::Dims;
use crate::kernels::gemm::{Matrix, Threads, product};

/// Multiplies rows by a weight, step by step.
pub(super) trait Recurrent<A>: Send + Sync {
    /// How many rows of a batch, one at least, go through all steps together; those of others go beside them, on other
    /// threads.
    fn rows(&self) -> usize;

    /// `dst = states × weight`, or `+=`: rows of `dst` lie `row_stride` elements apart.
    fn multiply(&self, states: Matrix<'_, A>, dst: &mut [A], row_stride: usize, accumulate: bool);
}

/// A weight in the type of the arithmetic. All threads share the product of a step.
pub(super) struct WidenedWeight<A> {
    weight: Vec<A>,
    columns: usize,
    rows: usize,
}

impl<A: Gate> WidenedWeight<A> {
    /// Of a weight `(n, columns)`.
    pub(super) fn of(weight: &Tensor, dims: Dims) -> Result<Self> {
        let rows = dims.batch.max(1);
        Ok(Self { weight: widened(weight)?, columns: weight.dim(1)?, rows })
    }
}

impl<A: Gate> Recurrent<A> for WidenedWeight<A> {
    fn rows(&self) -> usize {
        self.rows
    }

    fn multiply(&self, states: Matrix<'_, A>, dst: &mut [A], row_stride: usize, accumulate: bool) {
        let weight = Matrix::new(&self.weight, states.cols, self.columns);
        product(states, weight, dst, row_stride, accumulate, Threads::All);
    }
}

/// `dst += state × weight` of one step: `dst` holds all `gates` of all steps, `(b, t, gates)`, and
/// `weight` is `(n, gates)`.
pub(super) fn add_recurrent<A: Gate>(
    state: &[A],
    weight: &dyn Recurrent<A>,
    (dst, gates): (&mut [A], usize),
    step: usize,
    dims: Dims,
) {
    let state = Matrix::new(state, dims.batch, dims.hidden);
    weight.multiply(state, &mut dst[step * gates..], dims.steps * gates, true);
}

/// `dst (b, n) = gate_gradients × weight` of one step, or `+=`: `gate_gradients` holds those of all `gates` of all
/// steps, `(b, t, gates)`, and `weight` is `(gates, n)`.
pub(super) fn recurrent_gradient<A: Gate>(
    (gate_gradients, gates): (&[A], usize),
    weight: &dyn Recurrent<A>,
    dst: &mut [A],
    step: usize,
    accumulate: bool,
    dims: Dims,
) {
    let gate_gradients = Matrix {
        data: &gate_gradients[step * gates..],
        rows: dims.batch,
        cols: gates,
        row_stride: dims.steps * gates,
        col_stride: 1,
    };
    weight.multiply(gate_gradients, dst, dims.hidden, accumulate);
}
