use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::elementwise::testing::*;

fn softmax(x: &Tensor, out: DType) -> Result<Tensor> {
    super::softmax(x, x.rank() - 1, out)
}

fn softmax_backward(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    super::softmax_backward(y, grad, y.rank() - 1)
}

fn log_softmax(x: &Tensor, out: DType) -> Result<Tensor> {
    super::log_softmax(x, x.rank() - 1, out)
}

fn log_softmax_backward(y: &Tensor, grad: &Tensor, out: DType) -> Result<Tensor> {
    super::log_softmax_backward(y, grad, y.rank() - 1, out)
}

const SHAPES: [&[usize]; 7] =
    [&[1, 1], &[3, 17], &[2, 3, 33], &[1025, 3], &[5, 1025], &[3, 4099], &[300, 130]];

fn by_row(x: &Tensor, f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let columns = *x.dims().last().unwrap();
    values(x).chunks(columns).flat_map(f).collect()
}

fn naive_softmax(row: &[f64]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|x| x.exp()).sum();
    row.iter().map(|x| x.exp() / sum).collect()
}

#[test]
fn forward_matches_a_loop() {
    for dtype in DTYPES {
        for out in DTYPES {
            for shape in SHAPES {
                let x = strided(shape, dtype, 1);
                let count = 8.0 * (epsilon(DType::F32) / epsilon(out)).max(1.0);
                let count = if dtype == DType::F64 { 64.0 } else { count };
                let expected = by_row(&x, naive_softmax);
                let y = softmax(&x, out).unwrap();
                assert_eq!((y.dtype(), y.dims()), (out, shape));
                assert_close(&y, &expected, count);
                assert_close(&portable::softmax(&x, out).unwrap(), &expected, 2.0 * count);
                let expected: Vec<f64> = expected.iter().map(|y| y.ln()).collect();
                let y = log_softmax(&x, out).unwrap();
                if expected.len() > 1 {
                    assert_eq!(y.dtype(), out);
                    assert_close(&y, &expected, count);
                    assert_close(&portable::log_softmax(&x, out).unwrap(), &expected, 2.0 * count);
                }
            }
        }
    }
}

#[test]
fn gradients_are_slopes() {
    let (x, grad) = (random(&[3, 17], DType::F64, 2), random(&[3, 17], DType::F64, 3));
    let tolerance = difference_tolerance(51.0);
    let forward = |x: &Tensor| softmax(x, DType::F64).unwrap();
    let dx = softmax_backward(&forward(&x), &grad).unwrap();
    assert_close(&dx, &numeric_gradient(&x, &grad, forward), tolerance);
    let forward = |x: &Tensor| log_softmax(x, DType::F64).unwrap();
    let dx = log_softmax_backward(&forward(&x), &grad, DType::F64).unwrap();
    assert_close(&dx, &numeric_gradient(&x, &grad, forward), tolerance);
}

#[test]
fn gradients_in_every_dtype_are_those_of_f64() {
    for dtype in DTYPES {
        for shape in SHAPES.into_iter().skip(1) {
            let grad = strided(shape, dtype, 5);
            let y = softmax(&random(shape, dtype, 4), dtype).unwrap();
            let expected = values(&softmax_backward(&double(&y), &double(&grad)).unwrap());
            let dx = softmax_backward(&y, &grad).unwrap();
            assert_close(&dx, &expected, 16.0);
            assert_close(&portable::softmax_backward(&y, &grad).unwrap(), &expected, 16.0);
            let y = log_softmax(&random(shape, dtype, 4), dtype).unwrap();
            let (y64, grad64) = (double(&y), double(&grad));
            let expected = values(&log_softmax_backward(&y64, &grad64, DType::F64).unwrap());
            for out in [dtype, DType::F32] {
                let dx = log_softmax_backward(&y, &grad, out).unwrap();
                let oracle = portable::log_softmax_backward(&y, &grad, out).unwrap();
                assert_eq!(dx.dtype(), out);
                assert_close(&dx, &expected, 16.0);
                assert_close(&oracle, &expected, 32.0);
            }
        }
    }
}

#[test]
fn equal_logits_share_one() {
    for dtype in DTYPES {
        let x = Tensor::ones((2, 4096), dtype, &Device::Cpu).unwrap();
        assert_eq!(values(&softmax(&x, dtype).unwrap()), vec![1.0 / 4096.0; 8192]);
    }
}

/// The largest of a row is found wherever it is: what is left of another, `exp(2e3)`, would overflow.
#[test]
fn the_largest_logit_may_be_anywhere() {
    for width in [31, 64, 101] {
        for at in 0..width {
            let row: Vec<f32> = (0..width).map(|i| if i == at { 1e3 } else { -1e3 }).collect();
            let x = Tensor::from_vec(row, (1, width), &Device::Cpu).unwrap();
            for dtype in DTYPES {
                let y = values(&softmax(&x.to_dtype(dtype).unwrap(), dtype).unwrap());
                let expected: Vec<f64> = (0..width).map(|i| f64::from(u8::from(i == at))).collect();
                assert_eq!(y, expected, "{dtype:?}, {at} of {width}");
            }
        }
    }
}

#[test]
fn large_logits_do_not_overflow() {
    for dtype in DTYPES {
        let x = of(vec![6e4, 0.0, -6e4, 6e4], &[1, 4], dtype);
        assert_eq!(values(&softmax(&x, DType::F32).unwrap()), [0.5, 0.0, 0.0, 0.5]);
    }
}

