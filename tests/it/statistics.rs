//! Statistics, cumulative sums and elements by number: PyTorch's numbers, long sums, edges, errors.

use candle_amp::{GradScaler, ops};
use candle_core::{D, DType, Device, Result, Tensor, Var};

use crate::util::{FLOATS, assert_close, random, to_vec};

const CPU: Device = Device::Cpu;
const INF: f64 = f64::INFINITY;
const NAN: f64 = f64::NAN;

fn of(values: &[f64], dims: &[usize]) -> Tensor {
    Tensor::new(values, &CPU).unwrap().reshape(dims).unwrap()
}

/// The result, and the gradient of its sum weighted by `weights` in `x`.
fn both(
    x: &Tensor,
    weights: &[f64],
    f: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<[Vec<f64>; 2]> {
    let x = Var::from_tensor(x)?;
    let y = f(&x)?;
    let weights = of(weights, y.dims()).to_dtype(y.dtype())?;
    let store = ops::sum(&ops::mul(&y, &weights)?)?.backward()?;
    Ok([to_vec(&y), to_vec(store.get(&x).expect("a gradient"))])
}

#[track_caller]
fn check(got: [Vec<f64>; 2], expected: [&[f64]; 2]) {
    for (got, expected) in got.iter().zip(expected) {
        assert_eq!(got.len(), expected.len());
        for (a, b) in got.iter().zip(expected) {
            let same = (a - b).abs() <= 1e-11 || a == b || a.is_nan() && b.is_nan();
            assert!(same, "{got:?}, not {expected:?}");
        }
    }
}

/// Those of PyTorch 2.15, in double.
#[test]
fn statistics_are_pytorchs() -> Result<()> {
    let x = of(&[0.5, -1.25, 2.0, 3.0, 0.75, -0.5], &[2, 3]);
    let rows = &[1.0, -2.0];
    let grid = &[1.0, -2.0, 3.0, 0.5, 2.0, -1.0];
    check(both(&x, rows, |x| ops::var_dims(x, 1))?, VAR);
    check(both(&x, rows, |x| ops::log_sum_exp(x, D::Minus1))?, LOG_SUM_EXP);
    check(both(&x, rows, |x| ops::norm_dims(x, 1))?, NORM);
    let sums = [0.5, -0.75, 1.25, 3.0, 3.75, 3.25];
    check(both(&x, grid, |x| ops::cumsum(x, 1))?, [&sums, &[2.0, 1.0, 3.0, 1.5, 1.0, -1.0]]);
    let ids = Tensor::new(&[[0i64, 2], [1, 1]], &CPU)?;
    let taken = both(&x, &[1.0, -2.0, 3.0, 0.5], |x| ops::gather(x, &ids, 1))?;
    check(taken, [&[0.5, 2.0, 0.75, 0.75], &[1.0, 0.0, -2.0, 0.0, 3.5, 0.0]]);
    let source = of(&[10.0, 20.0, 30.0, 40.0], &[2, 2]);
    let sums = [10.5, -1.25, 22.0, 3.0, 70.75, -0.5];
    check(both(&x, grid, |x| ops::scatter_add(x, &ids, &source, 1))?, [&sums, grid]);
    let of_source = both(&source, grid, |source| ops::scatter_add(&x, &ids, source, 1))?;
    check(of_source, [&sums, &[1.0, 3.0, 2.0, 2.0]]);
    Ok(())
}

/// Beside an infinity all exponentials are nothing, also those that would overflow.
#[test]
fn large_numbers_beside_an_infinity_have_no_share() -> Result<()> {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        let x = of(&[INF, 1e30, 100.0, -INF], &[1, 4]).to_dtype(dtype)?;
        check(both(&x, &[1.0], |x| ops::log_sum_exp(x, 1))?, [&[INF], &[NAN, 0.0, 0.0, 0.0]]);
    }
    Ok(())
}

