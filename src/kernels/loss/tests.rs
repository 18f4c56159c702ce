use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::elementwise::portable::arithmetic;
use crate::kernels::elementwise::testing::*;

const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 17], [33, 10], [1025, 3], [3, 4099], [300, 130]];

fn targets(n: usize, classes: usize) -> Tensor {
    let classes: Vec<u32> = (0..n).map(|i| (i * 7 % classes) as u32).collect();
    Tensor::from_vec(classes, n, &Device::Cpu).unwrap()
}

fn one(dtype: DType) -> Tensor {
    of(vec![1.0], &[], dtype)
}

fn naive_cross_entropy(logits: &Tensor, targets: &Tensor, smoothing: f64) -> f64 {
    let (n, classes) = logits.dims2().unwrap();
    let mut loss = 0.0;
    for (row, target) in values(logits).chunks(classes).zip(values(targets)) {
        let log_sum_exp = row.iter().map(|x| x.exp()).sum::<f64>().ln();
        for (class, x) in row.iter().enumerate() {
            let share = if class as f64 == target { 1.0 - smoothing } else { 0.0 };
            loss += (share + smoothing / classes as f64) * (log_sum_exp - x);
        }
    }
    loss / n as f64
}

#[test]
fn cross_entropy_matches_a_loop() {
    for dtype in DTYPES {
        for shape in SHAPES {
            for smoothing in [0.0, 0.1] {
                let (logits, targets) = (strided(&shape, dtype, 1), targets(shape[0], shape[1]));
                let expected = naive_cross_entropy(&logits, &targets, smoothing);
                let (loss, lse) = cross_entropy_forward(&logits, &targets, smoothing).unwrap();
                let oracle =
                    portable::cross_entropy_forward(&plain(&logits).unwrap(), &targets, smoothing)
                        .unwrap();
                let wide = arithmetic(dtype);
                assert_eq!((loss.rank(), loss.dtype(), lse.dims()), (0, wide, &shape[..1]));
                // Of one class, the loss is the difference of equal numbers near 1.
                let slack = 8.0 * epsilon(wide) * (1.0 + expected);
                let slack = slack * naive_slack(dtype, logits.elem_count());
                assert!((values(&loss)[0] - expected).abs() <= slack);
                assert!((values(&oracle.0)[0] - expected).abs() <= 16.0 * slack);
                assert_close(&oracle.1, &values(&lse), 8.0);
            }
        }
    }
}

#[test]
fn cross_entropy_gradient_is_its_slope() {
    for smoothing in [0.0, 0.1, 1.0] {
        let (logits, targets) = (random(&[5, 17], DType::F64, 2), targets(5, 17));
        let scale = of(vec![3.0], &[], DType::F32);
        let (_, lse) = cross_entropy_forward(&logits, &targets, smoothing).unwrap();
        let dx =
            cross_entropy_backward(&logits, &targets, &lse, &scale, smoothing, DType::F64).unwrap();
        let slope = numeric_gradient(&logits, &scale, |x| {
            cross_entropy_forward(x, &targets, smoothing).unwrap().0
        });
        assert_close(&dx, &slope, difference_tolerance(5.0 * 17.0));
    }
}

#[test]
fn cross_entropy_gradients_in_every_dtype_are_those_of_f64() {
    for dtype in DTYPES {
        for out in DTYPES {
            for shape in SHAPES.into_iter().skip(1) {
                let (logits, targets) = (strided(&shape, dtype, 3), targets(shape[0], shape[1]));
                let logits64 = double(&logits);
                let (_, lse64) = cross_entropy_forward(&logits64, &targets, 0.1).unwrap();
                let (_, lse) = cross_entropy_forward(&logits, &targets, 0.1).unwrap();
                let scale = of(vec![128.0 * shape[0] as f64], &[], DType::F32);
                let backward = |logits: &Tensor, lse: &Tensor, out| {
                    cross_entropy_backward(logits, &targets, lse, &scale, 0.1, out).unwrap()
                };
                let expected = values(&backward(&logits64, &lse64, DType::F64));
                let oracle = portable::cross_entropy_backward(
                    &plain(&logits).unwrap(),
                    &targets,
                    &lse,
                    &scale,
                    0.1,
                    out,
                );
                let ours = backward(&logits, &lse, out);
                assert_eq!(ours.dtype(), out);
                let count = 16.0 * (epsilon(arithmetic(dtype)) / epsilon(out)).max(1.0);
                assert_close(&ours, &expected, count);
                assert_close(&oracle.unwrap(), &expected, count);
            }
        }
    }
}

