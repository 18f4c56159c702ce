use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::elementwise::testing::*;

const EPS: f64 = 1e-5;

/// Shapes with a number of groups: one group, as many as channels, no pixels, past a block.
const SHAPES: [(&[usize], usize); 6] = [
    (&[2, 3, 5], 1),
    (&[3, 4, 3, 3], 2),
    (&[2, 3, 7], 3),
    (&[5, 6], 2),
    (&[1, 1, 1], 1),
    (&[3, 4, 33, 33], 2),
];

fn parameters(shape: &[usize], dtype: DType) -> (Tensor, Tensor) {
    (random(&shape[1..2], dtype, 11), random(&shape[1..2], dtype, 12))
}

fn naive(x: &Tensor, groups: usize, weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let (n, c) = (x.dims()[0], x.dims()[1]);
    let (inner, width) = (x.elem_count() / n / c, x.elem_count() / n / groups);
    let mut y = Vec::new();
    for (group, row) in values(x).chunks(width).enumerate() {
        let mean = row.iter().sum::<f64>() / width as f64;
        let var = row.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
        for (i, x) in row.iter().enumerate() {
            let channel = (group % groups) * (c / groups) + i / inner;
            y.push((x - mean) / (var + EPS).sqrt() * weight[channel] + bias[channel]);
        }
    }
    y
}

#[test]
fn forward_matches_a_loop() {
    for dtype in DTYPES {
        for parameter_dtype in [dtype, DType::F32] {
            for (shape, groups) in SHAPES {
                let x = strided(shape, dtype, 1);
                let (weight, bias) = parameters(shape, parameter_dtype);
                let expected = naive(&x, groups, &values(&weight), &values(&bias));
                let (weight, bias) = (Some(&weight), Some(&bias));
                let count = 16.0 * naive_slack(dtype, x.elem_count());
                let (y, _) = forward(&x, groups, weight, bias, EPS).unwrap();
                assert_eq!((y.dtype(), y.dims()), (dtype, shape));
                assert_close(&y, &expected, count);
                let oracle = portable::forward(&x, groups, weight, bias, EPS).unwrap().0;
                assert_close(&oracle, &expected, 4.0 * count);
            }
        }
    }
}

#[test]
fn a_large_mean_costs_no_digits() {
    let x = (random(&[3, 4, 65], DType::F64, 1) + 1e4).unwrap().to_dtype(DType::F32).unwrap();
    let expected = naive(&x, 2, &[1.0; 4], &[0.0; 4]);
    assert_close(&forward(&x, 2, None, None, EPS).unwrap().0, &expected, 8.0);
    assert_close(&portable::forward(&x, 2, None, None, EPS).unwrap().0, &expected, 32.0);
}

#[test]
fn gradients_are_slopes() {
    for (shape, groups) in [([2, 4, 3], 2), ([3, 2, 2], 1)] {
        let (x, grad) = (random(&shape, DType::F64, 2), random(&shape, DType::F64, 3));
        let (weight, bias) = parameters(&shape, DType::F64);
        let y =
            |x: &Tensor, w: &Tensor, b: &Tensor| forward(x, groups, Some(w), Some(b), EPS).unwrap();
        let statistics = y(&x, &weight, &bias).1;
        let wants = [Some(DType::F64); 3];
        let gradients = backward(&x, &grad, groups, Some(&weight), &statistics, wants).unwrap();
        let slopes = [
            numeric_gradient(&x, &grad, |x| y(x, &weight, &bias).0),
            numeric_gradient(&weight, &grad, |w| y(&x, w, &bias).0),
            numeric_gradient(&bias, &grad, |b| y(&x, &weight, b).0),
        ];
        for (gradient, slopes) in gradients.iter().zip(&slopes) {
            let tolerance = difference_tolerance(100.0);
            assert_close(gradient.as_ref().unwrap(), slopes, tolerance);
        }
    }
}

