//! candle's own arithmetic.

use candle_core::{DType, Tensor, Var};

use super::super::array::Array;
use super::super::program::Row;
use super::activations::{positive, sigmoid};
use super::pairs::{self, add, div, mul, sub};
use super::{alone, row};

/// A reciprocal of `factor`: candle's backward rounds each of several steps, and numbers as large as 1.
macro_rules! curve {
    ($name:literal, $draw:expr, [$($kink:literal),*], $run:expr, $f:expr) => {
        row(
            None,
            $name,
            $draw,
            |t, _| $run(&t[0]),
            |tape, x, _| {
                tape.backward *= 3.0;
                x[0].each(|x| tape.kinked(x, &[$($kink),*], $f))
            },
        )
    };
}

fn selects(tape: &mut super::Tape, x: &[Array], larger: bool) -> Array {
    x[0].zip(&x[1], |a, b| {
        let gap = tape.sub(a, b);
        tape.keep_away(gap, 0.0);
        if (tape.value(gap) > 0.0) == larger { a } else { b }
    })
}

pub(super) fn rows() -> Vec<Row> {
    let plain = pairs::pair;
    vec![
        row(None, "candle_add", plain, |t, _| t[0].broadcast_add(&t[1]), add),
        row(None, "candle_sub", plain, |t, _| t[0].broadcast_sub(&t[1]), sub),
        row(None, "candle_mul", plain, |t, _| t[0].broadcast_mul(&t[1]), mul),
        row(
            None,
            "candle_div",
            pairs::quotient,
            |t, _| t[0].broadcast_div(&t[1]),
            |tape, x, a| {
                tape.backward *= 3.0;
                div(tape, x, a)
            },
        ),
        row(
            None,
            "maximum",
            plain,
            |t, _| t[0].broadcast_maximum(&t[1]),
            |tape, x, _| selects(tape, x, true),
        )
        .exact(),
        row(
            None,
            "minimum",
            plain,
            |t, _| t[0].broadcast_minimum(&t[1]),
            |tape, x, _| selects(tape, x, false),
        )
        .exact(),
        row(
            None,
            "candle_matmul",
            pairs::product,
            // BF16 products are not everywhere in candle.
            |t, _| match t[0].dtype() {
                DType::BF16 => {
                    let [a, b] = [0, 1].map(|i| t[i].to_dtype(DType::F32));
                    a?.contiguous()?.matmul(&b?.contiguous()?)?.to_dtype(DType::BF16)
                }
                _ => t[0].contiguous()?.matmul(&t[1].contiguous()?),
            },
            pairs::matmul,
        ),
        row(
            None,
            "affine",
            |d, x| Some((vec![x], vec![d.range(1, 8), d.range(0, 8)])),
            |t, a| t[0].affine(a[0] as f64 / 4.0, a[1] as f64 / 4.0),
            |tape, x, a| {
                let offset = tape.constant(1.0);
                x[0].each(|x| tape.linear(&[(x, a[0] as f64 / 4.0), (offset, a[1] as f64 / 4.0)]))
            },
        ),
        curve!("sqr", alone, [], Tensor::sqr, |x| (x * x, 2.0 * x)),
        curve!("candle_exp", alone, [], Tensor::exp, |x| (x.exp(), x.exp())),
        curve!("sin", alone, [], Tensor::sin, |x| (x.sin(), x.cos())),
        curve!("cos", alone, [], Tensor::cos, |x| (x.cos(), -x.sin())),
        curve!("neg", alone, [], Tensor::neg, |x| (-x, -1.0)),
        curve!("abs", alone, [0.0], Tensor::abs, |x| (x.abs(), x.signum())),
        curve!("candle_relu", alone, [0.0], Tensor::relu, |x| (x.max(0.0), f64::from(x > 0.0))),
        curve!("candle_tanh", alone, [], Tensor::tanh, |x| (x.tanh(), 1.0 - x.tanh().powi(2))),
        curve!("candle_silu", alone, [], Tensor::silu, |x| {
            let (s, slope) = sigmoid(x);
            (x * s, s + x * slope)
        }),
        curve!("candle_sigmoid", alone, [], candle_nn::ops::sigmoid, sigmoid),
        curve!("powf", alone, [], |x: &Tensor| x.powf(3.0), |x| (x.powi(3), 3.0 * x * x)),
        curve!("sqrt", |d, x| Some((vec![positive(d, x)?], vec![])), [], Tensor::sqrt, |x| {
            (x.sqrt(), 0.5 / x.sqrt())
        }),
        curve!("recip", |d, x| Some((vec![positive(d, x)?], vec![])), [], Tensor::recip, |x| {
            (1.0 / x, -1.0 / (x * x))
        }),
        curve!("candle_log", |d, x| Some((vec![positive(d, x)?], vec![])), [], Tensor::log, |x| {
            (x.ln(), 1.0 / x)
        }),
        row(
            None,
            "sum_all",
            alone,
            |t, _| t[0].sum_all(),
            |tape, x, _| Array::new([], vec![tape.sum(&x[0].at)]),
        ),
        row(
            None,
            "mean_all",
            alone,
            |t, _| t[0].mean_all(),
            |tape, x, _| {
                tape.backward *= 3.0;
                Array::new([], vec![tape.mean(&x[0].at)])
            },
        ),
        row(
            None,
            "candle_sum_keepdim",
            |d, x| {
                let rank = d.dims(x).len();
                if rank == 0 { None } else { Some((vec![x], vec![d.range(0, rank)])) }
            },
            |t, a| t[0].sum_keepdim(a[0]),
            |tape, x, a| x[0].reduce(a, |group| tape.sum(&group)),
        ),
        row(
            None,
            "max_keepdim",
            |d, x| {
                let rank = d.dims(x).len();
                if rank == 0 { None } else { Some((vec![x], vec![d.range(0, rank)])) }
            },
            // candle divides by the stride, which is 0 in a dimension of one that `broadcast_as` made.
            |t, a| t[0].force_contiguous()?.max_keepdim(a[0]),
            |tape, x, a| x[0].reduce(a, |group| tape.max(&group)),
        )
        .exact(),
        row(
            None,
            "where_cond",
            |d, x| {
                let dims = d.dims(x);
                Some((vec![x, d.operand(&dims)?], vec![]))
            },
            |t, _| {
                let count = t[0].elem_count();
                let mask: Vec<u8> = (0..count).map(|at| u8::from(at % 3 == 0)).collect();
                Tensor::from_vec(mask, t[0].shape(), t[0].device())?.where_cond(&t[0], &t[1])
            },
            |_, x, _| {
                let mut at = 0..;
                let other = x[1].reshape(&x[0].dims);
                x[0].zip(&other, |a, b| if at.next().expect("endless") % 3 == 0 { a } else { b })
            },
        )
        .exact(),
        row(
            None,
            "candle_avg_pool2d",
            |d, x| {
                let k = d.range(1, 3);
                Some((
                    vec![d.ranked(x, 4, move |dims| dims[2] % k == 0 && dims[3] % k == 0)?],
                    vec![k],
                ))
            },
            |t, a| t[0].avg_pool2d(a[0]),
            |tape, x, a| {
                tape.backward *= 3.0;
                let k = a[0];
                let dims = [x[0].dims[0], x[0].dims[1], x[0].dims[2] / k, x[0].dims[3] / k];
                Array::from_fn(dims, |at| {
                    let place = |tap: usize| (k * at[2] + tap / k, k * at[3] + tap % k);
                    let taps = (0..k * k).map(place).map(|(i, j)| x[0].get(&[at[0], at[1], i, j]));
                    tape.mean(&taps.collect::<Vec<_>>())
                })
            },
        ),
        row(
            None,
            "fresh_variable",
            // A variable that nobody asks for: its graph ends here.
            alone,
            |t, _| Ok(Var::from_tensor(&t[0].detach().force_contiguous()?)?.as_tensor().clone()),
            |_, x, _| x[0].clone(),
        )
        .exact()
        .cuts(),
    ]
}
