//! Products, sums, losses.

use candle_amp::{Op, ops};
use candle_core::{D, Tensor};

use super::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    let targets = |x: &Tensor| Tensor::new(&[2u32, 0, 4], x.device());
    vec![
        case(Op::Matmul, "matmul", &[&[3, 5], &[5, 2]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "batched", &[&[2, 3, 17], &[2, 17, 4]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "transposed", &[&[3, 5], &[4, 5]], |t| ops::matmul(&t[0], &t[1].t()?)),
        case(Op::Matmul, "shared", &[&[2, 3, 4], &[4, 5]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "broadcast", &[&[2, 1, 3, 4], &[1, 5, 4, 2]], |t| {
            ops::matmul(&t[0], &t[1])
        }),
        case(Op::Matmul, "shared left", &[&[3, 4], &[2, 4, 5]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "row", &[&[4], &[2, 4, 3]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "column", &[&[2, 3, 4], &[4]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Matmul, "dot", &[&[5], &[5]], |t| ops::matmul(&t[0], &t[1])),
        case(Op::Linear, "bias", &[&[3, 7], &[5, 7], &[5]], |t| {
            ops::linear(&t[0], &t[1], Some(&t[2]))
        }),
        case(Op::Linear, "3-D", &[&[2, 3, 9], &[4, 9]], |t| ops::linear(&t[0], &t[1], None)),
        case(Op::Softmax, "last", &[&[3, 5]], |t| ops::softmax(&t[0], 1)),
        case(Op::Softmax, "first", &[&[3, 5]], |t| ops::softmax(&t[0], 0)),
        case(Op::LogSoftmax, "last", &[&[3, 5]], |t| ops::log_softmax(&t[0], 1)),
        case(Op::Sum, "sum", &[&[3, 5]], |t| ops::sum(&t[0])),
        case(Op::Mean, "mean", &[&[3, 5]], |t| ops::mean(&t[0])),
        case(Op::Sum, "rows", &[&[3, 5]], |t| ops::sum_dims(&t[0], D::Minus1)),
        case(Op::Sum, "columns", &[&[3, 5]], |t| ops::sum_keepdim(&t[0], 0)),
        case(Op::Sum, "two of four", &[&[2, 3, 4, 5]], |t| ops::sum_dims(&t[0], (1, 3))),
        case(Op::Mean, "tokens", &[&[2, 5, 3]], |t| ops::mean_dims(&t[0], 1)),
        case(Op::Mean, "pixels", &[&[2, 3, 4, 5]], |t| ops::mean_keepdim(&t[0], (2, 3))),
        case(Op::Mean, "all of them", &[&[3, 5]], |t| ops::mean_dims(&t[0], (0, 1))),
        case(Op::Mean, "none of them", &[&[3, 5]], |t| ops::mean_dims(&t[0], ())),
        case(Op::CrossEntropy, "cross entropy", &[&[3, 5]], move |t| {
            ops::cross_entropy(&t[0], &targets(&t[0])?)
        }),
        case(Op::CrossEntropy, "smoothed", &[&[3, 5]], move |t| {
            ops::cross_entropy_smoothed(&t[0], &targets(&t[0])?, 0.1)
        }),
        case(Op::LinearCrossEntropy, "linear cross entropy", &[&[3, 7], &[5, 7]], move |t| {
            ops::linear_cross_entropy(&t[0], &t[1], None, &targets(&t[0])?)
        }),
        case(Op::LinearCrossEntropy, "bias", &[&[1, 3, 7], &[5, 7], &[5]], move |t| {
            let targets = targets(&t[0])?.unsqueeze(0)?;
            ops::linear_cross_entropy_smoothed(&t[0], &t[1], Some(&t[2]), &targets, 0.1)
        }),
        case(Op::Nll, "nll", &[&[3, 5]], move |t| ops::nll(&t[0], &targets(&t[0])?)),
        case(Op::Huber, "huber", &[&[3, 5], &[3, 5]], |t| ops::huber(&t[0], &t[1], 0.7)),
        case(Op::BinaryCrossEntropyWithLogit, "logits", &[&[3, 5], &[3, 5]], |t| {
            ops::binary_cross_entropy_with_logit(&t[0], &t[1])
        }),
        case(Op::BinaryCrossEntropy, "probabilities", &[&[3, 5], &[3, 5]], |t| {
            // From 1/4 to 3/4: away from where a logarithm is steep.
            let probability = |x: &Tensor| ops::add(&(x / 4.0)?, &(x.ones_like()? / 2.0)?);
            ops::binary_cross_entropy(&probability(&t[0])?, &t[1])
        }),
        case(Op::CrossEntropy, "pixels", &[&[2, 5, 3]], |t| {
            let targets = Tensor::new(&[[0u32, 4, 2], [1, 1, 3]], t[0].device())?;
            ops::cross_entropy(&t[0], &targets)
        }),
        case(Op::Nll, "pixels", &[&[1, 5, 3, 2]], |t| {
            let targets = Tensor::new(&[[[0u32, 4], [2, 1], [1, 3]]], t[0].device())?;
            ops::nll(&t[0], &targets)
        }),
        case(Op::L1, "l1", &[&[3, 5], &[3, 5]], |t| ops::l1(&t[0], &t[1])),
        case(Op::KlDiv, "kl_div", &[&[3, 5], &[3, 5]], |t| {
            // From 1/4 on, exactly: away from where a logarithm is steep.
            let least = (t[1].ones_like()? / 4.0)?;
            ops::kl_div(&t[0], &ops::maximum(&t[1].abs()?, &least)?)
        }),
        case(Op::Mse, "mse", &[&[3, 5], &[3, 5]], |t| ops::mse(&t[0], &t[1])),
    ]
}
