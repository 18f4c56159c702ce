//! Each pair of inputs in the same memory, and each input in every layout.

use candle_amp::{Op, ops};
use candle_core::{Result, Tensor};

use super::{Views, check};
use crate::cases::{self, Case};
use crate::util::{FLOATS, random};

/// The inputs, but for these places.
fn with(inputs: &[Tensor], places: &[(usize, Tensor)]) -> Vec<Tensor> {
    let mut inputs = inputs.to_vec();
    for (at, x) in places {
        inputs[*at] = x.clone();
    }
    inputs
}

/// As many elements of a vector as `like` has, from `start` on, in its shape.
fn part(x: &Tensor, start: usize, like: &Tensor) -> Result<Tensor> {
    x.narrow(0, start, like.elem_count())?.reshape(like.shape())
}

/// An operator of the crate that returns the same numbers.
fn through(x: &Tensor) -> Result<Tensor> {
    ops::leaky_relu(x, 1.0)
}

fn check_pair(case: &Case, i: usize, j: usize) -> Result<()> {
    for dtype in FLOATS {
        let inputs: Vec<Tensor> =
            case.inputs.iter().map(|x| x.to_dtype(dtype)).collect::<Result<_>>()?;
        let (a, b) = (&inputs[i], &inputs[j]);
        let what =
            |how| format!("{:?} {}, inputs {i} and {j}, {dtype:?}, {how}", case.op, case.name);
        if a.dims() == b.dims() {
            let views: &Views<'_> = &|t| Ok(with(t, &[(j, t[i].clone())]));
            check(&what("the same tensor"), case, &inputs, views, true)?;
            let views: &Views<'_> = &|t| {
                let shared = through(&t[i])?;
                Ok(with(t, &[(i, shared.clone()), (j, shared)]))
            };
            check(&what("the same output"), case, &inputs, views, true)?;
        }
        // One vector for both, which overlap in all but an element or two.
        let count = a.elem_count().max(b.elem_count()) + 1;
        let numbers = a.flatten_all()?;
        let numbers = Tensor::cat(&vec![numbers; count.div_ceil(a.elem_count())], 0)?;
        let roots = with(&inputs, &[(i, numbers.narrow(0, 0, count)?)]);
        let views: &Views<'_> =
            &|t| Ok(with(t, &[(i, part(&t[i], 0, a)?), (j, part(&t[i], 1, b)?)]));
        check(&what("overlapping"), case, &roots, views, true)?;
        let views: &Views<'_> = &|t| {
            let shared = through(&t[i])?;
            Ok(with(t, &[(i, part(&shared, 1, a)?), (j, part(&shared, 0, b)?)]))
        };
        check(&what("overlapping outputs"), case, &roots, views, true)?;
        let last = b.rank().saturating_sub(1);
        if last > 0 {
            let views: &Views<'_> = &|t| {
                let turned = b.transpose(0, last)?;
                let second = part(&t[i], 0, &turned)?.transpose(0, last)?;
                Ok(with(t, &[(i, part(&t[i], 0, a)?), (j, second)]))
            };
            check(&what("one of them transposed"), case, &roots, views, false)?;
        }
    }
    Ok(())
}

#[test]
fn inputs_that_share_memory_are_as_good_as_copies() -> Result<()> {
    for case in cases::all() {
        for j in 0..case.inputs.len() {
            for i in 0..j {
                check_pair(&case, i, j)?;
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Layout {
    /// The first and the last dimension are stored the other way around.
    Transposed,
    /// The last dimension is stored first, and the others after it in order.
    Rotated,
    /// The middle of a tensor that is longer at both ends of every dimension.
    Sliced,
    /// Every second element of the last dimension.
    Spaced,
    /// One index of the first dimension, repeated.
    First,
    /// One index of the last dimension, repeated.
    Last,
}

pub(super) const LAYOUTS: [Layout; 6] = [
    Layout::Transposed,
    Layout::Rotated,
    Layout::Sliced,
    Layout::Spaced,
    Layout::First,
    Layout::Last,
];

impl Layout {
    /// What to store for a view like `x`.
    pub(super) fn store(self, x: &Tensor) -> Result<Tensor> {
        let (last, dims) = (x.rank() - 1, x.dims());
        match self {
            Layout::Transposed => x.transpose(0, last)?.contiguous(),
            Layout::Rotated => x.permute(rotated(x.rank()))?.contiguous(),
            Layout::Sliced => {
                let wide: Vec<usize> = dims.iter().map(|size| size + 2).collect();
                // What lies around it is not 0, so that reading it shows.
                let padded = random(5, wide, x.dtype());
                let ranges: Vec<_> = dims.iter().map(|size| 1..size + 1).collect();
                padded.slice_assign(&ranges, x)
            }
            Layout::Spaced => {
                let pairs = Tensor::stack(&[x, &(x * 0.5)?], x.rank())?;
                pairs.contiguous()
            }
            Layout::First => x.narrow(0, 0, 1)?.contiguous(),
            Layout::Last => x.narrow(last, 0, 1)?.contiguous(),
        }
    }

    /// The view, of `dims`, of what was stored.
    pub(super) fn view(self, stored: &Tensor, dims: &[usize]) -> Result<Tensor> {
        match self {
            Layout::Transposed => stored.transpose(0, dims.len() - 1),
            Layout::Rotated => {
                let mut back = vec![0; dims.len()];
                rotated(dims.len()).into_iter().enumerate().for_each(|(at, dim)| back[dim] = at);
                stored.permute(back)
            }
            Layout::Sliced => dims
                .iter()
                .enumerate()
                .try_fold(stored.clone(), |x, (dim, &size)| x.narrow(dim, 1, size)),
            Layout::Spaced => stored.narrow(dims.len(), 0, 1)?.squeeze(dims.len()),
            Layout::First | Layout::Last => stored.broadcast_as(dims),
        }
    }
}

fn rotated(rank: usize) -> Vec<usize> {
    (0..rank).map(|dim| (dim + rank - 1) % rank).collect()
}

/// Whether a batch of equal rows has no variance, so that there is nothing to compare.
fn is_flat(case: &Case, layout: Layout, at: usize) -> bool {
    let repeats = matches!(layout, Layout::First | Layout::Last);
    let norms = [
        Op::BatchNorm,
        Op::BatchNormRelu,
        Op::BatchNormRelu6,
        Op::LayerNorm,
        Op::GroupNorm,
        Op::Var,
    ];
    repeats && at == 0 && norms.contains(&case.op)
}

#[test]
fn each_input_may_lie_in_any_layout() -> Result<()> {
    for case in cases::all() {
        for layout in LAYOUTS {
            for at in 0..case.inputs.len() {
                let dims = case.inputs[at].dims();
                if dims.is_empty() || is_flat(&case, layout, at) {
                    continue;
                }
                for dtype in FLOATS {
                    let inputs: Vec<Tensor> =
                        case.inputs.iter().map(|x| x.to_dtype(dtype)).collect::<Result<_>>()?;
                    let stored = layout.store(&inputs[at])?;
                    let what =
                        format!("{:?} {}, input {at}, {layout:?}, {dtype:?}", case.op, case.name);
                    let views: &Views<'_> = &|t| Ok(with(t, &[(at, layout.view(&t[at], dims)?)]));
                    check(&what, &case, &with(&inputs, &[(at, stored)]), views, false)?;
                }
            }
        }
    }
    Ok(())
}
