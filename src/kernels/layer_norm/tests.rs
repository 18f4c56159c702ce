use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::accumulator;
use crate::kernels::elementwise::testing::*;

const EPS: f64 = 1e-5;

/// One row, one column, rows and columns past a block of either.
const SHAPES: [&[usize]; 11] = [
    &[1, 1],
    &[3, 17],
    &[4, 31],
    &[9, 32],
    &[4, 63],
    &[2, 3, 33],
    &[131, 3],
    &[5, 1025],
    &[3, 2048],
    &[2, 4099],
    &[70, 300],
];

fn parameters(shape: &[usize], dtype: DType) -> (Tensor, Tensor) {
    let columns = &shape[shape.len() - 1..];
    (random(columns, dtype, 11), random(columns, dtype, 12))
}

fn naive(x: &Tensor, weight: &[f64], bias: &[f64], centred: bool) -> Vec<f64> {
    let columns = weight.len();
    let row = |row: &[f64]| {
        let average = |f: &dyn Fn(f64) -> f64| row.iter().map(|&x| f(x)).sum::<f64>();
        let mean = if centred { average(&|x| x) / columns as f64 } else { 0.0 };
        let var = average(&|x| (x - mean).powi(2)) / columns as f64;
        let normal = row.iter().map(move |x| (x - mean) / (var + EPS).sqrt());
        normal.zip(weight.iter().zip(bias)).map(|(x, (w, b))| x * w + b).collect::<Vec<_>>()
    };
    values(x).chunks(columns).flat_map(row).collect()
}

#[test]
fn forward_matches_a_loop() {
    for dtype in DTYPES {
        for parameter_dtype in [dtype, DType::F32] {
            for shape in SHAPES {
                let x = strided(shape, dtype, 1);
                let (weight, bias) = parameters(shape, parameter_dtype);
                for centred in [true, false] {
                    let expected = naive(&x, &values(&weight), &values(&bias), centred);
                    let count = 16.0 * naive_slack(dtype, shape[shape.len() - 1]);
                    let (weight, bias) = (Some(&weight), Some(&bias));
                    let (y, statistics) = forward(&x, weight, bias, EPS, centred).unwrap();
                    assert_eq!((y.dtype(), y.dims()), (dtype, shape));
                    assert_eq!(statistics.dtype(), accumulator(dtype));
                    assert_close(&y, &expected, count);
                    let oracle = portable::forward(&x, weight, bias, EPS, centred).unwrap().0;
                    assert_close(&oracle, &expected, 4.0 * count);
                }
            }
        }
    }
}

#[test]
fn a_large_mean_costs_no_digits() {
    for shift in [1e4, -3e5] {
        // The distances from the mean are what is left of `x` in F32.
        let x = (random(&[9, 260], DType::F64, 1) + shift).unwrap();
        let x = x.to_dtype(DType::F32).unwrap();
        let ones = vec![1.0; 260];
        let expected = naive(&x, &ones, &vec![0.0; 260], true);
        let (y, statistics) = forward(&x, None, None, EPS, true).unwrap();
        assert_close(&y, &expected, 8.0);
        let (y, portable) = portable::forward(&x, None, None, EPS, true).unwrap();
        assert_close(&y, &expected, 32.0);
        let grad = random(&[9, 260], DType::F32, 2);
        let wants = [Some(DType::F32); 3];
        let exact = |x: &Tensor| {
            let (_, statistics) = forward(&double(x), None, None, EPS, true).unwrap();
            let wants = [Some(DType::F64); 3];
            super::backward(&double(x), &double(&grad), None, &statistics, true, wants, None)
                .unwrap()
        };
        let ours = super::backward(&x, &grad, None, &statistics, true, wants, None).unwrap();
        let oracle = portable::backward(&x, &grad, None, &portable, true, wants, None).unwrap();
        for ((ours, oracle), exact) in ours.iter().zip(&oracle).zip(&exact(&x)) {
            let exact = values(exact.as_ref().unwrap());
            assert_close(ours.as_ref().unwrap(), &exact, 16.0);
            assert_close(oracle.as_ref().unwrap(), &exact, 64.0);
        }
    }
}

