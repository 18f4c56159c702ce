//! Norms, softmax, sums and means.

use candle_amp::Op;
use candle_amp::ops::{self, channels_last};
use candle_core::Tensor;

use super::super::array::Array;
use super::super::draft::Draft;
use super::super::program::{Call, Row};
use super::super::tape::{Scalar, Tape};
use super::row;

const EPS: f64 = 1e-3;

/// Minus the mean, over the standard deviation.
fn normalised(tape: &mut Tape, x: &Array, over: &[usize], centred: bool) -> Array {
    let centred = match centred {
        true => {
            let mean = x.reduce(over, |group| tape.mean(&group));
            x.zip(&mean, |x, mean| tape.sub(x, mean))
        }
        false => x.clone(),
    };
    let reciprocal = centred.reduce(over, |group| {
        let squares: Vec<Scalar> = group.iter().map(|x| tape.mul(*x, *x)).collect();
        let variance = tape.mean(&squares);
        tape.require(tape.value(variance) > 0.05, "a small variance");
        tape.map(variance, |v| ((v + EPS).powf(-0.5), -0.5 * (v + EPS).powf(-1.5)))
    });
    centred.zip(&reciprocal, |x, r| tape.mul(x, r))
}

/// Times a weight and plus a bias, of the dimensions from `dim` on, where `bits` has them.
fn affine(tape: &mut Tape, y: &Array, x: &[Array], bits: usize, shape: &[usize]) -> Array {
    let mut rest = x.iter();
    let mut y = y.clone();
    if bits & 1 == 1 {
        let weight = rest.next().expect("a weight").reshape(shape);
        y = y.zip(&weight, |y, w| tape.mul(y, w));
    }
    if bits & 2 == 2 {
        let bias = rest.next().expect("a bias").reshape(shape);
        y = y.zip(&bias, |y, b| tape.sum(&[y, b]));
    }
    y
}

/// The weight and the bias that `bits` has, of inputs from here on.
fn parts(t: &[Tensor], bits: usize) -> [Option<&Tensor>; 2] {
    let mut rest = t.iter();
    [1, 2].map(|bit| if bits & bit == bit { rest.next() } else { None })
}

fn with_affine(
    d: &mut Draft,
    mut inputs: Vec<usize>,
    size: usize,
    bits: usize,
) -> Option<Vec<usize>> {
    for bit in [1, 2] {
        if bits & bit == bit {
            inputs.push(d.operand(&[size])?);
        }
    }
    Some(inputs)
}

/// `[1, c, 1, …]`.
fn channels(dims: &[usize], at: usize) -> Vec<usize> {
    let mut shape = vec![1; dims.len()];
    shape[at] = dims[at];
    shape
}

fn all_but(dims: &[usize], at: usize) -> Vec<usize> {
    (0..dims.len()).filter(|&dim| dim != at).collect()
}

/// Settings: bits of weight, bias and residual; whether channels are last.
fn batch(d: &mut Draft, x: usize, residual: bool) -> Option<Call> {
    let last = usize::from(d.chance(0.3));
    let rank = if last == 1 { 4 } else { d.range(2, 5) };
    let at = move |dims: &[usize]| if last == 1 { dims.len() - 1 } else { 1 };
    let x = d.ranked(x, rank, |dims| dims.iter().product::<usize>() / dims[at(dims)] >= 3)?;
    let dims = d.dims(x);
    let bits = d.range(0, 4) + if residual && d.chance(0.6) { 4 } else { 0 };
    let mut inputs = vec![x];
    if bits & 4 == 4 {
        inputs.push(d.operand(&dims)?);
    }
    Some((with_affine(d, inputs, dims[at(&dims)], bits)?, vec![bits, last]))
}

fn channel_dim(dims: &[usize], last: usize) -> usize {
    if last == 1 { dims.len() - 1 } else { 1 }
}

fn dim(d: &mut Draft, x: usize) -> Option<Call> {
    let rank = d.dims(x).len();
    if rank == 0 {
        return None;
    }
    Some((vec![x], vec![d.range(0, rank)]))
}

