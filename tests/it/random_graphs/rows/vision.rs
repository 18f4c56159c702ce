//! Pools and resampling.

use candle_amp::Op;
use candle_amp::ops::{self, channels_last};

use super::super::array::Array;
use super::super::draft::Draft;
use super::super::program::{Call, Row};
use super::super::tape::{Scalar, Tape};
use super::row;

/// Settings: kernel, stride, padding, whether channels are last.
fn pool(d: &mut Draft, x: usize) -> Option<Call> {
    let (kernel, stride, last) = (d.range(1, 4), d.range(1, 4), usize::from(d.chance(0.3)));
    let padding = d.range(0, kernel / 2 + 1);
    let first = 2 - last;
    let fits = move |dims: &[usize]| {
        dims[first..first + 2].iter().all(|size| size + 2 * padding >= kernel)
    };
    Some((vec![d.ranked(x, 4, fits)?], vec![kernel, stride, padding, last]))
}

/// `f` of the elements of each window that are there.
fn windows(x: &Array, args: &[usize], mut f: impl FnMut(Vec<Scalar>) -> Scalar) -> Array {
    let (kernel, stride, padding) = (args[0], args[1], args[2]);
    let x = if args[3] == 1 { x.permute(&[0, 3, 1, 2]) } else { x.clone() };
    let size = |at: usize| (x.dims[at] + 2 * padding - kernel) / stride + 1;
    let y = Array::from_fn([x.dims[0], x.dims[1], size(2), size(3)], |at| {
        let mut window = Vec::new();
        for (i, j) in (0..kernel * kernel).map(|tap| (tap / kernel, tap % kernel)) {
            let place = |at: usize, tap: usize| (at * stride + tap).checked_sub(padding);
            if let (Some(row), Some(column)) = (place(at[2], i), place(at[3], j))
                && row < x.dims[2]
                && column < x.dims[3]
            {
                window.push(x.get(&[at[0], at[1], row, column]));
            }
        }
        f(window)
    });
    if args[3] == 1 { y.permute(&[0, 2, 3, 1]) } else { y }
}

/// For each place of `to`, two of `from` and how much the second counts.
type Between = Vec<(usize, usize, f64)>;

fn between(from: usize, to: usize, corners: bool, ratio: f64) -> Between {
    let one = |at: usize| {
        let place = match corners {
            true if to > 1 => at as f64 * (from - 1) as f64 / (to - 1) as f64,
            true => 0.0,
            false => ((at as f64 + 0.5) * ratio - 0.5).max(0.0),
        };
        let low = (place.floor() as usize).min(from - 1);
        (low, (low + 1).min(from - 1), place - low as f64)
    };
    (0..to).map(one).collect()
}

fn bilinear(tape: &mut Tape, x: &Array, rows: &Between, columns: &Between) -> Array {
    Array::from_fn([x.dims[0], x.dims[1], rows.len(), columns.len()], |at| {
        let ((up, down, v), (left, right, h)) = (rows[at[2]], columns[at[3]]);
        let part = |row, column| x.get(&[at[0], at[1], row, column]);
        tape.linear(&[
            (part(up, left), (1.0 - v) * (1.0 - h)),
            (part(up, right), (1.0 - v) * h),
            (part(down, left), v * (1.0 - h)),
            (part(down, right), v * h),
        ])
    })
}

