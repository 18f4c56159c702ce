//! Losses.

use candle_amp::{Op, ops};
use candle_core::{Result, Tensor};

use super::super::array::Array;
use super::super::draft::Draft;
use super::super::program::{Call, Row};
use super::super::tape::{Scalar, Tape};
use super::norms::log_softmax;
use super::pairs::linear;
use super::row;

const SMOOTHING: f64 = 0.1;
const DELTA: f64 = 0.7;

fn targets(classes: &[usize], like: &Tensor) -> Result<Tensor> {
    Tensor::new(classes.iter().map(|&class| class as u32).collect::<Vec<_>>(), like.device())
}

/// Settings: a class a row.
fn logits(d: &mut Draft, x: usize) -> Option<Call> {
    let x = d.ranked(x, 2, |_| true)?;
    let dims = d.dims(x);
    Some((vec![x], (0..dims[0]).map(|_| d.range(0, dims[1])).collect()))
}

/// Minus the mean of the elements of these classes.
fn picked(tape: &mut Tape, logs: &Array, classes: &[usize]) -> Scalar {
    let part = -1.0 / classes.len() as f64;
    let one = |(row, &class): (usize, &usize)| (logs.get(&[row, class]), part);
    tape.linear(&classes.iter().enumerate().map(one).collect::<Vec<_>>())
}

fn cross_entropy(tape: &mut Tape, logits: &Array, classes: &[usize], smoothing: f64) -> Array {
    let logs = log_softmax(tape, logits, 1);
    let right = picked(tape, &logs, classes);
    let mean = tape.mean(&logs.at);
    let loss = tape.linear(&[(right, 1.0 - smoothing), (mean, -smoothing)]);
    Array::new([], vec![loss])
}

fn pair(d: &mut Draft, x: usize) -> Option<Call> {
    let dims = d.dims(x);
    let other = if d.chance(0.1) { x } else { d.operand(&dims)? };
    Some((if d.chance(0.3) { vec![other, x] } else { vec![x, other] }, vec![]))
}

/// The mean of `f`, which has derivatives in both of its arguments.
fn mean_of(
    tape: &mut Tape,
    x: &[Array],
    mut f: impl FnMut(&mut Tape, Scalar, Scalar) -> Scalar,
) -> Array {
    let all = x[0].zip(&x[1], |a, b| f(tape, a, b));
    Array::new([], vec![tape.mean(&all.at)])
}