#[test]
fn gradients_are_slopes() {
    let (x, grad) = (random(&[3, 7], DType::F64, 2), random(&[3, 7], DType::F64, 3));
    let (weight, bias) = parameters(&[3, 7], DType::F64);
    let tolerance = difference_tolerance(100.0);
    for centred in [true, false] {
        let y = |x: &Tensor, w: &Tensor, b: &Tensor| {
            forward(x, Some(w), Some(b), EPS, centred).unwrap()
        };
        let statistics = y(&x, &weight, &bias).1;
        let wants = [Some(DType::F64); 3];
        let [dx, dw, db] =
            backward(&x, &grad, Some(&weight), &statistics, centred, wants, None).unwrap();
        let derivatives = [
            numeric_gradient(&x, &grad, |x| y(x, &weight, &bias).0),
            numeric_gradient(&weight, &grad, |w| y(&x, w, &bias).0),
            numeric_gradient(&bias, &grad, |b| y(&x, &weight, b).0),
        ];
        for (gradient, derivatives) in [dx, dw, db].iter().zip(&derivatives) {
            assert_close(gradient.as_ref().unwrap(), derivatives, tolerance);
        }
    }
}

#[test]
fn gradients_in_every_dtype_are_those_of_f64() {
    for dtype in DTYPES {
        for shape in SHAPES.into_iter().skip(1) {
            let (x, grad) = (strided(shape, dtype, 4), strided(shape, dtype, 5));
            let (weight, bias) = parameters(shape, DType::F32);
            let (w, b) = (Some(&weight), Some(&bias));
            for centred in [true, false] {
                let exact = {
                    let statistics = forward(&double(&x), w, b, EPS, centred).unwrap().1;
                    let wants = [Some(DType::F64); 3];
                    backward(&double(&x), &double(&grad), w, &statistics, centred, wants, None)
                        .unwrap()
                };
                let statistics = forward(&x, w, b, EPS, centred).unwrap().1;
                for out in [dtype, DType::F32] {
                    let wants = [Some(out); 3];
                    let ours = backward(&x, &grad, w, &statistics, centred, wants, None).unwrap();
                    let oracle =
                        portable::backward(&x, &grad, w, &statistics, centred, wants, None)
                            .unwrap();
                    let rows: f64 = x.elem_count() as f64 / weight.elem_count() as f64;
                    for ((ours, oracle), exact) in ours.iter().zip(&oracle).zip(&exact) {
                        let exact = values(exact.as_ref().unwrap());
                        let ours = ours.as_ref().unwrap();
                        assert_eq!(ours.dtype(), out);
                        assert_close(ours, &exact, 16.0 * naive_slack(dtype, 1000));
                        let count = 32.0 * naive_slack(dtype, 1000) + rows;
                        assert_close(oracle.as_ref().unwrap(), &exact, count);
                    }
                }
            }
        }
    }
}

#[test]
fn what_waits_is_added_before_rounding() {
    for dtype in DTYPES {
        for shape in SHAPES {
            let (x, grad) = (strided(shape, dtype, 4), strided(shape, dtype, 5));
            let (weight, _) = parameters(shape, DType::F32);
            let statistics = forward(&x, Some(&weight), None, EPS, true).unwrap().1;
            let wide = accumulator(dtype);
            let dx = |out, pending: Option<&Tensor>| {
                let wants = [Some(out), None, None];
                let run = [super::backward, portable::backward];
                run.map(|run| {
                    run(&x, &grad, Some(&weight), &statistics, true, wants, pending).unwrap()[0]
                        .clone()
                        .unwrap()
                })
            };
            for out in [dtype, wide] {
                assert!(adds(dtype, out));
                // Of the gradient's size, so that rounding twice would show.
                let pending = random(shape, out, 6);
                let sums = dx(out, Some(&pending)).map(|sum| (sum.dtype(), values(&sum)));
                let apart = dx(wide, None).map(|dx| {
                    let sum = (dx + pending.to_dtype(wide).unwrap()).unwrap();
                    (out, values(&sum.to_dtype(out).unwrap()))
                });
                assert_eq!(sums, apart, "{dtype:?} {out:?} {shape:?}");
            }
        }
    }
    assert!(!adds(DType::F32, DType::BF16) && !adds(DType::BF16, DType::F16));
}

