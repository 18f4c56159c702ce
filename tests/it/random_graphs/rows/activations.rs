//! Functions of one number.

use std::f64::consts::FRAC_2_SQRT_PI;

use candle_amp::{Op, ops, random as generator};
use candle_core::Tensor;

use super::super::program::{Call, Row};
use super::{Draft, alone, row};
use crate::cases::table::pointwise;

/// The error function, as a series of positive terms: nothing cancels.
fn erf(x: f64) -> f64 {
    let z = x.abs();
    let (mut term, mut sum, mut odd) = (z, 0.0, 1.0);
    while term > sum * 1e-18 && odd < 600.0 {
        sum += term;
        odd += 2.0;
        term *= 2.0 * z * z / odd;
    }
    (FRAC_2_SQRT_PI * (-z * z).exp() * sum).copysign(x)
}

/// Value and derivative of the normal distribution.
fn normal(x: f64) -> (f64, f64) {
    let density = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    (0.5 * (1.0 + erf(x / std::f64::consts::SQRT_2)), density)
}

pub(super) fn sigmoid(x: f64) -> (f64, f64) {
    let s = 1.0 / (1.0 + (-x).exp());
    (s, s * (1.0 - s))
}

/// The hyperbolic tangent in gelu.
fn gelu_tangent(x: f64) -> (f64, f64) {
    let c = (2.0 / std::f64::consts::PI).sqrt();
    let t = (c * (x + 0.044715 * x * x * x)).tanh();
    (t, (1.0 - t * t) * c * (1.0 + 3.0 * 0.044715 * x * x))
}

fn mish(x: f64) -> (f64, f64) {
    let t = x.exp().ln_1p().tanh();
    (x * t, t + x * (1.0 - t * t) * sigmoid(x).0)
}

fn elu(x: f64, alpha: f64) -> (f64, f64) {
    if x > 0.0 { (x, 1.0) } else { (alpha * x.exp_m1(), alpha * x.exp()) }
}

/// The rows of the table of pointwise operators.
macro_rules! activations {
    ([] $(
        $(#[$doc:meta])* $name:ident => $op:ident ($($parameter:ident: $type:ty = $sample:literal),*),
        $policy:tt,
        { torch: $torch:literal, reference: $reference:literal, inputs: $low:literal, $high:literal; $($facts:tt)* },
        {
            cpu: |$number:ident| $of_number:expr, $slope_of_number:expr;
            candle: |$tensor:ident| $of_tensor:expr, $slope_of_tensor:expr;
            f64: |$x:ident| $value:expr, $derivative:expr;
            kinks: [$($kink:expr),*]; exact: $exact:literal;
        };
    )*) => {
        fn activations() -> Vec<Row> {
            vec![$({
                let row = row(
                    Some(Op::$op),
                    stringify!($name),
                    if $low <= -4.0 { alone } else { of_positive },
                    |t, _| ops::$name(&t[0] $(, $sample)*),
                    |tape, x, _| {
                        $(let $parameter: f64 = $sample;)*
                        x[0].each(|x| tape.kinked(x, &[$($kink),*], |$x: f64| ($value, $derivative)))
                    },
                );
                Row { exact: $exact, ..row }
            }),*]
        }
    };
}
pointwise!(activations []);

/// On a value above 0.
fn of_positive(d: &mut Draft, x: usize) -> Option<Call> {
    Some((vec![positive(d, x)?], vec![]))
}

pub(super) fn rows() -> Vec<Row> {
    let mut activations = activations();
    // By steps, as 1 and the tangent cancel in the tail.
    let gelu = activations.iter_mut().find(|row| row.op == Some(Op::GeluTanh)).expect("a row");
    gelu.reference = |tape, x, _| {
        x[0].each(|x| {
            let tangent = tape.map(x, gelu_tangent);
            let product = tape.mul(x, tangent);
            tape.linear(&[(x, 0.5), (product, 0.5)])
        })
    };
    activations.extend(others());
    activations
}

fn others() -> Vec<Row> {
    vec![
        row(
            Some(Op::Relu),
            "relu",
            alone,
            |t, _| ops::relu(&t[0]),
            |tape, x, _| {
                x[0].each(|x| tape.kinked(x, &[0.0], |x| (x.max(0.0), f64::from(x > 0.0))))
            },
        )
        .exact(),
        row(
            Some(Op::Dropout),
            "dropout",
            |d, x| Some((vec![x], vec![d.range(0, 1000), d.dims(x).iter().product()])),
            |t, args| dropout(&t[0], args[0]),
            |tape, x, args| {
                // Which are dropped is not computed but drawn.
                let ones =
                    Tensor::ones(args[1], candle_core::DType::F64, &candle_core::Device::Cpu);
                let kept = ones.and_then(|ones| dropout(&ones, args[0])).expect("a mask");
                let kept: Vec<f64> = kept.to_vec1().expect("a vector");
                let mut factors =
                    kept.into_iter().map(|kept| if kept > 0.0 { 4.0 / 3.0 } else { 0.0 });
                x[0].each(|x| tape.linear(&[(x, factors.next().expect("one each"))]))
            },
        ),
        row(
            Some(Op::Swiglu),
            "swiglu",
            |d, x| {
                let rank = d.range(1, 4);
                let x = d.ranked(x, rank, |dims| dims[dims.len() - 1] % 2 == 0)?;
                Some((vec![x], vec![]))
            },
            |t, _| ops::swiglu(&t[0]),
            |tape, x, _| {
                let last = x[0].dims.len() - 1;
                let half = x[0].dims[last] / 2;
                let silu = x[0].narrow(last, 0, half).map(tape, |x| {
                    let (s, slope) = sigmoid(x);
                    (x * s, s + x * slope)
                });
                silu.zip(&x[0].narrow(last, half, half), |a, b| tape.mul(a, b))
            },
        ),
        row(
            Some(Op::Prelu),
            "prelu",
            |d, x| {
                let rank = d.range(2, 5);
                let x = d.ranked(x, rank, |_| true)?;
                let channels = if d.chance(0.3) { 1 } else { d.dims(x)[1] };
                Some((vec![x, d.operand(&[channels])?], vec![]))
            },
            |t, _| ops::prelu(&t[0], &t[1]),
            |tape, x, _| {
                let mut dims = vec![1; x[0].dims.len()];
                dims[1] = x[1].dims[0];
                x[0].zip(&x[1].reshape(&dims), |x, slope| {
                    tape.keep_away(x, 0.0);
                    if tape.value(x) > 0.0 { x } else { tape.mul(x, slope) }
                })
            },
        )
        .mixed(),
    ]
}

fn dropout(x: &Tensor, seed: usize) -> candle_core::Result<Tensor> {
    let _fork = generator::fork_rng_guard();
    generator::manual_seed(seed as u64);
    ops::dropout(x, 0.25)
}

/// A value above 0, made of `x` by candle's operators.
pub(super) fn positive(d: &mut Draft, x: usize) -> Option<usize> {
    let square = d.push("sqr", &[x], &[])?;
    d.push("affine", &[square], &[2, 3])
}