#[test]
fn fifty_thousand_classes_in_half() {
    for dtype in DTYPES {
        let logits = Tensor::ones((2, 50_257), dtype, &Device::Cpu).unwrap();
        let (loss, _) = cross_entropy_forward(&logits, &targets(2, 50_257), 0.0).unwrap();
        assert_within(&loss, &[50_257f64.ln()], arithmetic(dtype), 2.0);
    }
}

#[test]
fn a_target_that_is_no_class_is_named() {
    let logits = random(&[3, 10], DType::F32, 4);
    let targets = Tensor::new(&[0u32, 9, 10], &Device::Cpu).unwrap();
    let error = cross_entropy_forward(&logits, &targets, 0.0).unwrap_err().to_string();
    assert!(error.contains("row 2 is 10, of 10 classes"), "{error}");
}

#[test]
fn infinite_logits() {
    let inf = f64::INFINITY;
    for dtype in DTYPES {
        let targets = Tensor::new(&[0u32], &Device::Cpu).unwrap();
        let loss = |data: Vec<f64>, smoothing| {
            let logits = of(data, &[1, 3], dtype);
            values(&cross_entropy_forward(&logits, &targets, smoothing).unwrap().0)[0]
        };
        assert!(loss(vec![1.0, inf, 0.0], 0.0).is_nan());
        assert!(loss(vec![1.0, f64::NAN, 0.0], 0.0).is_nan());
        assert_eq!(loss(vec![-inf, 1.0, 0.0], 0.0), inf);
        assert!((loss(vec![0.0, -inf, 0.0], 0.0) - 2f64.ln()).abs() <= epsilon(DType::F32));
        assert_eq!(loss(vec![0.0, -inf, 0.0], 0.1), inf);
        let logits = of(vec![0.0, -inf, 0.0], &[1, 3], dtype);
        let (_, lse) = cross_entropy_forward(&logits, &targets, 0.0).unwrap();
        let dx = cross_entropy_backward(&logits, &targets, &lse, &one(dtype), 0.0, dtype).unwrap();
        assert_close(&dx, &[-0.5, 0.0, 0.5], 1.0);
    }
}

#[test]
fn mse_matches_a_loop_and_its_gradient_the_slope() {
    for dtype in DTYPES {
        for shape in SHAPES {
            let (a, b) = (strided(&shape, dtype, 5), random(&shape, dtype, 6));
            let count = a.elem_count() as f64;
            let square = |(a, b): (&f64, &f64)| (a - b) * (a - b);
            let expected = values(&a).iter().zip(&values(&b)).map(square).sum::<f64>() / count;
            let loss = mse_forward(&a, &b).unwrap();
            assert_eq!((loss.rank(), loss.dtype()), (0, arithmetic(dtype)));
            assert_close(&loss, &[expected], 8.0);
            assert_close(&portable::mse_forward(&a, &b).unwrap(), &[expected], 64.0);
            for out in DTYPES {
                let scale = of(vec![count], &[], DType::F32);
                let expected: Vec<f64> =
                    values(&a).iter().zip(&values(&b)).map(|(a, b)| 2.0 * (a - b)).collect();
                let tolerance = (epsilon(arithmetic(dtype)) / epsilon(out)).max(1.0) * 2.0;
                let dx = mse_backward(&a, &b, &scale, out).unwrap();
                assert_eq!(dx.dtype(), out);
                assert_close(&dx, &expected, tolerance);
                let oracle = portable::mse_backward(&a, &b, &scale, out).unwrap();
                assert_close(&oracle, &expected, tolerance);
            }
        }
    }
    let (a, b) = (random(&[33], DType::F64, 7), random(&[33], DType::F64, 8));
    let dx = mse_backward(&a, &b, &one(DType::F64), DType::F64).unwrap();
    let slope = numeric_gradient(&a, &one(DType::F64), |a| mse_forward(a, &b).unwrap());
    assert_close(&dx, &slope, difference_tolerance(33.0));
}
