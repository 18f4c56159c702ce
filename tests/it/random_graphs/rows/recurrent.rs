//! LSTM and GRU, gate by gate.

use candle_amp::Op;
use candle_amp::ops::{self, RecurrentWeights};
use candle_core::Tensor;
use candle_nn::rnn::Direction;

use super::super::array::Array;
use super::super::draft::Draft;
use super::super::program::{Call, Row};
use super::super::tape::Tape;
use super::activations::sigmoid;
use super::pairs::{add, linear, mul, sub};
use super::row;

/// Settings: bits of the two biases; whether it runs backward.
fn cell(d: &mut Draft, x: usize, gates: usize) -> Option<Call> {
    let x = d.ranked(x, 3, |dims| dims[0] <= 3 && dims[1] <= 4 && dims[2] <= 6)?;
    let (dims, n, bits, backward) = (d.dims(x), d.range(1, 3), d.range(0, 4), d.range(0, 2));
    let mut inputs = vec![x];
    for _ in 0..if gates == 4 { 2 } else { 1 } {
        inputs.push(d.operand(&[dims[0], n])?);
    }
    inputs.push(d.operand(&[gates * n, dims[2]])?);
    inputs.push(d.operand(&[gates * n, n])?);
    for bit in [1, 2] {
        if bits & bit == bit {
            inputs.push(d.operand(&[gates * n])?);
        }
    }
    Some((inputs, vec![bits, backward]))
}

fn weights<'a>(t: &'a [Tensor], args: &[usize]) -> RecurrentWeights<'a> {
    let mut rest = t[2..].iter();
    let [b_ih, b_hh] = [1, 2].map(|bit| if args[0] & bit == bit { rest.next() } else { None });
    let direction = if args[1] == 1 { Direction::Backward } else { Direction::Forward };
    RecurrentWeights { w_ih: &t[0], w_hh: &t[1], b_ih, b_hh, direction }
}

struct Weights<'a> {
    w: [&'a Array; 2],
    b: [Option<&'a Array>; 2],
}

impl<'a> Weights<'a> {
    fn of(x: &'a [Array], args: &[usize]) -> Self {
        let mut rest = x[2..].iter();
        let b = [1, 2].map(|bit| if args[0] & bit == bit { rest.next() } else { None });
        Self { w: [&x[0], &x[1]], b }
    }
}

fn tanh(x: f64) -> (f64, f64) {
    (x.tanh(), 1.0 - x.tanh().powi(2))
}

/// The steps in the order they are taken, and `x` at each.
fn steps(x: &Array, args: &[usize]) -> Vec<(usize, Array)> {
    let at = |t| (t, x.narrow(1, t, 1).reshape(&[x.dims[0], x.dims[2]]));
    let mut steps: Vec<_> = (0..x.dims[1]).map(at).collect();
    if args[1] == 1 {
        steps.reverse();
    }
    steps
}

/// `(b, n)` a step as `(b, t, n)`.
fn stacked(mut states: Vec<(usize, Array)>) -> Array {
    states.sort_by_key(|(t, _)| *t);
    let wide = |(_, state): &(usize, Array)| state.reshape(&[state.dims[0], 1, state.dims[1]]);
    let all: Vec<Array> = states.iter().map(wide).collect();
    Array::cat(&all.iter().collect::<Vec<_>>(), 1)
}

fn lstm(tape: &mut Tape, x: &[Array], args: &[usize]) -> Array {
    let weights = Weights::of(&x[3..], args);
    let (mut h, mut c, n) = (x[1].clone(), x[2].clone(), x[1].dims[1]);
    let (mut hidden, mut cells) = (Vec::new(), Vec::new());
    for (t, now) in steps(&x[0], args) {
        let input = linear(tape, &now, weights.w[0], weights.b[0]);
        let state = linear(tape, &h, weights.w[1], weights.b[1]);
        let gates = add(tape, &[input, state], &[]);
        let gate = |at: usize| gates.narrow(1, at * n, n);
        let [i, f, o] = [0, 1, 3].map(|at| gate(at).map(tape, sigmoid));
        let g = gate(2).map(tape, tanh);
        let (kept, new) = (mul(tape, &[f, c], &[]), mul(tape, &[i, g], &[]));
        c = add(tape, &[kept, new], &[]);
        let shown = c.map(tape, tanh);
        h = mul(tape, &[o, shown], &[]);
        hidden.push((t, h.clone()));
        cells.push((t, c.clone()));
    }
    Array::cat(&[&stacked(hidden), &stacked(cells)], 2)
}

fn gru(tape: &mut Tape, x: &[Array], args: &[usize]) -> Array {
    let weights = Weights::of(&x[2..], args);
    let (mut h, n, mut hidden) = (x[1].clone(), x[1].dims[1], Vec::new());
    for (t, now) in steps(&x[0], args) {
        let input = linear(tape, &now, weights.w[0], weights.b[0]);
        let state = linear(tape, &h, weights.w[1], weights.b[1]);
        let part = |of: &Array, at: usize| of.narrow(1, at * n, n);
        let [r, z] = [0, 1].map(|at| {
            let sum = add(tape, &[part(&input, at), part(&state, at)], &[]);
            sum.map(tape, sigmoid)
        });
        let reset = mul(tape, &[r, part(&state, 2)], &[]);
        let new = add(tape, &[part(&input, 2), reset], &[]).map(tape, tanh);
        // (1 - z) new + z h
        let gap = sub(tape, &[h.clone(), new.clone()], &[]);
        let moved = mul(tape, &[z, gap], &[]);
        h = add(tape, &[new, moved], &[]);
        hidden.push((t, h.clone()));
    }
    stacked(hidden)
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(
            Some(Op::Lstm),
            "lstm",
            |d, x| cell(d, x, 4),
            |t, args| {
                let (h, c) = ops::lstm(&t[0], &t[1], &t[2], weights(&t[3..], args))?;
                Tensor::cat(&[h, c], 2)
            },
            lstm,
        )
        .rounded(),
        row(
            Some(Op::Gru),
            "gru",
            |d, x| cell(d, x, 3),
            |t, args| ops::gru(&t[0], &t[1], weights(&t[2..], args)),
            gru,
        )
        .rounded(),
    ]
}
