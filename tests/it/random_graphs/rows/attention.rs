//! Attention, rotary embedding, embedding.

use candle_amp::{Op, ops};
use candle_core::{DType, Result, Tensor};

use super::super::array::Array;
use super::super::draft::Draft;
use super::super::program::{Call, Row};
use super::super::tape::{Scalar, Tape};
use super::row;

const SCALE: f64 = 0.75;
const CAP: f64 = 1.5;

/// Settings: mask (0 none, 1 a choice, 2 added), causal, soft cap.
fn attention(d: &mut Draft, x: usize) -> Option<Call> {
    let x = d.ranked(x, 4, |dims| dims[2] <= 6 && dims[1] <= 4)?;
    let (dims, keys, wide) = (d.dims(x), d.range(1, 5), d.range(1, 4));
    let heads = if d.chance(0.3) { 1 } else { dims[1] };
    let k = d.operand(&[dims[0], heads, keys, dims[3]])?;
    let v = match wide == dims[3] && d.chance(0.5) {
        true => k,
        false => d.operand(&[dims[0], heads, keys, wide])?,
    };
    let (mask, causal, cap) = (d.range(0, 3), d.range(0, 2), usize::from(d.chance(0.2)));
    let mut inputs = vec![x, k, v];
    if mask == 2 {
        inputs.push(d.operand(&[dims[2], keys])?);
    }
    Some((inputs, vec![mask, causal, cap]))
}

fn attends(query: usize, key: usize) -> bool {
    (query * 5 + key * 3) % 4 != 1
}

fn run(t: &[Tensor], args: &[usize]) -> Result<Tensor> {
    let (queries, keys) = (t[0].dim(2)?, t[1].dim(2)?);
    let choice: Vec<u8> =
        (0..queries * keys).map(|at| u8::from(attends(at / keys, at % keys))).collect();
    let mask = match args[0] {
        0 => None,
        1 => Some(Tensor::from_vec(choice, (queries, keys), t[0].device())?),
        _ => Some(t[3].clone()),
    };
    let (mask, causal) = (mask.as_ref(), args[1] == 1);
    match args[2] {
        0 => ops::sdpa(&t[0], &t[1], &t[2], mask, causal, SCALE),
        _ => ops::sdpa_softcapped(&t[0], &t[1], &t[2], mask, causal, SCALE, CAP),
    }
}

fn attend(tape: &mut Tape, x: &[Array], args: &[usize]) -> Array {
    let (q, k, v) = (&x[0], &x[1], &x[2]);
    let share = q.dims[1] / k.dims[1];
    let mut out: Vec<Vec<Scalar>> = Vec::new();
    for row in super::super::array::indices(&q.dims[..3]) {
        let (batch, head, query) = (row[0], row[1], row[2]);
        let seen =
            |key: &usize| (args[1] == 0 || *key <= query) && (args[0] != 1 || attends(query, *key));
        let seen: Vec<usize> = (0..k.dims[2]).filter(seen).collect();
        let mut powers = Vec::new();
        for &key in &seen {
            let pair = |i| (q.get(&[batch, head, query, i]), k.get(&[batch, head / share, key, i]));
            let product = tape.dot(&(0..q.dims[3]).map(pair).collect::<Vec<_>>());
            let mut score = tape.linear(&[(product, SCALE)]);
            if args[2] == 1 {
                score = tape.map(score, |s| {
                    let t = (s / CAP).tanh();
                    (CAP * t, 1.0 - t * t)
                });
            }
            if args[0] == 2 {
                score = tape.sum(&[score, x[3].get(&[query, key])]);
            }
            tape.require(tape.value(score).abs() < 12.0, "a large score");
            powers.push(tape.map(score, |s| (s.exp(), s.exp())));
        }
        let sum = tape.sum(&powers);
        let column = |tape: &mut Tape, i: usize| {
            if seen.is_empty() {
                return tape.constant(0.0);
            }
            let reciprocal = tape.map(sum, |s| (1.0 / s, -1.0 / (s * s)));
            let weight = |power: &Scalar| tape.mul(*power, reciprocal);
            let weights: Vec<Scalar> = powers.iter().map(weight).collect();
            let value = |key: &usize| v.get(&[batch, head / share, *key, i]);
            tape.dot(&weights.into_iter().zip(seen.iter().map(value)).collect::<Vec<_>>())
        };
        out.push((0..v.dims[3]).map(|i| column(tape, i)).collect());
    }
    let dims = [q.dims[0], q.dims[1], q.dims[2], v.dims[3]];
    Array::new(dims, out.into_iter().flatten().collect())
}

