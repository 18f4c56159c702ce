//! Recurrent networks: each one operator over all steps.

use candle_core::{Result, Tensor};
use candle_nn::rnn::Direction;

use super::check::{check_dims, check_operand, shape_error};
use crate::autograd::{Backward, Gradient, Operator, apply};
use crate::error::bail;
use crate::kernels;
use crate::kernels::rnn::{self, Gradients, Sequence, Wants};
use crate::{Cast, Op};

/// The weights of an [`lstm`] or a [`gru`], of 4 or 3 gates: with `n` hidden units.
#[derive(Clone, Copy, Debug)]
pub struct RecurrentWeights<'a> {
    /// Of the input, `(gates n, in)`.
    pub w_ih: &'a Tensor,
    /// Of the state, `(gates n, n)`.
    pub w_hh: &'a Tensor,
    /// The bias beside `w_ih`, `(gates n)`.
    pub b_ih: Option<&'a Tensor>,
    /// The bias beside `w_hh`, `(gates n)`.
    pub b_hh: Option<&'a Tensor>,
    /// Whether the first step or the last is run first.
    pub direction: Direction,
}

/// A long short-term memory over the steps of `x`: the hidden and the cell states after each.
///
/// # Shapes
///
/// `x (b, t, in)`, `h0` and `c0 (b, n)`; weights in the order of the gates input, forget, cell,
/// output → two `(b, t, n)`, step by step as `x`. Backward, the last state is that of step 0.
///
/// # Precision
///
/// Under autocast all are cast to the compute dtype. Outside, all but the biases share a dtype. Gates and the cell
/// states handed from step to step are `F32`, and so are the states of [`gru`]; the results are rounded once, to the
/// dtype of `x`. Sums of products are `F32`; on a GPU `F32` products are `TF32` inside, where
/// [`crate::backend::set_allow_tf32`] says so. In `BF16`, the products that give the gradients of `x` and of the
/// weights round the gradients of the gates to it. On a CPU that multiplies `BF16`, the products of steps of up to 512
/// units round too; on a GPU, of any size. Forward they round the hidden state, as PyTorch does; backward the gradients
/// of the gates. What goes into the gates is saved in the dtype of `x`, and the gates are computed again by backward,
/// because a rounded gate near 1 has lost its derivative. Gradients run back through time in `F32`. Those of weights
/// are accumulated in `F32` over all steps of the batch. Those of biases are summed in `F32` within a block of steps,
/// and in `F64` over the blocks. Both have one order for any number of threads.
///
/// # Errors
///
/// Shapes, dtypes or devices that do not fit.
///
/// # References
///
/// `torch.nn.LSTM`, one layer, batch first; `torch.nn.LSTMCell`.
pub fn lstm(
    x: &Tensor,
    h0: &Tensor,
    c0: &Tensor,
    weights: RecurrentWeights<'_>,
) -> Result<(Tensor, Tensor)> {
    let states = run(Op::Lstm, x, &[h0, c0], weights)?;
    Ok((
        apply(SelectState { number: 0 }, &[&states])?,
        apply(SelectState { number: 1 }, &[&states])?,
    ))
}

/// Gated recurrent units over the steps of `x`: the states after each.
///
/// # Shapes
///
/// `x (b, t, in)`, `h0 (b, n)`; weights in the order of the gates reset, update, new →
/// `(b, t, n)`, step by step as `x`. Backward, the last state is that of step 0.
///
/// # Precision
///
/// As [`lstm`]; but on a CPU the products of steps never round to `BF16`.
///
/// # Errors
///
/// As [`lstm`].
///
/// # References
///
/// `torch.nn.GRU`, one layer, batch first; `torch.nn.GRUCell`.
pub fn gru(x: &Tensor, h0: &Tensor, weights: RecurrentWeights<'_>) -> Result<Tensor> {
    run(Op::Gru, x, &[h0], weights)
}

fn run(op: Op, x: &Tensor, states: &[&Tensor], weights: RecurrentWeights<'_>) -> Result<Tensor> {
    let RecurrentWeights { w_ih, w_hh, b_ih, b_hh, direction } = weights;
    let settings = RnnSettings {
        op,
        b_ih: b_ih.is_some(),
        b_hh: b_hh.is_some(),
        reverse: matches!(direction, Direction::Backward),
    };
    let inputs: Vec<&Tensor> =
        [x, w_ih, w_hh].into_iter().chain(b_ih).chain(b_hh).chain(states.iter().copied()).collect();
    match op {
        Op::Lstm => apply(Lstm(settings), &inputs),
        _ => apply(Gru(settings), &inputs),
    }
}

/// What the inputs of an operator are: `x`, `w_ih`, `w_hh`, the biases there are, the states.
#[derive(Clone, Copy)]
struct RnnSettings {
    op: Op,
    b_ih: bool,
    b_hh: bool,
    reverse: bool,
}

/// Something about each input, by its name.
struct Operands<T> {
    x: T,
    w_ih: T,
    w_hh: T,
    b_ih: Option<T>,
    b_hh: Option<T>,
    h0: T,
    c0: Option<T>,
}

impl RnnSettings {
    /// Names one item for each input.
    fn split<T: Clone>(&self, items: &[T]) -> Result<Operands<T>> {
        let mut items = items.iter().cloned();
        let mut next = || {
            let missing = || candle_core::Error::Msg("an operator was given too few inputs".into());
            items.next().ok_or_else(missing)
        };
        let (x, w_ih, w_hh) = (next()?, next()?, next()?);
        let b_ih = if self.b_ih { Some(next()?) } else { None };
        let b_hh = if self.b_hh { Some(next()?) } else { None };
        Ok(Operands { x, w_ih, w_hh, b_ih, b_hh, h0: next()?, c0: items.next() })
    }