fn some_dims(d: &mut Draft, x: usize) -> Option<Call> {
    let rank = d.dims(x).len();
    let chosen: Vec<usize> = (0..rank).filter(|_| d.chance(0.5)).collect();
    Some((vec![x], chosen))
}

fn softmax(tape: &mut Tape, x: &Array, dim: usize) -> Array {
    let powers = x.map(tape, |x| (x.exp(), x.exp()));
    let sums = powers.reduce(&[dim], |group| tape.sum(&group));
    powers.zip(&sums, |a, b| tape.div(a, b))
}

pub(super) fn log_softmax(tape: &mut Tape, x: &Array, dim: usize) -> Array {
    let powers = x.map(tape, |x| (x.exp(), x.exp()));
    let sums = powers.reduce(&[dim], |group| tape.sum(&group));
    let logs = sums.map(tape, |x| (x.ln(), 1.0 / x));
    x.zip(&logs, |a, b| tape.sub(a, b))
}

/// Without the dimensions, unless they are kept.
fn squeezed(x: &Array, dims: &[usize]) -> Array {
    let left = x.dims.iter().enumerate().filter(|(dim, _)| !dims.contains(dim));
    x.reshape(&left.map(|(_, size)| *size).collect::<Vec<_>>())
}

macro_rules! reduction {
    ($op:ident, $name:literal, $run:path, $of:ident, $squeeze:expr) => {
        row(
            Some(Op::$op),
            $name,
            some_dims,
            |t, args| $run(&t[0], args.to_vec()),
            |tape, x, args| {
                let kept = x[0].reduce(args, |group| tape.$of(&group));
                if $squeeze { squeezed(&kept, args) } else { kept }
            },
        )
    };
}