pub(super) fn rows() -> Vec<Row> {
    vec![
        row(
            Some(Op::MaxPool2d),
            "max_pool2d",
            pool,
            |t, a| match a[3] {
                0 => ops::max_pool2d(&t[0], a[0], a[1], a[2]),
                _ => channels_last::max_pool2d(&t[0], a[0], a[1], a[2]),
            },
            |tape, x, args| windows(&x[0], args, |window| tape.max(&window)),
        )
        .exact(),
        row(
            Some(Op::AvgPool2d),
            "avg_pool2d",
            pool,
            |t, a| match a[3] {
                0 => ops::avg_pool2d(&t[0], a[0], a[1], a[2]),
                _ => channels_last::avg_pool2d(&t[0], a[0], a[1], a[2]),
            },
            |tape, x, args| {
                let part = 1.0 / (args[0] * args[0]) as f64;
                windows(&x[0], args, |window| {
                    tape.linear(&window.into_iter().map(|x| (x, part)).collect::<Vec<_>>())
                })
            },
        ),
        row(
            Some(Op::GlobalAvgPool2d),
            "global_avg_pool2d",
            |d, x| Some((vec![d.ranked(x, 4, |_| true)?], vec![usize::from(d.chance(0.3))])),
            |t, a| match a[0] {
                0 => ops::global_avg_pool2d(&t[0]),
                _ => channels_last::global_avg_pool2d(&t[0]),
            },
            |tape, x, args| {
                let (over, channels) = if args[0] == 0 { ([2, 3], 1) } else { ([1, 2], 3) };
                let dims = [x[0].dims[0], x[0].dims[channels]];
                x[0].reduce(&over, |group| tape.mean(&group)).reshape(&dims)
            },
        ),
        row(
            Some(Op::UpsampleNearest1d),
            "upsample_nearest1d",
            |d, x| Some((vec![d.ranked(x, 3, |_| true)?], vec![d.range(1, 8)])),
            |t, a| ops::upsample_nearest1d(&t[0], a[0]),
            |_, x, args| {
                let dims = &x[0].dims;
                Array::from_fn([dims[0], dims[1], args[0]], |at| {
                    x[0].get(&[at[0], at[1], at[2] * dims[2] / args[0]])
                })
            },
        )
        .exact(),
        row(
            Some(Op::UpsampleNearest2d),
            "upsample_nearest2d",
            |d, x| Some((vec![d.ranked(x, 4, |_| true)?], vec![d.range(1, 6), d.range(1, 6)])),
            |t, a| ops::upsample_nearest2d(&t[0], a[0], a[1]),
            |_, x, args| {
                let dims = &x[0].dims;
                Array::from_fn([dims[0], dims[1], args[0], args[1]], |at| {
                    let (row, column) = (at[2] * dims[2] / args[0], at[3] * dims[3] / args[1]);
                    x[0].get(&[at[0], at[1], row, column])
                })
            },
        )
        .exact(),
        row(
            Some(Op::UpsampleBilinear2d),
            "upsample_bilinear2d",
            |d, x| {
                let args = vec![d.range(1, 6), d.range(1, 6), d.range(0, 2)];
                Some((vec![d.ranked(x, 4, |_| true)?], args))
            },
            |t, a| ops::upsample_bilinear2d(&t[0], a[0], a[1], a[2] == 1),
            |tape, x, args| {
                let side = |from: usize, to: usize| {
                    between(from, to, args[2] == 1, from as f64 / to as f64)
                };
                let (rows, columns) = (side(x[0].dims[2], args[0]), side(x[0].dims[3], args[1]));
                bilinear(tape, &x[0], &rows, &columns)
            },
        ),
        row(
            Some(Op::UpsampleBilinear2d),
            "upsample_bilinear2d_with_scale",
            // Of quarters, and none that leaves a size as it is: what becomes of that differs from PyTorch's CPU.
            |d, x| {
                let args = vec![d.range(5, 11), d.range(5, 11), d.range(0, 2)];
                let (h, w) = (args[0], args[1]);
                let fits =
                    move |dims: &[usize]| dims[2] * h / 4 > dims[2] && dims[3] * w / 4 > dims[3];
                Some((vec![d.ranked(x, 4, fits)?], args))
            },
            |t, a| {
                let (h, w) = (a[0] as f64 / 4.0, a[1] as f64 / 4.0);
                ops::upsample_bilinear2d_with_scale(&t[0], h, w, a[2] == 1)
            },
            |tape, x, args| {
                let side = |from: usize, quarters: usize| {
                    between(from, from * quarters / 4, args[2] == 1, 4.0 / quarters as f64)
                };
                let (rows, columns) = (side(x[0].dims[2], args[0]), side(x[0].dims[3], args[1]));
                bilinear(tape, &x[0], &rows, &columns)
            },
        ),
    ]
}
