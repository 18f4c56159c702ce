//! Statistics, cumulative sums, elements by number, joining and repeating.

use candle_amp::{Op, ops};
use candle_core::{D, Device, Result, Tensor};

use super::{Case, case};

fn ids(ids: &[i64], dims: &[usize]) -> Tensor {
    Tensor::new(ids, &Device::Cpu).unwrap().reshape(dims).unwrap()
}

/// `count` numbers below `size`, some often and some never.
fn many(count: i64, size: i64, dims: &[usize]) -> Tensor {
    ids(&(0..count).map(|i| i * i % 7 % size).collect::<Vec<_>>(), dims)
}

pub(super) fn cases() -> Vec<Case> {
    reductions().into_iter().chain(selections()).chain(joins()).collect()
}

fn reductions() -> Vec<Case> {
    vec![
        case(Op::Cumsum, "rows", &[&[3, 5]], |t| ops::cumsum(&t[0], 1)),
        case(Op::Cumsum, "columns", &[&[3, 5, 2]], |t| ops::cumsum(&t[0], 1)),
        case(Op::Cumsum, "first", &[&[7, 2]], |t| ops::cumsum(&t[0], 0)),
        case(Op::Cumsum, "one element", &[&[1, 1]], |t| ops::cumsum(&t[0], D::Minus1)),
        case(Op::Cumsum, "past a block", &[&[3, 261]], |t| ops::cumsum(&t[0], 1)),
        case(Op::Var, "all", &[&[3, 5]], |t| ops::var(&t[0])),
        case(Op::Var, "rows", &[&[3, 5]], |t| ops::var_dims(&t[0], D::Minus1)),
        case(Op::Var, "two of four", &[&[2, 3, 4, 5]], |t| ops::var_dims(&t[0], (1, 3))),
        case(Op::Var, "columns", &[&[7, 3]], |t| ops::var_keepdim(&t[0], 0)),
        case(Op::Var, "past a block", &[&[3, 1031]], |t| ops::var(&t[0])),
        case(Op::Norm, "all", &[&[3, 5]], |t| ops::norm(&t[0])),
        case(Op::Norm, "rows", &[&[3, 5]], |t| ops::norm_dims(&t[0], 1)),
        case(Op::Norm, "divisor", &[&[2, 7, 3]], |t| {
            // As by itself the quotient's derivatives overflow F16 for small numbers.
            ops::div(&t[0], &(ops::norm_keepdim(&t[0], 1)? + 0.5)?)
        })
        .within(8.0),
        case(Op::Norm, "one element", &[&[1, 1]], |t| ops::norm(&t[0])),
        case(Op::Norm, "past a block", &[&[3, 1031]], |t| ops::norm(&t[0])),
        case(Op::LogSumExp, "rows", &[&[3, 5]], |t| ops::log_sum_exp(&t[0], 1)),
        case(Op::LogSumExp, "two of three", &[&[2, 3, 5]], |t| ops::log_sum_exp(&t[0], (0, 2))),
        case(Op::LogSumExp, "one element", &[&[1, 1]], |t| ops::log_sum_exp(&t[0], 1)),
        case(Op::LogSumExp, "past a block", &[&[3, 1031]], |t| ops::log_sum_exp(&t[0], 1)),
    ]
}

fn selections() -> Vec<Case> {
    let select = |numbers: Tensor, dim: usize| {
        move |t: &[Tensor]| ops::index_select(&t[0], &numbers.to_device(t[0].device())?, dim)
    };
    let gather = |numbers: Tensor, dim: usize| {
        move |t: &[Tensor]| ops::gather(&t[0], &numbers.to_device(t[0].device())?, dim)
    };
    let add = |numbers: Tensor, dim: usize| {
        move |t: &[Tensor]| ops::scatter_add(&t[0], &numbers.to_device(t[0].device())?, &t[1], dim)
    };
    let (one, pair) = (ids(&[0], &[1, 1]), ids(&[2, 0, 2, 1, 1, 2], &[2, 3]));
    vec![
        case(Op::IndexSelect, "rows", &[&[5, 4]], select(ids(&[2, 0, 2, 4], &[4]), 0)),
        case(Op::IndexSelect, "middle", &[&[2, 5, 3]], select(ids(&[2, 0, 2, 4], &[4]), 1)),
        case(Op::IndexSelect, "one element", &[&[1]], select(ids(&[0], &[1]), 0)),
        case(Op::IndexSelect, "past a panel", &[&[3, 5]], select(many(70, 5, &[70]), 1)),
        case(Op::Gather, "columns", &[&[3, 4]], gather(pair.clone(), 0)),
        case(Op::Gather, "rows", &[&[2, 4]], gather(pair.clone(), 1)),
        case(Op::Gather, "fewer", &[&[4, 3, 4]], gather(many(12, 4, &[2, 3, 2]), 2)),
        case(Op::Gather, "one element", &[&[1, 1]], gather(one.clone(), 1)),
        case(Op::Gather, "past a panel", &[&[2, 5]], gather(many(140, 5, &[2, 70]), 1)),
        case(Op::ScatterAdd, "columns", &[&[4, 3], &[2, 3]], add(pair.clone(), 0)),
        case(Op::ScatterAdd, "rows", &[&[2, 4], &[2, 3]], add(pair, 1)),
        case(Op::ScatterAdd, "fewer", &[&[4, 3, 4], &[2, 3, 2]], add(many(12, 4, &[2, 3, 2]), 2)),
        case(Op::ScatterAdd, "one element", &[&[1, 1], &[1, 1]], add(one, 0)),
        case(Op::ScatterAdd, "past a panel", &[&[2, 5], &[2, 70]], add(many(140, 5, &[2, 70]), 1)),
    ]
}

fn joins() -> Vec<Case> {
    let stack = |dim: usize| {
        move |t: &[Tensor]| -> Result<Tensor> { ops::stack(&t.iter().collect::<Vec<_>>(), dim) }
    };
    let repeat = |dims: &'static [usize]| move |t: &[Tensor]| ops::broadcast_as(&t[0], dims);
    vec![
        case(Op::Stack, "first", &[&[2, 3], &[2, 3]], stack(0)),
        case(Op::Stack, "last", &[&[2, 3], &[2, 3], &[2, 3]], stack(2)),
        case(Op::Stack, "one", &[&[1, 1]], stack(1)),
        case(Op::Stack, "past a block", &[&[3, 1031], &[3, 1031]], stack(1)),
        case(Op::BroadcastAs, "token", &[&[1, 1, 3]], repeat(&[4, 1, 3])),
        case(Op::BroadcastAs, "inside", &[&[2, 1, 3]], repeat(&[5, 2, 4, 3])),
        case(Op::BroadcastAs, "as it is", &[&[2, 3]], repeat(&[2, 3])),
        case(Op::BroadcastAs, "past a block", &[&[3, 1]], repeat(&[2, 3, 1031])),
    ]
}
