//! Of one element, and past every block: what the plain cases of other files leave out.

use candle_amp::{Op, ops, random as generator};
use candle_core::{Result, Tensor};
use candle_nn::Conv2dConfig;

use super::{Case, case};

type Unary = fn(&Tensor) -> Result<Tensor>;
type Binary = fn(&Tensor, &Tensor) -> Result<Tensor>;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let unary: [(Op, Unary); 8] = [
        (Op::Relu, ops::relu),
        (Op::Softmax, |x| ops::softmax(x, 1)),
        (Op::LogSoftmax, |x| ops::log_softmax(x, 1)),
        (Op::Sum, ops::sum),
        (Op::Mean, ops::mean),
        (Op::Flatten, ops::flatten),
        (Op::Cat, |x| ops::cat(&[x], 1)),
        (Op::Dropout, |x| {
            let _fork = generator::fork_rng_guard();
            generator::manual_seed(5);
            ops::dropout(x, 0.25)
        }),
    ];
    for (op, f) in unary {
        let sized = |name, dims: &[usize]| case(op, name, &[dims], move |t| f(&t[0]));
        cases.push(sized("one element", &[1, 1]));
        // The sum of that many logarithms is too large for the differences it is checked by.
        if op != Op::LogSoftmax {
            cases.push(sized("past a block", &[3, 1031]));
        }
    }
    let binary: [(Op, Binary); 14] = [
        (Op::Add, ops::add),
        (Op::Sub, ops::sub),
        (Op::Mul, ops::mul),
        (Op::Div, |a, b| ops::div(a, &ops::add(b, &(b.ones_like()? * 1.5)?)?)),
        (Op::AddRelu, |a, b| ops::add_relu(a, &(b + 1.0 / 3.0)?)),
        (Op::Maximum, |a, b| ops::maximum(a, &(b + 1.0 / 256.0)?)),
        (Op::Minimum, |a, b| ops::minimum(a, &(b + 1.0 / 256.0)?)),
        (Op::WhereCond, |a, b| ops::where_cond(&a.gt(0f64)?, a, b)),
        (Op::Mse, ops::mse),
        (Op::Huber, |a, b| ops::huber(a, b, 0.7)),
        (Op::BinaryCrossEntropyWithLogit, ops::binary_cross_entropy_with_logit),
        (Op::L1, |a, b| ops::l1(a, &(b + 1.0 / 256.0)?)),
        (Op::KlDiv, |a, b| ops::kl_div(a, &ops::maximum(&b.abs()?, &(b.ones_like()? / 4.0)?)?)),
        (Op::Cat, |a, b| ops::cat(&[a, b], 1)),
    ];
    for (op, f) in binary {
        let on = move |t: &[Tensor]| f(&t[0], &t[1]);
        cases.push(case(op, "one element", &[&[1, 1], &[1, 1]], on));
        cases.push(case(op, "past a block", &[&[3, 1031], &[3, 1031]], on));
    }
    cases.extend(others());
    cases
}

fn others() -> Vec<Case> {
    let classes = |x: &Tensor, n: usize| Tensor::from_vec((0..n as u32).collect(), n, x.device());
    let conv = |t: &[Tensor]| {
        let padding = t[1].dims()[2] / 2;
        ops::conv2d(&t[0], &t[1], None, Conv2dConfig { padding, ..Default::default() })
    };
    let linear = |t: &[Tensor]| ops::linear(&t[0], &t[1], Some(&t[2]));
    vec![
        case(Op::Matmul, "one element", &[&[1, 1], &[1, 1]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "past a block", &[&[67, 35], &[35, 3]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Linear, "one element", &[&[1, 1], &[1, 1], &[1]], linear),
        case(Op::Linear, "past a block", &[&[67, 35], &[3, 35], &[3]], linear),
        case(Op::Conv2d, "one element", &[&[1, 1, 1, 1], &[1, 1, 1, 1]], conv),
        case(Op::Conv2d, "past a tile", &[&[1, 2, 27, 29], &[3, 2, 3, 3]], conv),
        case(Op::MaxPool2d, "one element", &[&[1, 1, 1, 1]], |t| ops::max_pool2d(&t[0], 1, 1, 0)),
        case(Op::MaxPool2d, "past a block", &[&[1, 2, 33, 33]], |t| {
            ops::max_pool2d(&t[0], 2, 2, 0)
        }),
        case(Op::AvgPool2d, "one element", &[&[1, 1, 1, 1]], |t| ops::avg_pool2d(&t[0], 1, 1, 0)),
        case(Op::AvgPool2d, "past a block", &[&[1, 2, 33, 33]], |t| {
            ops::avg_pool2d(&t[0], 2, 2, 0)
        }),
        case(Op::GlobalAvgPool2d, "one element", &[&[1, 1, 1, 1]], |t| {
            ops::global_avg_pool2d(&t[0])
        }),
        case(Op::GlobalAvgPool2d, "past a block", &[&[1, 2, 33, 35]], |t| {
            ops::global_avg_pool2d(&t[0])
        }),
        case(Op::BatchNorm, "past a block", &[&[23, 3, 4, 5], &[3], &[3]], |t| {
            Ok(ops::batch_norm(&t[0], Some(&t[1]), Some(&t[2]), 1e-3)?.0)
        })
        .within(6.0),
        case(Op::Prelu, "one element", &[&[1, 1], &[1]], |t| ops::prelu(&t[0], &t[1])),
        case(Op::Prelu, "past a block", &[&[3, 1031], &[1]], |t| ops::prelu(&t[0], &t[1])),
        case(Op::Swiglu, "one gate", &[&[1, 2]], |t| ops::swiglu(&t[0])),
        case(Op::Swiglu, "past a block", &[&[3, 1030]], |t| ops::swiglu(&t[0])),
        case(Op::CrossEntropy, "one element", &[&[1, 1]], move |t| {
            ops::cross_entropy(&t[0], &classes(&t[0], 1)?)
        }),
        case(Op::CrossEntropy, "past a block", &[&[3, 1031]], move |t| {
            ops::cross_entropy(&t[0], &classes(&t[0], 3)?)
        }),
        case(Op::LinearCrossEntropy, "one element", &[&[1, 1], &[1, 1]], move |t| {
            ops::linear_cross_entropy(&t[0], &t[1], None, &classes(&t[0], 1)?)
        }),
        case(Op::LinearCrossEntropy, "past a block", &[&[3, 35], &[67, 35], &[67]], move |t| {
            ops::linear_cross_entropy(&t[0], &t[1], Some(&t[2]), &classes(&t[0], 3)?)
        })
        .within(34.0), // 67 terms that are equal are all rounded to one side, by half of an ulp
        case(Op::Nll, "one element", &[&[1, 1]], move |t| ops::nll(&t[0], &classes(&t[0], 1)?)),
        case(Op::Nll, "past a block", &[&[3, 1031]], move |t| ops::nll(&t[0], &classes(&t[0], 3)?)),
    ]
}