/// The mean of numbers far from 0 is rounded by as much as they differ.
#[test]
fn a_variance_far_from_zero_is_that_of_the_numbers() -> Result<()> {
    for (dtype, far, step) in [
        (DType::F32, 16_777_216.0, 2.0),
        (DType::F32, 1e4, 0.0009765625),
        (DType::F64, 1e12, 0.0001220703125),
    ] {
        let numbers: Vec<f64> = (0..33).map(|at| far + step * f64::from(at * at % 7)).collect();
        let x = of(&numbers, &[3, 11]).to_dtype(dtype)?;
        let [var, dx] = both(&x, &[1.0; 3], |x| ops::var_dims(x, 1))?;
        for row in 0..3 {
            let near: Vec<f64> = numbers[row * 11..][..11].iter().map(|x| x - far).collect();
            let mean = near.iter().sum::<f64>() / 11.0;
            let expected = near.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / 10.0;
            let epsilon = if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
            let close = (var[row] - expected).abs() <= 16.0 * epsilon * expected;
            assert!(close, "{dtype:?} {far}: {} not {expected}", var[row]);
            for (dx, near) in dx[row * 11..][..11].iter().zip(&near) {
                let expected = 2.0 * (near - mean) / 10.0;
                assert!((dx - expected).abs() <= 16.0 * epsilon * step, "{dx} {expected}");
            }
        }
    }
    Ok(())
}

const VAR: [&[f64]; 2] = [
    &[2.645833333333, 3.145833333333],
    &[
        0.083333333333,
        -1.666666666667,
        1.583333333333,
        -3.833333333333,
        0.666666666667,
        3.166666666667,
    ],
];
const LOG_SUM_EXP: [&[f64]; 2] = [
    &[2.232621983102, 3.127158158631],
    &[
        0.176820182107,
        0.030726740326,
        0.792453077566,
        -1.76118877596,
        -0.185627931293,
        -0.053183292747,
    ],
];
const NORM: [&[f64]; 2] = [
    &[2.410912690248, 3.132491021535],
    &[
        0.207390338946,
        -0.518475847365,
        0.829561355784,
        -1.915408522722,
        -0.478852130681,
        0.319234753787,
    ],
];

/// Those of PyTorch 2.15 too, but where all are -∞: its gradients are NaN.
#[test]
fn statistics_of_infinities_and_nan_are_pytorchs() -> Result<()> {
    for dtype in FLOATS {
        let x = of(&[-INF, -INF, INF, 1.0, NAN, 0.0, -INF, 2.0], &[4, 2]).to_dtype(dtype)?;
        let got = both(&x, &[1.0; 4], |x| ops::log_sum_exp(x, 1))?;
        check(got, [&[-INF, INF, NAN, 2.0], &[0.0, 0.0, NAN, 0.0, NAN, NAN, 0.0, 1.0]]);
        let x = of(&[0.0, 0.0, INF, 1.0, NAN, 0.0], &[3, 2]).to_dtype(dtype)?;
        let got = both(&x, &[1.0; 3], |x| ops::norm_dims(x, 1))?;
        check(got, [&[0.0, INF, NAN], &[0.0, 0.0, NAN, 0.0, NAN, NAN]]);
        let same = of(&[3.0, 3.0, NAN, 1.0], &[2, 2]).to_dtype(dtype)?;
        check(
            both(&same, &[1.0; 2], |x| ops::var_dims(x, 1))?,
            [&[0.0, NAN], &[0.0, 0.0, NAN, NAN]],
        );
    }
    Ok(())
}