#[test]
fn unwanted_gradients_are_left_out() {
    let (x, grad) = (random(&[3, 7], DType::F32, 2), random(&[3, 7], DType::F32, 3));
    let statistics = forward(&x, None, None, EPS, true).unwrap().1;
    let f32 = Some(DType::F32);
    let all = backward(&x, &grad, None, &statistics, true, [f32; 3], None).unwrap();
    for wants in [[f32, None, None], [None, f32, None], [None, None, f32], [None; 3]] {
        let some = backward(&x, &grad, None, &statistics, true, wants, None).unwrap();
        for ((all, some), want) in all.iter().zip(&some).zip(wants) {
            assert_eq!(some.as_ref().map(values), want.and(all.as_ref().map(values)));
        }
    }
}

#[test]
fn four_thousand_rows_of_ones_do_not_saturate() {
    for dtype in DTYPES {
        let ones = Tensor::ones((4096, 2), dtype, &Device::Cpu).unwrap();
        let x = of([1.0, -1.0].repeat(4096), &[4096, 2], dtype);
        let statistics = forward(&x, None, None, 0.0, true).unwrap().1;
        let wants = [None, Some(dtype), Some(dtype)];
        let [_, dw, db] = backward(&x, &ones, None, &statistics, true, wants, None).unwrap();
        assert_eq!(values(&dw.unwrap()), [4096.0, -4096.0]);
        assert_eq!(values(&db.unwrap()), [4096.0; 2]);
    }
}

#[test]
fn nan_and_infinity_stay_in_their_row() {
    for dtype in DTYPES {
        for poison in [f64::NAN, f64::INFINITY] {
            let x = of(vec![1.0, 2.0, 3.0, poison, 1.0, 2.0, 5.0, 0.0], &[4, 2], dtype);
            for centred in [true, false] {
                let y = values(&forward(&x, None, None, EPS, centred).unwrap().0);
                assert!(y[3].is_nan(), "{y:?}");
                assert!([0, 1, 4, 5, 6, 7].iter().all(|&i| y[i].is_finite()), "{y:?}");
            }
        }
    }
}

/// The last 32 columns are read together, some of them for a second time.
#[test]
fn a_gradient_that_is_not_finite_stays_in_its_row_and_column() {
    const COLUMNS: usize = 40;
    for (at, poison) in (0..COLUMNS).flat_map(|at| [(at, f64::NAN), (at, f64::INFINITY)]) {
        let x = random(&[3, COLUMNS], DType::F32, 6);
        let mut grad = values(&random(&[3, COLUMNS], DType::F32, 7));
        grad[COLUMNS + at] = poison;
        let grad = of(grad, &[3, COLUMNS], DType::F32);
        let (_, statistics) = forward(&x, None, None, EPS, true).unwrap();
        let wants = [Some(DType::F32); 3];
        let gradients = super::backward(&x, &grad, None, &statistics, true, wants, None).unwrap();
        let [dx, dw, db] = gradients.map(|gradient| values(&gradient.unwrap()));
        for (i, dx) in dx.iter().enumerate() {
            assert_eq!(dx.is_finite(), i / COLUMNS != 1, "{poison} in column {at}: {dx} at {i}");
        }
        for (i, (dw, db)) in dw.iter().zip(&db).enumerate() {
            let both = [dw.is_finite(), db.is_finite()];
            assert_eq!(both, [i != at; 2], "{poison} in column {at}: {dw}, {db} of {i}");
        }
        assert_eq!(db[at].is_infinite(), poison.is_infinite(), "{}", db[at]);
    }
}

