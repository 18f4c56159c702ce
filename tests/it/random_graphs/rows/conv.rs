//! Convolutions and transposed ones, of images and sequences, with channels first and last.

use candle_amp::ops::{self, channels_last};
use candle_amp::{Op, nn};
use candle_nn::Conv2dConfig;

use super::super::array::{Array, indices};
use super::super::draft::Draft;
use super::super::program::{Call, Row};
use super::super::tape::{Scalar, Tape};
use super::row;

/// Settings: stride, padding, dilation, groups or more output; whether channels are last, whether there is a bias.
fn settings(d: &mut Draft) -> Vec<usize> {
    let (stride, padding, dilation) = (d.range(1, 3), d.range(0, 3), d.range(1, 3));
    let (last, bias) = (usize::from(d.chance(0.4)), usize::from(d.chance(0.5)));
    vec![stride, padding, dilation, 1, last, bias]
}

/// The channels of `x`, and its sizes.
fn split(dims: &[usize], last: usize) -> (usize, Vec<usize>) {
    if last == 1 {
        (dims[dims.len() - 1], dims[1..dims.len() - 1].to_vec())
    } else {
        (dims[1], dims[2..].to_vec())
    }
}

fn conv(d: &mut Draft, x: usize, rank: usize) -> Option<Call> {
    let mut args = settings(d);
    let x = d.ranked(x, rank, |_| true)?;
    let (channels, sizes) = split(&d.dims(x), args[4]);
    let groups = if d.chance(0.3) { d.range(1, channels + 1) } else { 1 };
    if channels % groups != 0 {
        return None;
    }
    args[3] = groups;
    let out = groups * d.range(1, 3);
    let mut dims = vec![out, channels / groups];
    for size in sizes {
        let taps = d.range(1, 4);
        if args[2] * (taps - 1) + 1 > size + 2 * args[1] {
            return None;
        }
        dims.push(taps);
    }
    let mut inputs = vec![x, d.operand(&dims)?];
    if args[5] == 1 {
        inputs.push(d.operand(&[out])?);
    }
    Some((inputs, args))
}

fn transposed(d: &mut Draft, x: usize, rank: usize) -> Option<Call> {
    let mut args = settings(d);
    args[3] = if args[0] > 1 { d.range(0, 2) } else { 0 };
    let x = d.ranked(x, rank, |_| true)?;
    let (channels, sizes) = split(&d.dims(x), args[4]);
    let out = d.range(1, 4);
    let mut dims = vec![channels, out];
    for size in sizes {
        let taps = d.range(1, 4);
        if (size - 1) * args[0] + args[2] * (taps - 1) + args[3] < 2 * args[1] {
            return None;
        }
        dims.push(taps);
    }
    let mut inputs = vec![x, d.operand(&dims)?];
    if args[5] == 1 {
        inputs.push(d.operand(&[out])?);
    }
    Some((inputs, args))
}

/// `x` as channels first, of images.
fn images(x: &Array, last: usize) -> Array {
    let rank = x.dims.len();
    let mut order: Vec<usize> = (0..rank).collect();
    if last == 1 {
        order[1..].rotate_right(1);
    }
    let x = x.permute(&order);
    if rank == 4 { x } else { x.reshape(&[x.dims[0], x.dims[1], 1, x.dims[2]]) }
}

/// The way back.
fn restored(y: Array, rank: usize, last: usize) -> Array {
    let y = if rank == 4 { y } else { y.reshape(&[y.dims[0], y.dims[1], y.dims[3]]) };
    let mut order: Vec<usize> = (0..rank).collect();
    if last == 1 {
        order[1..].rotate_left(1);
    }
    y.permute(&order)
}

/// Padding of rows: sequences have none.
fn paddings(rank: usize, padding: usize) -> [usize; 2] {
    if rank == 4 { [padding; 2] } else { [0, padding] }
}

fn biased(tape: &mut Tape, y: Array, bias: Option<&Array>) -> Array {
    match bias {
        Some(bias) => {
            let bias = bias.reshape(&[1, bias.dims[0], 1, 1]);
            y.zip(&bias, |y, b| tape.sum(&[y, b]))
        }
        None => y,
    }
}

