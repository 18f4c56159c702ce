//! Functions of one number.

use candle_amp::{Op, ops, random as generator};
use candle_core::Tensor;

use super::super::program::Row;
use super::{alone, row};

/// The error function, as a series of positive terms: nothing cancels.
fn erf(x: f64) -> f64 {
    let z = x.abs();
    let (mut term, mut sum, mut odd) = (z, 0.0, 1.0);
    while term > sum * 1e-18 && odd < 600.0 {
        sum += term;
        odd += 2.0;
        term *= 2.0 * z * z / odd;
    }
    (2.0 / std::f64::consts::PI.sqrt() * (-z * z).exp() * sum).copysign(x)
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

macro_rules! curve {
    ($op:ident, $name:literal, [$($kink:literal),*], $run:expr, $f:expr) => {
        row(
            Some(Op::$op),
            $name,
            alone,
            |t, _| $run(&t[0]),
            |tape, x, _| x[0].each(|x| tape.kinked(x, &[$($kink),*], $f)),
        )
    };
}

macro_rules! of_positive {
    ($op:ident, $name:literal, $run:expr, $f:expr) => {
        row(
            Some(Op::$op),
            $name,
            |d, x| Some((vec![positive(d, x)?], vec![])),
            |t, _| $run(&t[0]),
            |tape, x, _| x[0].map(tape, $f),
        )
    };
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        curve!(Relu, "relu", [0.0], ops::relu, |x| (x.max(0.0), f64::from(x > 0.0))).exact(),
        curve!(Relu6, "relu6", [0.0, 6.0], ops::relu6, |x| {
            (x.clamp(0.0, 6.0), f64::from(x > 0.0 && x < 6.0))
        })
        .exact(),
        curve!(Relu2, "relu2", [], ops::relu2, |x| (x.max(0.0).powi(2), 2.0 * x.max(0.0))),
        row(
            Some(Op::GeluTanh),
            "gelu_tanh",
            alone,
            |t, _| ops::gelu_tanh(&t[0]),
            // By steps, as 1 and the tangent cancel in the tail.
            |tape, x, _| {
                x[0].each(|x| {
                    let tangent = tape.map(x, gelu_tangent);
                    let product = tape.mul(x, tangent);
                    tape.linear(&[(x, 0.5), (product, 0.5)])
                })
            },
        ),
        curve!(GeluErf, "gelu_erf", [], ops::gelu_erf, |x| {
            let (p, density) = normal(x);
            (x * p, p + x * density)
        }),
        curve!(Silu, "silu", [], ops::silu, |x| {
            let (s, slope) = sigmoid(x);
            (x * s, s + x * slope)
        }),
        curve!(Sigmoid, "sigmoid", [], ops::sigmoid, sigmoid),
        curve!(Tanh, "tanh", [], ops::tanh, |x| (x.tanh(), 1.0 - x.tanh().powi(2))),
        curve!(HardSigmoid, "hard_sigmoid", [-3.0, 3.0], ops::hard_sigmoid, |x| {
            ((x / 6.0 + 0.5).clamp(0.0, 1.0), if x.abs() < 3.0 { 1.0 / 6.0 } else { 0.0 })
        }),
        curve!(HardSwish, "hard_swish", [-3.0, 3.0], ops::hard_swish, |x| {
            let slope = if x.abs() < 3.0 { x / 3.0 + 0.5 } else { f64::from(x > 0.0) };
            (x * (x / 6.0 + 0.5).clamp(0.0, 1.0), slope)
        }),
        curve!(Mish, "mish", [], ops::mish, mish),
        curve!(Softplus, "softplus", [], ops::softplus, |x| (x.exp().ln_1p(), sigmoid(x).0)),
        curve!(Elu, "elu", [0.0], |x| ops::elu(x, 0.75), |x| elu(x, 0.75)),
        curve!(Selu, "selu", [0.0], |x| ops::selu(x, 1.5, 1.25), |x| {
            let (value, slope) = elu(x, 1.5);
            (1.25 * value, 1.25 * slope)
        }),
        curve!(LeakyRelu, "leaky_relu", [0.0], |x| ops::leaky_relu(x, 0.25), |x| {
            if x > 0.0 { (x, 1.0) } else { (0.25 * x, 0.25) }
        }),
        curve!(Exp, "exp", [], ops::exp, |x| (x.exp(), x.exp())),
        curve!(Square, "square", [], ops::square, |x| (x * x, 2.0 * x)),
        curve!(Abs, "abs", [0.0], ops::abs, |x| (x.abs(), x.signum())).exact(),
        curve!(Neg, "neg", [], ops::neg, |x| (-x, -1.0)).exact(),
        curve!(Affine, "affine", [], |x| ops::affine(x, -0.75, 0.3), |x| (0.3 - 0.75 * x, -0.75)),
        curve!(Clamp, "clamp", [-0.75, 1.25], |x| ops::clamp(x, -0.75, 1.25), |x| {
            (x.clamp(-0.75, 1.25), f64::from((-0.75..=1.25).contains(&x)))
        }),
        curve!(Sin, "sin", [], ops::sin, |x| (x.sin(), x.cos())),
        curve!(Cos, "cos", [], ops::cos, |x| (x.cos(), -x.sin())),
        curve!(Erf, "erf", [], ops::erf, |x| {
            (erf(x), 2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp())
        }),
        of_positive!(Sqrt, "sqrt", ops::sqrt, |x| (x.sqrt(), 0.5 / x.sqrt())),
        of_positive!(Rsqrt, "rsqrt", ops::rsqrt, |x| (1.0 / x.sqrt(), -0.5 / (x * x.sqrt()))),
        of_positive!(Recip, "recip", ops::recip, |x| (1.0 / x, -1.0 / (x * x))),
        of_positive!(Powf, "powf", |x| ops::powf(x, 1.7), |x| (x.powf(1.7), 1.7 * x.powf(0.7))),
        of_positive!(Log1p, "log1p", ops::log1p, |x| (x.ln_1p(), 1.0 / (1.0 + x))),
        row(
            Some(Op::Log),
            "log",
            |d, x| Some((vec![positive(d, x)?], vec![])),
            |t, _| ops::log(&t[0]),
            |tape, x, _| x[0].map(tape, |x| (x.ln(), 1.0 / x)),
        ),
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
pub(super) fn positive(d: &mut super::Draft, x: usize) -> Option<usize> {
    let square = d.push("sqr", &[x], &[])?;
    d.push("affine", &[square], &[2, 3])
}