fn huber(gap: f64) -> (f64, f64) {
    match gap.abs() <= DELTA {
        true => (0.5 * gap * gap, gap),
        false => (DELTA * (gap.abs() - 0.5 * DELTA), DELTA.copysign(gap)),
    }
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(
            Some(Op::CrossEntropy),
            "cross_entropy",
            logits,
            |t, args| ops::cross_entropy(&t[0], &targets(args, &t[0])?),
            |tape, x, args| cross_entropy(tape, &x[0], args, 0.0),
        ),
        row(
            Some(Op::CrossEntropy),
            "cross_entropy_smoothed",
            logits,
            |t, args| ops::cross_entropy_smoothed(&t[0], &targets(args, &t[0])?, SMOOTHING),
            |tape, x, args| cross_entropy(tape, &x[0], args, SMOOTHING),
        ),
        row(
            Some(Op::LinearCrossEntropy),
            "linear_cross_entropy",
            |d, x| {
                let x = d.ranked(x, 2, |dims| dims[1] <= 12)?;
                let (dims, classes) = (d.dims(x), d.range(2, 6));
                let mut inputs = vec![x, d.operand(&[classes, dims[1]])?];
                if d.chance(0.5) {
                    inputs.push(d.operand(&[classes])?);
                }
                Some((inputs, (0..dims[0]).map(|_| d.range(0, classes)).collect()))
            },
            |t, args| ops::linear_cross_entropy(&t[0], &t[1], t.get(2), &targets(args, &t[0])?),
            |tape, x, args| {
                let logits = linear(tape, &x[0], &x[1], x.get(2));
                // Logits are rounded to the dtype of `x`, which the slopes' noise says.
                let (forward, coarse) = (tape.forward, tape.backward);
                tape.forward = coarse;
                let logits = logits.each(|x| tape.linear(&[(x, 1.0)]));
                tape.forward = forward;
                cross_entropy(tape, &logits, args, 0.0)
            },
        )
        .rounded(),
        row(
            Some(Op::Nll),
            "nll",
            logits,
            |t, args| ops::nll(&t[0], &targets(args, &t[0])?),
            |tape, x, args| Array::new([], vec![picked(tape, &x[0], args)]),
        ),
        row(
            Some(Op::Mse),
            "mse",
            pair,
            |t, _| ops::mse(&t[0], &t[1]),
            |tape, x, _| {
                mean_of(tape, x, |tape, a, b| {
                    let gap = tape.sub(a, b);
                    tape.mul(gap, gap)
                })
            },
        ),
        row(
            Some(Op::Huber),
            "huber",
            pair,
            |t, _| ops::huber(&t[0], &t[1], DELTA),
            |tape, x, _| {
                mean_of(tape, x, |tape, a, b| {
                    let gap = tape.sub(a, b);
                    tape.map(gap, huber)
                })
            },
        ),
        row(
            Some(Op::L1),
            "l1",
            pair,
            |t, _| ops::l1(&t[0], &t[1]),
            |tape, x, _| {
                mean_of(tape, x, |tape, a, b| {
                    let gap = tape.sub(a, b);
                    // Of equal ones, as of one tensor with itself, the derivative is 0; but rounding must leave them
                    // equal too.
                    let equal = tape.lanes(a) == tape.lanes(b);
                    let sure = equal || tape.value(gap).abs() > 1e-2;
                    tape.require(sure, "a gap whose sign is sure");
                    tape.map(gap, |gap| (gap.abs(), if equal { 0.0 } else { gap.signum() }))
                })
            },
        ),
        row(
            Some(Op::KlDiv),
            "kl_div",
            |d, x| {
                let pair = pair(d, x)?.0;
                let p = d.push("sigmoid", &[pair[1]], &[])?;
                Some((vec![pair[0], p], vec![]))
            },
            |t, _| ops::kl_div(&t[0], &t[1]),
            |tape, x, _| {
                mean_of(tape, x, |tape, a, p| {
                    tape.require((tape.value(p) - 0.5).abs() < 0.4, "a probability near 0");
                    let log = tape.map(p, |p| (p.ln(), 1.0 / p));
                    let gap = tape.sub(log, a);
                    tape.mul(p, gap)
                })
            },
        ),
        row(
            Some(Op::BinaryCrossEntropyWithLogit),
            "binary_cross_entropy_with_logit",
            pair,
            |t, _| ops::binary_cross_entropy_with_logit(&t[0], &t[1]),
            |tape, x, _| {
                // softplus(x) - x target
                mean_of(tape, x, |tape, a, b| {
                    let whole = tape.map(a, |x| (x.exp().ln_1p(), 1.0 / (1.0 + (-x).exp())));
                    let part = tape.mul(a, b);
                    tape.sub(whole, part)
                })
            },
        ),
        row(
            Some(Op::BinaryCrossEntropy),
            "binary_cross_entropy",
            |d, x| {
                let target = pair(d, x)?.0;
                let p = d.push("sigmoid", &[target[0]], &[])?;
                Some((vec![p, target[1]], vec![]))
            },
            |t, _| ops::binary_cross_entropy(&t[0], &t[1]),
            |tape, x, _| {
                // -(target ln p + (1 - target) ln(1 - p))
                mean_of(tape, x, |tape, p, target| {
                    tape.require((tape.value(p) - 0.5).abs() < 0.4, "a sure probability");
                    let yes = tape.map(p, |p| (-p.ln(), -1.0 / p));
                    let no = tape.map(p, |p| (-(-p).ln_1p(), 1.0 / (1.0 - p)));
                    let gap = tape.sub(yes, no);
                    let part = tape.mul(target, gap);
                    tape.sum(&[part, no])
                })
            },
        ),
    ]
}
