//! Arithmetic on two tensors and more, products, an operator of a user's.

use candle_amp::autograd::{Backward, Gradient, Operator, apply};
use candle_amp::{Cast, Op, ops};
use candle_core::{Result, Tensor};

use super::super::array::{Array, broadcast_dims};
use super::super::draft::Draft;
use super::super::program::{Call, Row};
use super::super::tape::{Scalar, Tape};
use super::row;

/// With itself, with another of the same dimensions, or with one that is repeated.
pub(super) fn pair(d: &mut Draft, x: usize) -> Option<Call> {
    let mut dims = d.dims(x);
    let other = match d.range(0, 5) {
        0 => x,
        1 | 2 => d.operand(&dims)?,
        _ => {
            let drop = d.range(0, dims.len() + 1);
            dims.drain(..drop);
            for size in &mut dims {
                *size = if d.chance(0.4) { 1 } else { *size };
            }
            d.operand(&dims)?
        }
    };
    let pair = if d.chance(0.3) { vec![other, x] } else { vec![x, other] };
    broadcast_dims(&d.dims(pair[0]), &d.dims(pair[1])).map(|_| (pair, vec![]))
}

/// The same, the second made positive.
pub(super) fn quotient(d: &mut Draft, x: usize) -> Option<Call> {
    let (pair, args) = pair(d, x)?;
    let divisor = super::activations::positive(d, pair[1])?;
    Some((vec![pair[0], divisor], args))
}

pub(super) fn add(tape: &mut Tape, x: &[Array], _: &[usize]) -> Array {
    x[0].zip(&x[1], |a, b| tape.sum(&[a, b]))
}

pub(super) fn sub(tape: &mut Tape, x: &[Array], _: &[usize]) -> Array {
    x[0].zip(&x[1], |a, b| tape.sub(a, b))
}

pub(super) fn mul(tape: &mut Tape, x: &[Array], _: &[usize]) -> Array {
    x[0].zip(&x[1], |a, b| tape.mul(a, b))
}

pub(super) fn div(tape: &mut Tape, x: &[Array], _: &[usize]) -> Array {
    x[0].zip(&x[1], |a, b| tape.div(a, b))
}

/// How much `a` is above `b`, or 0.
fn above(tape: &mut Tape, a: Scalar, b: Scalar) -> Scalar {
    let difference = tape.sub(a, b);
    tape.kinked(difference, &[0.0], |x| (x.max(0.0), f64::from(x > 0.0)))
}

pub(super) fn product(d: &mut Draft, x: usize) -> Option<Call> {
    let rank = d.range(2, 4);
    let x = d.ranked(x, rank, |dims| dims[dims.len() - 1] <= 12)?;
    let mut dims = d.dims(x);
    let columns = d.range(1, 6);
    (dims[rank - 2], dims[rank - 1]) = (dims[rank - 1], columns);
    let other = match d.chance(0.3) {
        true => {
            dims.swap(rank - 2, rank - 1);
            let other = d.operand(&dims)?;
            d.push("transpose", &[other], &[rank - 2, rank - 1])?
        }
        false => d.operand(&dims)?,
    };
    Some((vec![x, other], vec![]))
}

/// Of matrices, or of as many on both sides.
pub(super) fn matmul(tape: &mut Tape, x: &[Array], _: &[usize]) -> Array {
    let rank = x[0].dims.len();
    let (terms, mut dims) = (x[0].dims[rank - 1], x[0].dims.clone());
    dims[rank - 1] = x[1].dims[rank - 1];
    Array::from_fn(dims, |index| {
        let pair = |k| {
            let (mut a, mut b) = (index.clone(), index.clone());
            (a[rank - 1], b[rank - 2]) = (k, k);
            (x[0].get(&a), x[1].get(&b))
        };
        tape.dot(&(0..terms).map(pair).collect::<Vec<_>>())
    })
}

pub(super) fn linear(tape: &mut Tape, x: &Array, weight: &Array, bias: Option<&Array>) -> Array {
    let inner = *x.dims.last().expect("a dimension");
    let rows = x.reshape(&[x.at.len() / inner, inner]);
    let y = matmul(tape, &[rows, weight.transpose(0, 1)], &[]);
    let y = match bias {
        Some(bias) => add(tape, &[y, bias.clone()], &[]),
        None => y,
    };
    y.reshape(&[&x.dims[..x.dims.len() - 1], &[weight.dims[0]]].concat())
}

/// The sum of its inputs, each times its position.
struct WeightedSum;

impl Operator for WeightedSum {
    type Saved = usize;

    fn op(&self) -> Op {
        Op::user("weighted_sum", Cast::Promote)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, usize)> {
        let mut sum = inputs[0].affine(0.25, 0.0)?;
        for (i, input) in inputs.iter().enumerate().skip(1) {
            sum = (sum + input.affine(0.25 * (i + 1) as f64, 0.0)?)?;
        }
        Ok((sum, inputs.len()))
    }