    /// The sequence, and `c0` of an LSTM, checked.
    fn sequence(&self, inputs: &[Tensor]) -> Result<(Sequence, Option<Tensor>)> {
        let Operands { x, w_ih, w_hh, b_ih, b_hh, h0, c0 } = self.split(inputs)?;
        let (op, gates) = (self.op, if self.op == Op::Lstm { 4 } else { 3 });
        check_operand(op, &x, "x", &x, false)?;
        let same = [("h0", Some(&h0)), ("c0", c0.as_ref())];
        for (name, operand) in
            [("w_ih", Some(&w_ih)), ("w_hh", Some(&w_hh))].into_iter().chain(same)
        {
            operand.map(|operand| check_operand(op, &x, name, operand, true)).transpose()?;
        }
        let &[b, _, inputs] = x.dims() else {
            return shape_error(op, "x", &x, "(b, t, in)".into());
        };
        let n = match *w_hh.dims() {
            [rows, n] if n > 0 && rows == gates * n => n,
            _ => return shape_error(op, "w_hh", &w_hh, format!("({gates} n, n)")),
        };
        check_dims(op, "w_ih", &w_ih, &[gates * n, inputs])?;
        for (name, bias) in [("b_ih", &b_ih), ("b_hh", &b_hh)] {
            if let Some(bias) = bias {
                check_operand(op, &x, name, bias, false)?;
                check_dims(op, name, bias, &[gates * n])?;
            }
        }
        for (name, state) in same {
            state.map(|state| check_dims(op, name, state, &[b, n])).transpose()?;
        }
        Ok((Sequence { x, h0, w_ih, w_hh, b_ih, b_hh, reverse: self.reverse }, c0))
    }

    fn wants<S>(&self, ctx: &Backward<'_, S>) -> Result<Wants> {
        let Operands { x, w_ih, w_hh, b_ih, b_hh, h0, .. } = self.split(ctx.wants)?;
        let (b_ih, b_hh) = (b_ih.flatten(), b_hh.flatten());
        Ok(Wants { x, h0, w_ih, w_hh, b_ih, b_hh })
    }

    /// The gradients in the order of the inputs.
    fn in_order(&self, gradients: Gradients) -> Vec<Option<Gradient>> {
        let Gradients { x, h0, w_ih, w_hh, b_ih, b_hh } = gradients;
        let b_ih = self.b_ih.then_some(b_ih);
        let b_hh = self.b_hh.then_some(b_hh);
        let all = [x, w_ih, w_hh].into_iter().chain(b_ih).chain(b_hh).chain([h0]);
        all.map(|gradient| gradient.map(Gradient::owned)).collect()
    }
}

/// One of two states. candle's view of it would add its gradient to zeros as large as both.
struct SelectState {
    number: usize,
}

impl Operator for SelectState {
    type Saved = ();

    fn op(&self) -> Op {
        Op::user("lstm state", Cast::Keep)
    }

    fn reads(&self, _input: usize, _wanted: &[bool]) -> bool {
        false
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, ())> {
        Ok((inputs[0].get(self.number)?, ()))
    }

    fn backward(&self, ctx: &Backward<'_, ()>) -> Result<Vec<Option<Gradient>>> {
        let Some(dtype) = ctx.wants[0] else { return Ok(vec![None]) };
        let own = kernels::in_dtype(ctx.gradient, dtype)?.unsqueeze(0)?;
        let other = own.zeros_like()?;
        let both = if self.number == 0 { [own, other] } else { [other, own] };
        Ok(vec![Some(Gradient::owned(kernels::cat(&both, 0)?))])
    }
}

struct Lstm(RnnSettings);

impl Operator for Lstm {
    /// The sequence, `c0`, and what goes into the gates.
    type Saved = (Sequence, Tensor, Tensor);
    const KEEPS_OUTPUT: bool = true;

    fn op(&self) -> Op {
        Op::Lstm
    }

    /// Hidden and cell states, `(2, b, t, n)`.
    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (sequence, c0) = self.0.sequence(inputs)?;
        let Some(c0) = c0 else { bail!("lstm was given no cell state") };
        let (y, gates) = rnn::lstm(&sequence, &c0)?;
        Ok((y, (sequence, c0, gates)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let ((sequence, c0, gates), y) = (ctx.saved, ctx.kept_output()?);
        let (gate_gradients, dc0) = rnn::lstm_backward(sequence, c0, gates, y, ctx.gradient)?;
        let gradients = gate_gradients.gradients(sequence, &y.get(0)?, self.0.wants(ctx)?)?;
        let mut gradients = self.0.in_order(gradients);
        let want = ctx.wants.last().copied().flatten();
        let dc0 = want.map(|want| dc0.to_dtype(want)).transpose()?;
        gradients.push(dc0.map(Gradient::owned));
        Ok(gradients)
    }
}

struct Gru(RnnSettings);

impl Operator for Gru {
    type Saved = (Sequence, rnn::Saved);
    const KEEPS_OUTPUT: bool = true;

    fn op(&self) -> Op {
        Op::Gru
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Self::Saved)> {
        let (sequence, _) = self.0.sequence(inputs)?;
        let (y, saved) = rnn::gru(&sequence)?;
        Ok((y, (sequence, saved)))
    }

    fn backward(&self, ctx: &Backward<'_, Self::Saved>) -> Result<Vec<Option<Gradient>>> {
        let ((sequence, saved), y) = (ctx.saved, ctx.kept_output()?);
        let gate_gradients = rnn::gru_backward(sequence, saved, y, ctx.gradient)?;
        Ok(self.0.in_order(gate_gradients.gradients(sequence, y, self.0.wants(ctx)?)?))
    }
}
