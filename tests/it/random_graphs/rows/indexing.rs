//! Elements by number, sums into them, joining and repeating.

use candle_amp::{Op, ops};
use candle_core::{Result, Tensor};

use super::super::array::{Array, indices};
use super::super::draft::Draft;
use super::super::program::{Call, Row};
use super::row;

/// The number of a draw for element `at`: below `size`.
fn number(seed: usize, at: usize, size: usize) -> usize {
    (seed + 3 * at + at * at / 2) % size
}

/// Numbers of `dims`, each below `size`.
fn numbers(t: &Tensor, seed: usize, dims: &[usize], size: usize) -> Result<Tensor> {
    let count = dims.iter().product();
    let numbers = (0..count).map(|at| number(seed, at, size) as i64).collect();
    Tensor::from_vec::<_, i64>(numbers, dims, t.device())
}

/// A dimension, a seed, then the dimensions of the numbers.
fn draw(d: &mut Draft, x: usize) -> Option<Call> {
    let mut dims = d.dims(x);
    if dims.is_empty() {
        return None;
    }
    let dim = d.range(0, dims.len());
    for (at, size) in dims.iter_mut().enumerate() {
        *size = if at == dim { d.range(1, 5) } else { d.range(1, *size + 1) };
    }
    Some((vec![x], [vec![dim, d.range(0, 20)], dims].concat()))
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(
            Some(Op::IndexSelect),
            "ops_index_select",
            |d, x| {
                let dims = d.dims(x);
                if dims.is_empty() {
                    return None;
                }
                Some((vec![x], vec![d.range(0, dims.len()), d.range(0, 20), d.range(1, 5)]))
            },
            |t, args| {
                let ids = numbers(&t[0], args[1], &args[2..], t[0].dims()[args[0]])?;
                ops::index_select(&t[0], &ids, args[0])
            },
            |_, x, args| {
                let (mut dims, dim) = (x[0].dims.clone(), args[0]);
                let size = std::mem::replace(&mut dims[dim], args[2]);
                Array::from_fn(dims, |mut at| {
                    at[dim] = number(args[1], at[dim], size);
                    x[0].get(&at)
                })
            },
        )
        .exact(),
        row(
            Some(Op::Gather),
            "gather",
            draw,
            |t, args| {
                let ids = numbers(&t[0], args[1], &args[2..], t[0].dims()[args[0]])?;
                ops::gather(&t[0], &ids, args[0])
            },
            |_, x, args| {
                let mut count = 0..;
                Array::from_fn(&args[2..], |mut at| {
                    let place = count.next().expect("endless");
                    at[args[0]] = number(args[1], place, x[0].dims[args[0]]);
                    x[0].get(&at)
                })
            },
        )
        .exact(),
        row(
            Some(Op::ScatterAdd),
            "scatter_add",
            |d, x| {
                let (_, args) = draw(d, x)?;
                Some((vec![x, d.operand(&args[2..])?], args))
            },
            |t, args| {
                let ids = numbers(&t[0], args[1], &args[2..], t[0].dims()[args[0]])?;
                ops::scatter_add(&t[0], &ids, &t[1], args[0])
            },
            |tape, x, args| {
                let mut terms = vec![vec![]; x[0].at.len()];
                let places = indices(&x[0].dims);
                for (place, mut at) in indices(&args[2..]).into_iter().enumerate() {
                    let source = x[1].get(&at);
                    at[args[0]] = number(args[1], place, x[0].dims[args[0]]);
                    let to = places.iter().position(|place| *place == at).expect("a place");
                    terms[to].push(source);
                }
                let sums = x[0].at.iter().zip(&terms);
                let sums = sums.map(|(x, terms)| tape.sum(&[&[*x], &terms[..]].concat()));
                Array::new(x[0].dims.clone(), sums.collect())
            },
        ),
        row(
            Some(Op::Stack),
            "stack",
            |d, x| {
                let (dims, mut parts) = (d.dims(x), vec![x]);
                for _ in 0..d.range(0, 3) {
                    let part = if d.chance(0.3) { x } else { d.operand(&dims)? };
                    parts.insert(d.range(0, parts.len() + 1), part);
                }
                Some((parts, vec![d.range(0, dims.len() + 1)]))
            },
            |t, args| ops::stack(&t.iter().collect::<Vec<_>>(), args[0]),
            |_, x, args| {
                let mut dims = x[0].dims.clone();
                dims.insert(args[0], x.len());
                Array::from_fn(dims, |mut at| {
                    let part = at.remove(args[0]);
                    x[part].get(&at)
                })
            },
        )
        .exact(),
        row(
            Some(Op::BroadcastAs),
            "ops_broadcast_as",
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
            |t, args| ops::broadcast_as(&t[0], args),
            |_, x, args| x[0].broadcast(args),
        )
        .exact(),
        row(
            Some(Op::Cumsum),
            "cumsum",
            |d, x| {
                let rank = d.dims(x).len();
                if rank == 0 { None } else { Some((vec![x], vec![d.range(0, rank)])) }
            },
            |t, args| ops::cumsum(&t[0], args[0]),
            |tape, x, args| {
                Array::from_fn(x[0].dims.clone(), |mut at| {
                    let terms = (0..=at[args[0]]).map(|place| {
                        at[args[0]] = place;
                        x[0].get(&at)
                    });
                    tape.sum(&terms.collect::<Vec<_>>())
                })
            },
        ),
    ]
}
