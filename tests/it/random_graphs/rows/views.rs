//! Views and copies, which are candle's but for one.

use candle_amp::{Op, ops};
use candle_core::Tensor;

use super::super::array::Array;
use super::super::interpret::DTYPES;
use super::super::program::Row;
use super::{alone, row};

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(
            Some(Op::Flatten),
            "flatten",
            |d, x| {
                let rank = d.range(2, 5);
                Some((vec![d.ranked(x, rank, |_| true)?], vec![]))
            },
            |t, _| ops::flatten(&t[0]),
            |_, x, _| x[0].reshape(&[x[0].dims[0], x[0].at.len() / x[0].dims[0]]),
        )
        .exact(),
        row(
            None,
            "reshape",
            |d, x| {
                let rank = d.range(1, 5);
                let view = d.ranked(x, rank, |_| true)?;
                let dims = d.dims(x);
                Some((vec![view], dims))
            },
            |t, args| t[0].reshape(args),
            |_, x, args| x[0].reshape(args),
        )
        .exact(),
        row(
            None,
            "transpose",
            |d, x| {
                let rank = d.dims(x).len();
                if rank < 2 {
                    return None;
                }
                Some((vec![x], vec![d.range(0, rank), d.range(0, rank)]))
            },
            |t, args| t[0].transpose(args[0], args[1]),
            |_, x, args| x[0].transpose(args[0], args[1]),
        )
        .exact(),
        row(
            None,
            "permute",
            |d, x| {
                let x = d.ranked(x, 3, |_| true)?;
                let orders = [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
                Some((vec![x], orders[d.range(0, 5)].to_vec()))
            },
            |t, args| t[0].permute(args),
            |_, x, args| x[0].permute(args),
        )
        .exact(),
        row(
            None,
            "narrow",
            |d, x| {
                let dims = d.dims(x);
                let wide: Vec<usize> = (0..dims.len()).filter(|&dim| dims[dim] > 2).collect();
                if wide.is_empty() {
                    return None;
                }
                let dim = wide[d.range(0, wide.len())];
                let start = d.range(0, dims[dim] - 1);
                Some((vec![x], vec![dim, start, d.range(1, dims[dim] - start + 1)]))
            },
            |t, args| t[0].narrow(args[0], args[1], args[2]),
            |_, x, args| x[0].narrow(args[0], args[1], args[2]),
        )
        .exact(),
        row(
            None,
            "broadcast_as",
            |d, x| {
                let mut dims = d.dims(x);
                for size in dims.iter_mut().filter(|size| **size == 1) {
                    *size = d.range(1, 4);
                }
                if d.chance(0.5) {
                    dims.insert(0, d.range(1, 4));
                }
                Some((vec![x], dims))
            },
            |t, args| t[0].broadcast_as(args),
            |_, x, args| x[0].broadcast(args),
        )
        .exact(),
        row(None, "contiguous", alone, |t, _| t[0].contiguous(), |_, x, _| x[0].clone()).exact(),
        row(None, "copy", alone, |t, _| t[0].copy(), |_, x, _| x[0].clone()).exact(),
        row(None, "detach", alone, |t, _| Ok(t[0].detach()), |_, x, _| x[0].clone()).exact().cuts(),
        row(
            None,
            "to_dtype",
            |d, x| {
                let wide = d.is_f64();
                Some((vec![x], vec![if wide { 3 } else { d.range(0, 3) }]))
            },
            |t, args| t[0].to_dtype(DTYPES[args[0]]),
            |_, x, _| x[0].clone(),
        )
        .exact(),
        row(
            None,
            "candle_cat",
            |d, x| {
                let dims = d.dims(x);
                if dims.is_empty() {
                    return None;
                }
                let (dim, other) = (d.range(0, dims.len()), d.operand(&dims)?);
                Some((vec![x, other, x], vec![dim]))
            },
            |t, args| Tensor::cat(t, args[0]),
            |_, x, args| Array::cat(&x.iter().collect::<Vec<_>>(), args[0]),
        )
        .exact(),
        row(
            None,
            "index_select",
            |d, x| {
                let dims = d.dims(x);
                if dims.is_empty() {
                    return None;
                }
                let (mut args, count) = (vec![d.range(0, dims.len())], d.range(1, 5));
                let size = dims[args[0]];
                args.extend((0..count).map(|_| d.range(0, size)));
                Some((vec![x], args))
            },
            |t, args| {
                let ids: Vec<u32> = args[1..].iter().map(|&id| id as u32).collect();
                t[0].contiguous()?.index_select(&Tensor::new(ids, t[0].device())?, args[0])
            },
            |_, x, args| {
                let mut dims = x[0].dims.clone();
                dims[args[0]] = args.len() - 1;
                Array::from_fn(dims, |mut at| {
                    at[args[0]] = args[1 + at[args[0]]];
                    x[0].get(&at)
                })
            },
        )
        .exact(),
    ]
}