/// Squares and sums that 16 bits do not hold, of results that they do.
#[test]
fn long_statistics_do_not_saturate() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let x = ((random(1, (3, 4099), DType::F64) * 0.125)? + 0.875)?.to_dtype(dtype)?;
        let large = (random(2, (3, 4099), DType::F64) * 250.0)?.to_dtype(dtype)?;
        let wide = |x: &Tensor| x.to_dtype(DType::F64);
        type Function = fn(&Tensor) -> Result<Tensor>;
        let functions: [(&str, Function, &Tensor); 4] = [
            ("norm", |x| ops::norm_dims(x, 1), &large),
            ("var", |x| ops::var_dims(x, 1), &large),
            ("log_sum_exp", |x| ops::log_sum_exp(x, 1), &x),
            ("cumsum", |x| ops::cumsum(x, 1), &x),
        ];
        for (name, f, x) in functions {
            assert_close(name, &f(x)?, &f(&wide(x)?)?, dtype, 1.0);
        }
        // Each in one gradient 4,099 times.
        let ones = |dims: &[usize]| Var::ones(dims, dtype, &CPU);
        let one = Tensor::zeros(4099, DType::U32, &CPU)?;
        let all = one.reshape((1, 4099))?;
        let gradient = |var: &Var, y: Tensor| {
            let store = ops::sum(&y)?.backward()?;
            Ok::<_, candle_core::Error>(to_vec(store.get(var).expect("a gradient")))
        };
        let expected = to_vec(&Tensor::new(&[4099f64, 0.0], &CPU)?.to_dtype(dtype)?);
        let var = ones(&[1, 2])?;
        assert_eq!(gradient(&var, ops::index_select(&var, &one, 1)?)?, expected);
        assert_eq!(gradient(&var, ops::gather(&var, &all, 1)?)?, expected);
        let var = ones(&[1])?;
        assert_eq!(gradient(&var, ops::broadcast_as(&var, (4099, 1))?)?, expected[..1]);
        let var = ones(&[4099])?;
        assert_eq!(gradient(&var, ops::cumsum(&var, 0)?)?[0], expected[0]);
        let zeros = Tensor::zeros((1, 2), dtype, &CPU)?;
        let sums = ops::scatter_add(&zeros, &all, &var.reshape((1, 4099))?, 1)?;
        assert_eq!(to_vec(&sums), expected);
    }
    Ok(())
}

/// A scaler gets what was summed, not what 16 bits hold of it.
#[test]
fn gradients_of_sums_reach_a_scaler_in_f32() -> Result<()> {
    let var = Var::ones((1, 2), DType::BF16, &CPU)?;
    let mut scaler = GradScaler::disabled();
    let ids = Tensor::zeros((1, 4099), DType::U32, &CPU)?;
    let sum = ops::sum(&ops::gather(&var, &ids, 1)?.to_dtype(DType::F32)?)?;
    scaler.scale(&sum)?.backward()?;
    assert_eq!(to_vec(&scaler.grad(&var)?.expect("a gradient")), [4099.0, 0.0]);
    Ok(())
}

#[test]
fn numbers_are_stacked() -> Result<()> {
    let parts = [1f32, 2.0].map(|x| Var::new(x, &CPU).unwrap());
    let y = ops::stack(&[&parts[0], &parts[1], &parts[0]], 0)?;
    assert_eq!(y.to_vec1::<f32>()?, [1.0, 2.0, 1.0]);
    let store = ops::sum(&ops::mul(&y, &Tensor::new(&[1f32, 10.0, 100.0], &CPU)?)?)?.backward()?;
    let gradient = |var| to_vec(store.get(var).expect("a gradient"));
    assert_eq!((gradient(&parts[0]), gradient(&parts[1])), (vec![101.0], vec![10.0]));
    Ok(())
}

/// The gradient of what something is added to is handed on. candle's own is 0 there.
#[test]
fn a_scatter_passes_the_gradient_of_what_it_adds_to() -> Result<()> {
    let ids = Tensor::new(&[1u32, 1, 0], &CPU)?;
    let source = Tensor::new(&[5f32, 6.0, 7.0], &CPU)?;
    let gradient = |f: &dyn Fn(&Tensor) -> Result<Tensor>| {
        let x = Var::new(&[1f32, 2.0, 3.0], &CPU)?;
        let store = f(&x)?.sum_all()?.backward()?;
        store.get(&x).expect("a gradient").to_vec1::<f32>()
    };
    assert_eq!(gradient(&|x| ops::scatter_add(x, &ids, &source, 0))?, [1.0; 3]);
    assert_eq!(
        gradient(&|x| x.scatter_add(&ids, &source, 0))?,
        [0.0, 0.0, 1.0],
        "candle is mended"
    );
    Ok(())
}