#[test]
fn gradients_in_every_dtype_are_those_of_f64() {
    for dtype in DTYPES {
        for (shape, groups) in SHAPES.into_iter().filter(|(shape, _)| shape != &[1, 1, 1]) {
            let (x, grad) = (strided(shape, dtype, 4), strided(shape, dtype, 5));
            let (weight, bias) = parameters(shape, DType::F32);
            let (w, b) = (Some(&weight), Some(&bias));
            let exact = {
                let statistics = forward(&double(&x), groups, w, b, EPS).unwrap().1;
                let wants = [Some(DType::F64); 3];
                backward(&double(&x), &double(&grad), groups, w, &statistics, wants).unwrap()
            };
            let statistics = forward(&x, groups, w, b, EPS).unwrap().1;
            for out in [dtype, DType::F32] {
                let wants = [Some(out); 3];
                let ours = backward(&x, &grad, groups, w, &statistics, wants).unwrap();
                let oracle = portable::backward(&x, &grad, groups, w, &statistics, wants).unwrap();
                for ((ours, oracle), exact) in ours.iter().zip(&oracle).zip(&exact) {
                    let exact = values(exact.as_ref().unwrap());
                    let ours = ours.as_ref().unwrap();
                    assert_eq!(ours.dtype(), out);
                    let count = 16.0 * naive_slack(dtype, x.elem_count());
                    assert_close(ours, &exact, count);
                    let terms = (x.elem_count() as f64).sqrt();
                    assert_close(oracle.as_ref().unwrap(), &exact, count + 4.0 * terms);
                }
            }
        }
    }
}

#[test]
fn four_thousand_pixels_of_ones_do_not_saturate() {
    for dtype in DTYPES {
        let ones = Tensor::ones((1, 2, 64, 64), dtype, &Device::Cpu).unwrap();
        let x = of([1.0, -1.0].repeat(4096), &[1, 2, 64, 64], dtype);
        let statistics = forward(&x, 2, None, None, 0.0).unwrap().1;
        let wants = [None, Some(dtype), Some(dtype)];
        let [dx, dw, db] = backward(&x, &ones, 2, None, &statistics, wants).unwrap();
        assert!(dx.is_none());
        assert_eq!(values(&dw.unwrap()), [0.0; 2]);
        assert_eq!(values(&db.unwrap()), [4096.0; 2]);
        let [_, dw, _] = backward(&x, &x, 2, None, &statistics, wants).unwrap();
        assert_eq!(values(&dw.unwrap()), [4096.0; 2]);
    }
}

#[test]
fn nan_and_infinity_stay_in_their_group() {
    for dtype in DTYPES {
        for poison in [f64::NAN, f64::INFINITY] {
            let x = of(vec![1.0, 2.0, 3.0, poison, 1.0, 2.0, 5.0, 0.0], &[2, 2, 2], dtype);
            let y = values(&forward(&x, 2, None, None, EPS).unwrap().0);
            assert!(y[3].is_nan(), "{y:?}");
            assert!([0, 1, 4, 5, 6, 7].iter().all(|&i| y[i].is_finite()), "{y:?}");
        }
    }
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for (shape, groups) in
            SHAPES.into_iter().chain([(&[2, 6, 8, 8][..], 3), (&[2, 4, 1100][..], 2)])
        {
            let (x, grad) = (strided(shape, dtype, 1), strided(shape, dtype, 2));
            let (weight, bias) = parameters(shape, DType::F32);
            assert_gpus_near(&[&x, &weight, &bias], 64.0, |t| {
                Ok(vec![forward(&t[0], groups, Some(&t[1]), Some(&t[2]), EPS)?.0])
            });
            let statistics = forward(&x, groups, None, None, EPS).unwrap().1;
            for out in [dtype, DType::F32] {
                assert_gpus_near(&[&x, &grad, &weight, &statistics], 256.0, |t| {
                    let wants = [Some(out); 3];
                    let all = backward(&t[0], &t[1], groups, Some(&t[2]), &t[3], wants)?;
                    Ok(all.into_iter().flatten().collect())
                });
            }
        }
    }
}