fn packed(tape: &mut Tape, x: &[Array], args: &[usize]) -> Array {
    let (batch, steps, heads) = (x[0].dims[0], x[0].dims[1], args[0]);
    let size = x[0].dims[2] / 3 / heads;
    let all = x[0].reshape(&[batch, steps, 3, heads, size]).permute(&[2, 0, 3, 1, 4]);
    let part = |at| all.narrow(0, at, 1).reshape(&[batch, heads, steps, size]);
    let y = attend(tape, &[part(0), part(1), part(2)], &[0, args[1], 0]);
    y.permute(&[0, 2, 1, 3]).reshape(&[batch, steps, heads * size])
}

/// The angle of a pair at a position.
fn angle(position: usize, pair: usize) -> f64 {
    0.7 * position as f64 + 0.3 * pair as f64 - 1.0
}

/// Cosines and sines as exact as `x` needs them.
fn turns(x: &Tensor, positions: usize) -> Result<[Tensor; 2]> {
    let (pairs, dtype) =
        (x.dim(3)? / 2, if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 });
    let of = |f: fn(f64) -> f64| {
        let values = (0..positions * pairs).map(|at| f(angle(at / pairs, at % pairs)));
        let values: Vec<f64> = values.collect();
        Tensor::from_vec(values, (positions, pairs), x.device())?.to_dtype(dtype)
    };
    Ok([of(f64::cos)?, of(f64::sin)?])
}

/// Turns pairs of elements `apart`, or neighbours where that is 1.
fn turned(tape: &mut Tape, x: &Array, neighbours: bool, positions: usize) -> Array {
    let half = x.dims[3] / 2;
    Array::from_fn(x.dims.clone(), |at| {
        let (pair, second) =
            if neighbours { (at[3] / 2, at[3] % 2) } else { (at[3] % half, at[3] / half) };
        let place = |second| if neighbours { 2 * pair + second } else { pair + second * half };
        let element = |second| x.get(&[at[0], at[1], at[2], place(second)]);
        let (sin, cos) = angle(at[positions], pair).sin_cos();
        match second {
            0 => tape.linear(&[(element(0), cos), (element(1), -sin)]),
            _ => tape.linear(&[(element(1), cos), (element(0), sin)]),
        }
    })
}

fn even(d: &mut Draft, x: usize) -> Option<Call> {
    Some((vec![d.ranked(x, 4, |dims| dims[3] % 2 == 0)?], vec![]))
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(Some(Op::Sdpa), "sdpa", attention, run, attend).rounded(),
        row(
            Some(Op::Sdpa),
            "sdpa_packed",
            |d, x| {
                let x = d.ranked(x, 3, |dims| dims[2] % 3 == 0 && dims[1] <= 6)?;
                let (size, heads) = (d.dims(x)[2] / 3, d.range(1, 4));
                if size % heads != 0 {
                    return None;
                }
                Some((vec![x], vec![heads, d.range(0, 2)]))
            },
            |t, args| ops::sdpa_packed(&t[0], args[0], args[1] == 1, SCALE),
            packed,
        )
        .rounded(),
        row(
            Some(Op::Rope),
            "rope",
            even,
            |t, _| {
                let [cos, sin] = turns(&t[0], t[0].dim(2)? + 1)?;
                ops::rope(&t[0], &cos, &sin)
            },
            |tape, x, _| turned(tape, &x[0], false, 2),
        ),
        row(
            Some(Op::Rope),
            "rope_i",
            even,
            |t, _| {
                let [cos, sin] = turns(&t[0], t[0].dim(2)?)?;
                ops::rope_i(&t[0], &cos, &sin)
            },
            |tape, x, _| turned(tape, &x[0], true, 2),
        ),
        row(
            Some(Op::Rope),
            "rope_thd",
            even,
            |t, _| {
                let [cos, sin] = turns(&t[0], t[0].dim(1)?)?;
                ops::rope_thd(&t[0], &cos, &sin)
            },
            |tape, x, _| turned(tape, &x[0], false, 1),
        ),
        row(
            Some(Op::Embedding),
            "embedding",
            |d, x| {
                let x = d.ranked(x, 2, |dims| dims[1] <= 12)?;
                let (rows, count) = (d.dims(x)[0], d.range(1, 5));
                Some((vec![x], (0..count).map(|_| d.range(0, rows)).collect()))
            },
            |t, args| {
                let ids: Vec<u32> = args.iter().map(|&id| id as u32).collect();
                ops::embedding(&Tensor::new(ids, t[0].device())?, &t[0])
            },
            |_, x, args| {
                Array::from_fn([args.len(), x[0].dims[1]], |at| x[0].get(&[args[at[0]], at[1]]))
            },
        )
        .exact(),
    ]
}