macro_rules! total {
    ($op:ident, $name:literal, $run:path, $of:ident) => {
        row(
            Some(Op::$op),
            $name,
            super::alone,
            |t, _| $run(&t[0]),
            |tape, x, _| Array::new([], vec![tape.$of(&x[0].at)]),
        )
    };
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(
            Some(Op::BatchNorm),
            "batch_norm",
            |d, x| batch(d, x, false),
            |t, args| {
                let [weight, bias] = parts(&t[1..], args[0]);
                match args[1] {
                    0 => Ok(ops::batch_norm(&t[0], weight, bias, EPS)?.0),
                    _ => Ok(channels_last::batch_norm(&t[0], weight, bias, EPS)?.0),
                }
            },
            |tape, x, args| {
                let at = channel_dim(&x[0].dims, args[1]);
                let y = normalised(tape, &x[0], &all_but(&x[0].dims, at), true);
                affine(tape, &y, &x[1..], args[0], &channels(&x[0].dims, at))
            },
        )
        .mixed(),
        row(
            Some(Op::BatchNormRelu),
            "batch_norm_relu",
            |d, x| batch(d, x, true),
            |t, args| {
                let after = usize::from(args[0] & 4 == 4);
                let residual = (after == 1).then(|| &t[1]);
                let [weight, bias] = parts(&t[1 + after..], args[0]);
                match args[1] {
                    0 => Ok(ops::batch_norm_relu(&t[0], weight, bias, residual, EPS)?.0),
                    _ => Ok(channels_last::batch_norm_relu(&t[0], weight, bias, residual, EPS)?.0),
                }
            },
            |tape, x, args| {
                let at = channel_dim(&x[0].dims, args[1]);
                let y = normalised(tape, &x[0], &all_but(&x[0].dims, at), true);
                let after = usize::from(args[0] & 4 == 4);
                let shape = channels(&x[0].dims, at);
                let y = affine(tape, &y, &x[1 + after..], args[0], &shape);
                let y = match after {
                    1 => y.zip(&x[1], |y, r| tape.sum(&[y, r])),
                    _ => y,
                };
                y.each(|x| tape.kinked(x, &[0.0], |x| (x.max(0.0), f64::from(x > 0.0))))
            },
        ),
        row(
            Some(Op::BatchNormRelu6),
            "batch_norm_relu6",
            |d, x| batch(d, x, false),
            |t, args| {
                let [weight, bias] = parts(&t[1..], args[0]);
                match args[1] {
                    0 => Ok(ops::batch_norm_relu6(&t[0], weight, bias, EPS)?.0),
                    _ => Ok(channels_last::batch_norm_relu6(&t[0], weight, bias, EPS)?.0),
                }
            },
            |tape, x, args| {
                let at = channel_dim(&x[0].dims, args[1]);
                let y = normalised(tape, &x[0], &all_but(&x[0].dims, at), true);
                let y = affine(tape, &y, &x[1..], args[0], &channels(&x[0].dims, at));
                let inside = |x: f64| f64::from(x > 0.0 && x < 6.0);
                y.each(|x| tape.kinked(x, &[0.0, 6.0], |x| (x.clamp(0.0, 6.0), inside(x))))
            },
        ),
        row(
            Some(Op::BatchNorm),
            "batch_norm_eval",
            |d, x| {
                let ((mut inputs, args), size) = (batch(d, x, false)?, 4);
                let dims = d.dims(inputs[0]);
                let count = dims[channel_dim(&dims, args[1])];
                let values = |d: &mut Draft, least| -> Vec<f64> {
                    (0..count).map(|_| least + d.range(0, size) as f64 / 8.0).collect()
                };
                let (mean, var) = (values(d, -0.25), values(d, 0.5));
                inputs.push(d.constant(&[count], mean)?);
                inputs.push(d.constant(&[count], var)?);
                Some((inputs, args))
            },
            |t, args| {
                let (t, statistics) = t.split_at(t.len() - 2);
                let [weight, bias] = parts(&t[1..], args[0]);
                let (mean, var) = (&statistics[0], &statistics[1]);
                match args[1] {
                    0 => ops::batch_norm_eval(&t[0], mean, var, weight, bias, EPS),
                    _ => channels_last::batch_norm_eval(&t[0], mean, var, weight, bias, EPS),
                }
            },
            |tape, x, args| {
                let (x, statistics) = x.split_at(x.len() - 2);
                let at = channel_dim(&x[0].dims, args[1]);
                let shape = channels(&x[0].dims, at);
                let y = x[0].zip(&statistics[0].reshape(&shape), |x, mean| tape.sub(x, mean));
                let root = |v: f64| ((v + EPS).powf(-0.5), -0.5 * (v + EPS).powf(-1.5));
                let reciprocal = statistics[1].map(tape, root).reshape(&shape);
                let y = y.zip(&reciprocal, |y, r| tape.mul(y, r));
                affine(tape, &y, &x[1..], args[0], &shape)
            },
        )
        .mixed(),
        row(
            Some(Op::LayerNorm),
            "layer_norm",
            |d, x| {
                let rank = d.range(2, 5);
                let x = d.ranked(x, rank, |dims| dims[dims.len() - 1] > 2)?;
                let (size, bits) = (d.dims(x)[rank - 1], d.range(0, 4));
                Some((with_affine(d, vec![x], size, bits)?, vec![bits]))
            },
            |t, args| {
                let [weight, bias] = parts(&t[1..], args[0]);
                ops::layer_norm(&t[0], weight, bias, EPS)
            },
            |tape, x, args| {
                let last = x[0].dims.len() - 1;
                let y = normalised(tape, &x[0], &[last], true);
                affine(tape, &y, &x[1..], args[0], &channels(&x[0].dims, last))
            },
        )
        .mixed(),
        row(
            Some(Op::RmsNorm),
            "rms_norm",
            |d, x| {
                let rank = d.range(1, 5);
                let x = d.ranked(x, rank, |dims| dims[dims.len() - 1] > 1)?;
                let (size, bits) = (d.dims(x)[rank - 1], d.range(0, 2));
                Some((with_affine(d, vec![x], size, bits)?, vec![bits]))
            },
            |t, args| ops::rms_norm(&t[0], parts(&t[1..], args[0])[0], EPS),
            |tape, x, args| {
                let last = x[0].dims.len() - 1;
                let y = normalised(tape, &x[0], &[last], false);
                affine(tape, &y, &x[1..], args[0], &channels(&x[0].dims, last))
            },
        )
        .mixed(),
        row(
            Some(Op::GroupNorm),
            "group_norm",
            |d, x| {
                let rank = d.range(2, 5);
                let x = d.ranked(x, rank, |dims| dims[1] > 1)?;
                let (size, bits) = (d.dims(x)[1], d.range(0, 4));
                let groups = d.range(1, size + 1);
                if size % groups != 0 {
                    return None;
                }
                Some((with_affine(d, vec![x], size, bits)?, vec![bits, groups]))
            },
            |t, args| {
                let [weight, bias] = parts(&t[1..], args[0]);
                ops::group_norm(&t[0], args[1], weight, bias, EPS)
            },
            |tape, x, args| {
                let dims = &x[0].dims;
                let rows = x[0].reshape(&[dims[0] * args[1], x[0].at.len() / dims[0] / args[1]]);
                let y = normalised(tape, &rows, &[1], true).reshape(dims);
                affine(tape, &y, &x[1..], args[0], &channels(dims, 1))
            },
        )
        .mixed(),
        row(
            Some(Op::Softmax),
            "softmax",
            dim,
            |t, args| ops::softmax(&t[0], args[0]),
            |tape, x, args| softmax(tape, &x[0], args[0]),
        )
        .rounded(),
        row(
            Some(Op::LogSoftmax),
            "log_softmax",
            dim,
            |t, args| ops::log_softmax(&t[0], args[0]),
            |tape, x, args| log_softmax(tape, &x[0], args[0]),
        )
        .rounded(),
        total!(Sum, "sum", ops::sum, sum),
        total!(Mean, "mean", ops::mean, mean),
        reduction!(Sum, "sum_dims", ops::sum_dims, sum, true),
        reduction!(Sum, "sum_keepdim", ops::sum_keepdim, sum, false),
        reduction!(Mean, "mean_dims", ops::mean_dims, mean, true),
        reduction!(Mean, "mean_keepdim", ops::mean_keepdim, mean, false),
        row(
            Some(Op::Var),
            "var_dims",
            |d, x| {
                let (view, dims) = some_dims(d, x)?;
                let count: usize = dims.iter().map(|&dim| d.dims(x)[dim]).product();
                if count < 2 { None } else { Some((view, dims)) }
            },
            |t, args| ops::var_dims(&t[0], args.to_vec()),
            |tape, x, args| {
                // The derivative in the mean is 0, and nobody computes it: no rounding cancels by way of it.
                let mean = x[0].reduce(args, |group| {
                    let mean = tape.mean(&group);
                    tape.cut(mean)
                });
                let centred = x[0].zip(&mean, |x, mean| tape.sub(x, mean));
                let var = centred.reduce(args, |group| {
                    let share = 1.0 / (group.len() - 1) as f64;
                    let squares: Vec<_> = group.iter().map(|x| (tape.mul(*x, *x), share)).collect();
                    tape.linear(&squares)
                });
                squeezed(&var, args)
            },
        ),
        row(
            Some(Op::Norm),
            "norm_dims",
            // Of one element it is the absolute value, which has a row.
            |d, x| {
                let (view, dims) = some_dims(d, x)?;
                let count: usize = dims.iter().map(|&dim| d.dims(x)[dim]).product();
                if count < 2 { None } else { Some((view, dims)) }
            },
            |t, args| ops::norm_dims(&t[0], args.to_vec()),
            |tape, x, args| {
                let norm = x[0].reduce(args, |group| {
                    let squares: Vec<Scalar> = group.iter().map(|x| tape.mul(*x, *x)).collect();
                    let sum = tape.sum(&squares);
                    tape.require(tape.value(sum) > 2.0, "a small norm");
                    tape.map(sum, |x| (x.sqrt(), 0.5 / x.sqrt()))
                });
                squeezed(&norm, args)
            },
        ),
        row(
            Some(Op::LogSumExp),
            "log_sum_exp",
            some_dims,
            |t, args| ops::log_sum_exp(&t[0], args.to_vec()),
            |tape, x, args| {
                let powers = x[0].map(tape, |x| (x.exp(), x.exp()));
                let sums = powers.reduce(args, |group| tape.sum(&group));
                squeezed(&sums.map(tape, |x| (x.ln(), 1.0 / x)), args)
            },
        ),
    ]
}