#[test]
fn infinities_and_nan() {
    let inf = f64::INFINITY;
    for dtype in DTYPES {
        let x = of(vec![1.0, -inf, 1.0, inf, 1.0, 2.0, -inf, -inf, -inf], &[3, 3], dtype);
        let x = Tensor::cat(&[x, of(vec![0.0, f64::NAN, 1.0], &[1, 3], dtype)], 0).unwrap();
        let y = softmax(&x, dtype).unwrap();
        let mut expected = vec![f64::NAN; 12];
        expected[..3].copy_from_slice(&[0.5, 0.0, 0.5]);
        assert_close(&y, &expected, 0.0);
        let log = values(&log_softmax(&x, dtype).unwrap());
        assert!(log[0] < 0.0 && log[1] == -inf && log[3..].iter().all(|y| y.is_nan()), "{log:?}");
    }
}

#[test]
fn gpus_agree() {
    let shapes =
        [&[1, 1][..], &[3, 31], &[5, 33], &[2, 3, 1024], &[2, 1025], &[3, 8200], &[2, 50257]];
    for dtype in DTYPES {
        for shape in shapes {
            let (x, grad) = (strided(shape, dtype, 1), strided(shape, dtype, 2));
            for out in DTYPES {
                let wide = crate::kernels::accumulator(dtype);
                let count = 32.0 * (epsilon(wide) / epsilon(out)).max(1.0);
                assert_gpus_agree(&[&x, &grad], count, |t| {
                    let y = softmax(&t[0], out)?;
                    let log = log_softmax(&t[0], out)?;
                    Ok(vec![y, log, log_softmax_backward(&t[0], &t[1], out)?])
                });
            }
            let y = softmax(&x, dtype).unwrap();
            assert_gpus_agree(&[&y, &grad], 32.0, |t| Ok(vec![softmax_backward(&t[0], &t[1])?]));
        }
    }
}

#[test]
fn gpus_agree_on_what_is_not_finite() {
    let inf = f64::INFINITY;
    for dtype in DTYPES {
        for columns in [3, 40, 1100] {
            let mut rows = vec![1.0; 6 * columns];
            rows[1] = -inf; // one hidden
            rows[columns] = inf;
            rows[2 * columns..3 * columns].fill(-inf);
            rows[3 * columns + 1] = f64::NAN;
            rows[4 * columns..5 * columns].fill(-6e4);
            rows[5 * columns..6 * columns - 1].fill(-inf); // one left
            assert_gpus_agree(&[&of(rows, &[6, columns], dtype)], 32.0, |t| {
                Ok(vec![softmax(&t[0], dtype)?, log_softmax(&t[0], DType::F32)?])
            });
        }
    }
}

/// Around the rows, columns and lines that loops take at a time, and with none.
const LINES: [&[usize]; 8] = [
    &[70, 16],
    &[3, 65, 17],
    &[2, 5, 600],
    &[2, 600, 130],
    &[40, 3, 20],
    &[1, 2, 1100],
    &[0, 3, 20],
    &[2, 0, 20],
];

#[test]
fn along_any_dimension_as_along_the_last() {
    for dtype in DTYPES {
        for shape in LINES {
            let (x, grad) = (strided(shape, dtype, 1), strided(shape, dtype, 2));
            for dim in 0..shape.len() {
                let turn = |x: &Tensor| x.transpose(dim, shape.len() - 1).unwrap();
                let [x64, grad64] = [&x, &grad].map(|t| double(&turn(t)));
                for out in [dtype, DType::F32] {
                    let count = 32.0 * (epsilon(DType::F32) / epsilon(out)).max(1.0);
                    let check = |ours: Result<Tensor>, exact: Result<Tensor>| {
                        let ours = ours.unwrap();
                        assert_eq!((ours.dims(), ours.dtype()), (shape, out));
                        assert!(ours.is_contiguous());
                        assert_close(&ours, &values(&turn(&exact.unwrap())), count);
                    };
                    check(super::softmax(&x, dim, out), softmax(&x64, DType::F64));
                    check(super::log_softmax(&x, dim, out), log_softmax(&x64, DType::F64));
                    let y = super::log_softmax(&x, dim, dtype).unwrap();
                    check(
                        super::log_softmax_backward(&y, &grad, dim, out),
                        log_softmax_backward(&double(&turn(&y)), &grad64, DType::F64),
                    );
                    if out == dtype {
                        let y = super::softmax(&x, dim, dtype).unwrap();
                        let exact = softmax_backward(&double(&turn(&y)), &grad64);
                        check(super::softmax_backward(&y, &grad, dim), exact);
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_line() {
    let (rows, columns) = (70, 40);
    for dtype in DTYPES {
        for (row, special) in [(0, f64::NAN), (69, f64::INFINITY), (33, f64::NEG_INFINITY)] {
            let mut x = values(&random(&[rows, columns], DType::F64, 3));
            x[row * columns + 7] = special;
            let x = of(x, &[rows, columns], dtype);
            let turned = x.t().unwrap().contiguous().unwrap();
            let expected = values(&softmax(&turned, dtype).unwrap().t().unwrap());
            let y = super::softmax(&x, 0, dtype).unwrap();
            assert_close(&y, &expected, 8.0);
            let lost = values(&y).iter().filter(|y| y.is_nan()).count();
            assert_eq!(lost, if special < 0.0 { 0 } else { rows });
        }
    }
}