#[test]
fn equal_elements_become_the_bias() {
    for dtype in DTYPES {
        let x = Tensor::full(3.0, (2, 5), &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let bias = of(vec![0.5, 1.0, -1.0, 0.0, 2.0], &[5], dtype);
        let y = forward(&x, None, Some(&bias), EPS, true).unwrap().0;
        assert_eq!(values(&y), values(&bias).repeat(2));
    }
}

#[test]
fn one_thread_and_many_agree() {
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let many = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
    let (x, grad) = (random(&[300, 130], DType::F32, 4), random(&[300, 130], DType::F32, 5));
    let run = || {
        let (y, statistics) = forward(&x, None, None, EPS, true).unwrap();
        let gradients = backward(&x, &grad, None, &statistics, true, [Some(DType::F32); 3], None);
        let gradients = gradients.unwrap().map(|g| values(&g.unwrap()));
        (values(&y), gradients)
    };
    assert_eq!(one.install(run), many.install(run));
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        for shape in
            [&[1, 1][..], &[3, 17], &[70, 96], &[131, 33], &[5, 1032], &[2, 8200], &[2, 3, 1025]]
        {
            let (x, grad) = (strided(shape, dtype, 1), strided(shape, dtype, 2));
            for parameter_dtype in [dtype, DType::F32, DType::F16] {
                let (weight, bias) = parameters(shape, parameter_dtype);
                for centred in [true, false] {
                    // Of one element, the distance from the mean is rounding alone.
                    let count = if shape == [1, 1] { 0.0 } else { 64.0 };
                    assert_gpus_agree(&[&x, &weight, &bias], count, |t| {
                        let (y, _) = forward(&t[0], Some(&t[1]), Some(&t[2]), EPS, centred)?;
                        let (plain, _) = forward(&t[0], None, None, EPS, centred)?;
                        Ok(vec![y, plain])
                    });
                    let statistics = forward(&x, None, None, EPS, centred).unwrap().1;
                    for wants in
                        [[Some(dtype); 3], [Some(DType::F32); 3], [None, Some(dtype), None]]
                    {
                        assert_gpus_agree(&[&x, &grad, &weight, &statistics], 256.0, |t| {
                            let all =
                                backward(&t[0], &t[1], Some(&t[2]), &t[3], centred, wants, None)?;
                            Ok(all.into_iter().flatten().collect())
                        });
                        let Some(out) = wants[0].filter(|&out| adds(dtype, out)) else { continue };
                        let pending = random(shape, out, 3);
                        let tensors = [&x, &grad, &weight, &statistics, &pending];
                        assert_gpus_agree(&tensors, 256.0, |t| {
                            let pending = Some(&t[4]);
                            let all = backward(
                                &t[0],
                                &t[1],
                                Some(&t[2]),
                                &t[3],
                                centred,
                                wants,
                                pending,
                            )?;
                            Ok(all.into_iter().flatten().collect())
                        });
                    }
                }
            }
        }
    }
}

#[test]
fn gpus_keep_what_is_not_finite_in_its_row() {
    for dtype in DTYPES {
        let x =
            of(vec![1.0, 2.0, f64::NAN, 4.0, f64::INFINITY, 3.0, 1.0, 5.0, 2.0], &[3, 3], dtype);
        assert_gpus_agree(&[&x], 64.0, |x| Ok(vec![forward(&x[0], None, None, EPS, true)?.0]));
        // A mean far from zero costs no digits.
        let x = (random(&[3, 65], DType::F64, 1) + 1e4).unwrap().to_dtype(DType::F32).unwrap();
        assert_gpus_agree(&[&x], 64.0, |x| Ok(vec![forward(&x[0], None, None, EPS, true)?.0]));
    }
}