#[test]
fn errors_say_what_would_do() -> Result<()> {
    let message = |result: Result<Tensor>| result.unwrap_err().to_string();
    let x = random(1, (2, 3), DType::F32);
    let ids = |ids: &[i64], dims: &[usize]| Tensor::new(ids, &CPU).unwrap().reshape(dims).unwrap();
    let half = x.to_dtype(DType::F16)?;
    for (got, expected) in [
        (
            message(ops::var(&random(1, 1, DType::F32))),
            "var: x has shape [1], expected at least two",
        ),
        (message(ops::var_dims(&x, ())), "at least two elements for each variance"),
        (
            message(ops::log_sum_exp(&x.narrow(1, 0, 0)?, 1)),
            "log_sum_exp: x has shape [2, 0], expected at least one element for each result",
        ),
        (
            message(ops::index_select(&x, &ids(&[0, 3], &[2]), 1)),
            "index_select: the id at [1] is 3, expected one of 3 slices, from 0",
        ),
        (
            message(ops::index_select(&x, &ids(&[0, 1], &[1, 2]), 1)),
            "index_select: ids has shape [1, 2], expected (n)",
        ),
        (message(ops::index_select(&x, &x, 1)), "ids is F32, expected U8, U32 or I64 numbers of"),
        (
            message(ops::gather(&x, &ids(&[0, -1], &[2, 1]), 1)),
            "gather: the id at [1, 0] is -1, expected one of 3 elements, from 0",
        ),
        (
            message(ops::gather(&x, &ids(&[0, 1, 0], &[3, 1]), 1)),
            "gather: ids has shape [3, 1], expected [2, 3] or less, as x has, but for dimension 1",
        ),
        (
            message(ops::scatter_add(&x, &ids(&[0, 1], &[2, 1]), &x, 1)),
            "scatter_add: source has shape [2, 3], expected [2, 1]",
        ),
        (
            message(ops::scatter_add(&x, &ids(&[0; 6], &[2, 3]), &half, 1)),
            "scatter_add: source is F16, expected F32 as the first argument",
        ),
        (message(ops::stack(&[], 0)), "stack was given no tensors, expected at least one"),
        (
            message(ops::stack(&[&x, &x.t()?], 0)),
            "stack: a part has shape [3, 2], expected [2, 3], that of the first",
        ),
        (
            message(ops::broadcast_as(&x, (2, 4))),
            "broadcast_as: x has shape [2, 3], expected one that broadcasts to [2, 4]",
        ),
        (message(ops::cumsum(&ids(&[1, 2], &[2]), 0)), "cumsum: x is I64, expected F16, BF16, F32"),
    ] {
        assert!(got.contains(expected), "{got}");
    }
    assert!(ops::cumsum(&x, 2).is_err() && ops::stack(&[&x], 3).is_err());
    Ok(())
}

/// A mean is divided before it is rounded: 1/41 in F32 would make it another number, and a variance of it.
#[test]
fn equal_numbers_are_their_mean_and_have_no_variance() -> Result<()> {
    for count in [3, 41, 47, 55, 61, 82, 83, 1_000, 77_777] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for value in [1f32, 1e4 - 0.5] {
                let rows = Tensor::full(value, (count, 2), &CPU)?.to_dtype(dtype)?;
                let value = to_vec(&rows)[0];
                assert_eq!(to_vec(&ops::mean(&rows)?), [value], "{count} of {dtype:?}");
                assert_eq!(to_vec(&ops::mean_dims(&rows, 0)?), [value; 2], "{count} of {dtype:?}");
                let turned = rows.t()?.contiguous()?;
                assert_eq!(
                    to_vec(&ops::mean_dims(&turned, 1)?),
                    [value; 2],
                    "{count} of {dtype:?}"
                );
                let x = Var::from_tensor(&rows)?;
                let variance = ops::var(&x)?;
                assert_eq!(to_vec(&variance), [0.0], "{count} of {dtype:?}");
                let store = ops::sum(&variance)?.backward()?;
                let gradient = to_vec(store.get(&x).expect("a gradient"));
                assert!(gradient.iter().all(|&g| g == 0.0), "{count} of {dtype:?}");
            }
        }
    }
    Ok(())
}