    fn backward(&self, ctx: &Backward<'_, usize>) -> Result<Vec<Option<Gradient>>> {
        let one = |i: usize| match ctx.wants[i] {
            Some(_) if i == 3 => Ok(Some(Gradient::shared(ctx.gradient.clone()))),
            Some(_) => {
                ctx.gradient.affine(0.25 * (i + 1) as f64, 0.0).map(|g| Some(Gradient::owned(g)))
            }
            None => Ok(None),
        };
        (0..*ctx.saved).map(one).collect()
    }
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(Some(Op::Add), "add", pair, |t, _| ops::add(&t[0], &t[1]), add),
        row(Some(Op::Sub), "sub", pair, |t, _| ops::sub(&t[0], &t[1]), sub),
        row(Some(Op::Mul), "mul", pair, |t, _| ops::mul(&t[0], &t[1]), mul),
        row(Some(Op::Div), "div", quotient, |t, _| ops::div(&t[0], &t[1]), div),
        row(
            Some(Op::AddRelu),
            "add_relu",
            |d, x| {
                let dims = d.dims(x);
                let other = if d.chance(0.2) { x } else { d.operand(&dims)? };
                Some((vec![x, other], vec![]))
            },
            |t, _| ops::add_relu(&t[0], &t[1]),
            |tape, x, _| {
                let sum = add(tape, x, &[]);
                sum.each(|x| tape.kinked(x, &[0.0], |x| (x.max(0.0), f64::from(x > 0.0))))
            },
        ),
        row(
            Some(Op::Cat),
            "cat",
            |d, x| {
                let mut parts = vec![x];
                let (mut dims, count) = (d.dims(x), d.range(0, 4));
                if dims.is_empty() {
                    return None;
                }
                let dim = d.range(0, dims.len());
                for _ in 0..count {
                    dims[dim] = d.range(1, 4);
                    let part = if d.chance(0.3) { x } else { d.operand(&dims)? };
                    let at = d.range(0, parts.len() + 1);
                    parts.insert(at, part);
                }
                Some((parts, vec![dim]))
            },
            |t, args| ops::cat(&t.iter().collect::<Vec<_>>(), args[0]),
            |_, x, args| Array::cat(&x.iter().collect::<Vec<_>>(), args[0]),
        )
        .exact(),
        row(
            Some(Op::Maximum),
            "maximum",
            pair,
            |t, _| ops::maximum(&t[0], &t[1]),
            |tape, x, _| {
                x[0].zip(&x[1], |a, b| {
                    let above = above(tape, a, b);
                    tape.sum(&[b, above])
                })
            },
        ),
        row(
            Some(Op::Minimum),
            "minimum",
            pair,
            |t, _| ops::minimum(&t[0], &t[1]),
            |tape, x, _| {
                x[0].zip(&x[1], |a, b| {
                    let above = above(tape, a, b);
                    tape.sub(a, above)
                })
            },
        ),
        row(
            Some(Op::WhereCond),
            "where_cond",
            |d, x| {
                let other = d.operand(&d.dims(x))?;
                Some((vec![x, other], vec![]))
            },
            |t, _| {
                let chosen = (0..t[0].elem_count()).map(|i| u8::from(i % 3 == 0)).collect();
                let chosen = Tensor::from_vec(chosen, t[0].shape(), t[0].device())?;
                ops::where_cond(&chosen, &t[0], &t[1])
            },
            |_, x, _| {
                let mut i = 0;
                x[0].zip(&x[1], |a, b| {
                    i += 1;
                    if (i - 1) % 3 == 0 { a } else { b }
                })
            },
        ),
        row(Some(Op::Matmul), "matmul", product, |t, _| ops::matmul(&t[0], &t[1]), matmul),
        row(
            Some(Op::Linear),
            "linear",
            |d, x| {
                let rank = d.range(2, 4);
                let x = d.ranked(x, rank, |dims| dims[dims.len() - 1] <= 12)?;
                let (inner, outer) = (d.dims(x)[rank - 1], d.range(1, 6));
                let mut inputs = vec![x, d.operand(&[outer, inner])?];
                if d.chance(0.5) {
                    inputs.push(d.operand(&[outer])?);
                }
                Some((inputs, vec![]))
            },
            |t, _| ops::linear(&t[0], &t[1], t.get(2)),
            |tape, x, _| linear(tape, &x[0], &x[1], x.get(2)),
        ),
        row(
            Some(Op::user("weighted_sum", Cast::Promote)),
            "weighted_sum",
            |d, x| {
                let (mut inputs, dims, count) = (vec![x], d.dims(x), d.range(0, 6));
                for _ in 0..count {
                    let input = if d.chance(0.2) { x } else { d.operand(&dims)? };
                    inputs.push(input);
                }
                Some((inputs, vec![]))
            },
            |t, _| apply(WeightedSum, &t.iter().collect::<Vec<_>>()),
            |tape, x, _| {
                let mut places = 0..x[0].at.len();
                x[0].each(|_| {
                    let at = places.next().expect("one each");
                    let term = |(i, x): (usize, &Array)| (x.at[at], 0.25 * (i + 1) as f64);
                    tape.linear(&x.iter().enumerate().map(term).collect::<Vec<_>>())
                })
            },
        )
        .rounded(),
    ]
}