fn conv_of(tape: &mut Tape, t: &[Array], args: &[usize]) -> Array {
    let (rank, [stride, padding, dilation, groups]) =
        (t[0].dims.len(), [args[0], args[1], args[2], args[3]]);
    let (x, w) = (images(&t[0], args[4]), images(&t[1], 0));
    let pad = paddings(rank, padding);
    let size =
        |at: usize| (x.dims[at] + 2 * pad[at - 2] - dilation * (w.dims[at] - 1) - 1) / stride + 1;
    let (size, per_group) = ([size(2), size(3)], w.dims[0] / groups);
    let y = Array::from_fn([x.dims[0], w.dims[0], size[0], size[1]], |at| {
        let mut pairs: Vec<(Scalar, Scalar)> = Vec::new();
        for tap in indices(&w.dims[1..]) {
            let channel = at[1] / per_group * w.dims[1] + tap[0];
            let place = |i: usize| (at[2 + i] * stride + tap[1 + i] * dilation).checked_sub(pad[i]);
            if let (Some(row), Some(column)) = (place(0), place(1))
                && row < x.dims[2]
                && column < x.dims[3]
            {
                let weight = w.get(&[at[1], tap[0], tap[1], tap[2]]);
                pairs.push((x.get(&[at[0], channel, row, column]), weight));
            }
        }
        tape.dot(&pairs)
    });
    restored(biased(tape, y, t.get(2)), rank, args[4])
}

fn transposed_of(tape: &mut Tape, t: &[Array], args: &[usize]) -> Array {
    let (rank, [stride, padding, dilation, more]) =
        (t[0].dims.len(), [args[0], args[1], args[2], args[3]]);
    let (x, w) = (images(&t[0], args[4]), images(&t[1], 0));
    let pad = paddings(rank, padding);
    let size = |at: usize| match at == 2 && rank == 3 {
        true => 1,
        false => {
            (x.dims[at] - 1) * stride + dilation * (w.dims[at] - 1) + more + 1 - 2 * pad[at - 2]
        }
    };
    let dims = [x.dims[0], w.dims[1], size(2), size(3)];
    let mut pairs: Vec<Vec<(Scalar, Scalar)>> = vec![Vec::new(); dims.iter().product()];
    for from in indices(&x.dims) {
        for tap in indices(&w.dims[1..]) {
            let place =
                |i: usize| (from[2 + i] * stride + tap[1 + i] * dilation).checked_sub(pad[i]);
            if let (Some(row), Some(column)) = (place(0), place(1))
                && row < dims[2]
                && column < dims[3]
            {
                let at = ((from[0] * dims[1] + tap[0]) * dims[2] + row) * dims[3] + column;
                pairs[at].push((x.get(&from), w.get(&[from[1], tap[0], tap[1], tap[2]])));
            }
        }
    }
    let y = Array::new(dims, pairs.iter().map(|pairs| tape.dot(pairs)).collect());
    restored(biased(tape, y, t.get(2)), rank, args[4])
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(
            Some(Op::Conv1d),
            "conv1d",
            |d, x| conv(d, x, 3),
            |t, a| {
                let (stride, padding, dilation, groups) = (a[0], a[1], a[2], a[3]);
                let config =
                    nn::Conv1dConfig { stride, padding, dilation, groups, ..Default::default() };
                match a[4] {
                    0 => ops::conv1d(&t[0], &t[1], t.get(2), config),
                    _ => channels_last::conv1d(&t[0], &t[1], t.get(2), config),
                }
            },
            conv_of,
        ),
        row(
            Some(Op::Conv2d),
            "conv2d",
            |d, x| conv(d, x, 4),
            |t, a| {
                let (stride, padding, dilation, groups) = (a[0], a[1], a[2], a[3]);
                let config =
                    Conv2dConfig { stride, padding, dilation, groups, ..Default::default() };
                match a[4] {
                    0 => ops::conv2d(&t[0], &t[1], t.get(2), config),
                    _ => channels_last::conv2d(&t[0], &t[1], t.get(2), config),
                }
            },
            conv_of,
        ),
        row(
            Some(Op::ConvTranspose1d),
            "conv_transpose1d",
            |d, x| transposed(d, x, 3),
            |t, a| {
                let (stride, padding, dilation, output_padding) = (a[0], a[1], a[2], a[3]);
                let groups = 1;
                let config =
                    nn::ConvTranspose1dConfig { stride, padding, dilation, output_padding, groups };
                match a[4] {
                    0 => ops::conv_transpose1d(&t[0], &t[1], t.get(2), config),
                    _ => channels_last::conv_transpose1d(&t[0], &t[1], t.get(2), config),
                }
            },
            transposed_of,
        ),
        row(
            Some(Op::ConvTranspose2d),
            "conv_transpose2d",
            |d, x| transposed(d, x, 4),
            |t, a| {
                let (stride, padding, dilation, output_padding) = (a[0], a[1], a[2], a[3]);
                let config =
                    nn::ConvTranspose2dConfig { stride, padding, dilation, output_padding };
                match a[4] {
                    0 => ops::conv_transpose2d(&t[0], &t[1], t.get(2), config),
                    _ => channels_last::conv_transpose2d(&t[0], &t[1], t.get(2), config),
                }
            },
            transposed_of,
        ),
    ]
}
