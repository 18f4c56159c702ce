use candle_core::{DType, Tensor};

use super::*;
use crate::kernels::accumulator;
use crate::kernels::elementwise::testing::*;
use crate::kernels::testing::devices::devices;

const EPS: f64 = 1e-5;
const RECTIFIERS: [Rectifier; 2] = [Rectifier::Relu, Rectifier::Relu6];

// Of channels in the second dimension.

fn forward_train(
    x: &Tensor,
    affine: Affine<'_>,
    finish: Finish<'_>,
    eps: f64,
) -> Result<(Tensor, Statistics)> {
    super::forward_train(Format::ChannelsFirst, x, affine, finish, eps)
}

fn forward_eval(x: &Tensor, running: Running<'_>, affine: Affine<'_>) -> Result<Tensor> {
    super::forward_eval(Format::ChannelsFirst, x, running, affine)
}

fn backward_train(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    statistics: &Statistics,
) -> Result<Gradients> {
    super::backward_train(Format::ChannelsFirst, x, grad, weight, statistics)
}

fn backward_rectified(
    by: Rectifier,
    x: &Tensor,
    y: &Tensor,
    grad: &Tensor,
    affine: Affine<'_>,
    statistics: &Statistics,
) -> Result<Gradients> {
    super::backward_rectified(Format::ChannelsFirst, by, [x, y], grad, affine, statistics)
}

fn backward_eval(
    x: &Tensor,
    grad: &Tensor,
    weight: Option<&Tensor>,
    running: Running<'_>,
) -> Result<Gradients> {
    super::backward_eval(Format::ChannelsFirst, x, grad, weight, running)
}

/// Both loops, columns and runs; more than one block, panel and task of each.
const SHAPES: [&[usize]; 8] = [
    &[3, 1],
    &[17, 33],
    &[1025, 3],
    &[4, 3, 5],
    &[66, 3, 3, 3],
    &[3, 2, 33, 33],
    &[65, 2, 9, 9],
    &[2, 1, 4099],
];

fn both<'a>(weight: &'a Tensor, bias: &'a Tensor) -> Affine<'a> {
    Affine { weight: Some(weight), bias: Some(bias) }
}

fn affine_parameters(c: usize, dtype: DType) -> (Tensor, Tensor) {
    (random(&[c], dtype, 11), random(&[c], dtype, 12))
}

/// Mean and biased variance of every channel, in F64.
fn naive_statistics(x: &Tensor) -> (Vec<f64>, Vec<f64>) {
    let c = x.dim(1).unwrap();
    let rows = x.transpose(0, 1).unwrap().reshape((c, ())).unwrap();
    let rows = double(&rows).to_vec2::<f64>().unwrap();
    let mean = |row: &[f64]| row.iter().sum::<f64>() / row.len() as f64;
    let means: Vec<f64> = rows.iter().map(|row| mean(row)).collect();
    let squares = |(row, m): (&Vec<f64>, &f64)| -> f64 {
        mean(&row.iter().map(|x| (x - m).powi(2)).collect::<Vec<_>>())
    };
    let vars = rows.iter().zip(&means).map(squares).collect();
    (means, vars)
}

fn naive_affine(x: &Tensor, mean: &[f64], var: &[f64], weight: &Tensor, bias: &Tensor) -> Vec<f64> {
    let inner: usize = x.dims()[2..].iter().product();
    let (weight, bias) = (values(weight), values(bias));
    let y = values(x).into_iter().enumerate().map(|(i, x)| {
        let c = i / inner % mean.len();
        (x - mean[c]) / (var[c] + EPS).sqrt() * weight[c] + bias[c]
    });
    y.collect()
}

#[test]
fn training_matches_a_loop() {
    for dtype in DTYPES {
        for shape in SHAPES {
            let x = strided(shape, dtype, 1);
            let (weight, bias) = affine_parameters(shape[1], dtype);
            let (mean, var) = naive_statistics(&x);
            let expected = naive_affine(&x, &mean, &var, &weight, &bias);
            let wide = accumulator(dtype);
            let ours = forward_train(&x, both(&weight, &bias), Finish::Plain, EPS).unwrap();
            let oracle =
                portable::forward_train(&x, both(&weight, &bias), Finish::Plain, EPS).unwrap();
            assert!(ours.0.is_contiguous() && ours.0.dims() == shape && ours.0.dtype() == dtype);
            for ((y, statistics), count) in [(ours, 8.0), (oracle, 64.0)] {
                let count = count * naive_slack(dtype, x.elem_count());
                assert_eq!(statistics.mean().unwrap().dtype(), wide);
                assert_close(&statistics.var().unwrap(), &var, count);
                // The mean is close to 0: its errors are relative to the spread.
                let distance =
                    (statistics.mean().unwrap() - of(mean.clone(), &[shape[1]], wide)).unwrap();
                assert!(values(&distance).iter().all(|d| d.abs() <= count * epsilon(wide)));
                assert_close(&y, &expected, if wide == dtype { count } else { 1.0 });
            }
        }
    }
}

#[test]
fn running_averages_match_a_loop_on_every_device() -> Result<()> {
    let (kept, weights) = (0.875, [0.125, 0.140625]); // powers of two, and what BF16 holds
    for device in devices() {
        for (running, batch) in [
            (DType::F32, DType::F32),
            (DType::F64, DType::F64),
            (DType::F64, DType::F32),
            (DType::BF16, DType::F32),
        ] {
            for len in [1, 33, 1025] {
                let vector = |dtype, seed| random(&[len], dtype, seed).to_device(&device);
                let vars = [1, 2].map(|seed| Var::from_tensor(&vector(running, seed)?));
                let [mean, var] = vars.map(|var| var.unwrap());
                let of_batch = [vector(batch, 3)?, vector(batch, 4)?];
                let before = [values(&mean), values(&var)];
                let [of_mean, of_var] = &of_batch;
                let statistics = Statistics::new(of_mean, of_var, of_var)?;
                average([&mean, &var], &statistics, kept, weights)?;
                for ((before, after), (batch, weight)) in
                    before.iter().zip([&mean, &var]).zip(of_batch.iter().zip(weights))
                {
                    assert_eq!(after.dtype(), running);
                    let sums = before.iter().zip(values(batch)).map(|(r, b)| r * kept + b * weight);
                    // Products and sum are rounded, and the batch to the average's dtype: each is below 8.
                    let within = 4.0 * 8.0 * epsilon(running);
                    for (sum, after) in sums.zip(values(after)) {
                        assert!((sum - after).abs() <= within, "{sum} {after} {running:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn evaluation_matches_a_loop() {
    for dtype in DTYPES {
        for shape in SHAPES {
            let x = strided(shape, dtype, 2);
            let (weight, bias) = affine_parameters(shape[1], DType::F32);
            let mean = random(&[shape[1]], DType::F32, 3);
            let var = random(&[shape[1]], DType::F32, 4).sqr().unwrap();
            let expected = naive_affine(&x, &values(&mean), &values(&var), &weight, &bias);
            let running = Running { mean: &mean, var: &var, eps: EPS };
            let y = forward_eval(&x, running, both(&weight, &bias)).unwrap();
            let oracle = portable::forward_eval(&x, running, both(&weight, &bias)).unwrap();
            assert_close(&y, &expected, 8.0);
            assert_close(&oracle, &expected, 8.0);
        }
    }
}

#[test]
fn without_weight_and_bias() {
    let x = random(&[17, 3, 5], DType::F32, 5);
    let (ones, zeros) = (of(vec![1.0; 3], &[3], DType::F32), of(vec![0.0; 3], &[3], DType::F32));
    let (y, statistics) = forward_train(&x, Affine::default(), Finish::Plain, EPS).unwrap();
    let (with, _) = forward_train(&x, both(&ones, &zeros), Finish::Plain, EPS).unwrap();
    assert_eq!(values(&y), values(&with));
    let (dx, ..) = backward_train(&x, &y, None, &statistics).unwrap();
    let (with, ..) = backward_train(&x, &y, Some(&ones), &statistics).unwrap();
    assert_eq!(values(&dx), values(&with));
}

#[test]
fn a_large_mean_does_not_drown_the_variance() {
    for shape in [vec![4099, 3], vec![33, 3, 17, 17]] {
        // Mean 1000, and a tenth of the spread of `random`.
        let x = ((random(&shape, DType::F64, 6) * 0.1).unwrap() + 1000.0).unwrap();
        let x = x.to_dtype(DType::F32).unwrap();
        let (_, var) = naive_statistics(&x);
        let (_, statistics) = forward_train(&x, Affine::default(), Finish::Plain, EPS).unwrap();
        assert_close(&statistics.var().unwrap(), &var, 16.0);
    }
}

#[test]
fn a_misleading_first_sample_does_not_spoil_the_variance() {
    // The shift comes from the first rows: make them unlike all others.
    let far = (random(&[64, 2], DType::F64, 7) + 1e4).unwrap();
    let x = Tensor::cat(&[far, random(&[8000, 2], DType::F64, 8)], 0).unwrap();
    let x = x.to_dtype(DType::F32).unwrap();
    let (_, var) = naive_statistics(&x);
    let (_, statistics) = forward_train(&x, Affine::default(), Finish::Plain, EPS).unwrap();
    assert_close(&statistics.var().unwrap(), &var, 16.0);
}

#[test]
fn a_constant_channel_has_no_variance() {
    let x = of(vec![0.1; 33 * 2 * 9], &[33, 2, 3, 3], DType::F32);
    let (y, statistics) = forward_train(&x, Affine::default(), Finish::Plain, EPS).unwrap();
    assert!(
        values(&statistics.var().unwrap()).iter().all(|v| (0.0..=epsilon(DType::F32)).contains(v))
    );
    assert!(values(&y).iter().all(|y| y.abs() <= epsilon(DType::F32) / EPS.sqrt()));
}

#[test]
fn nan_stays_in_its_channel() {
    let mut data = values(&random(&[5, 3, 7], DType::F32, 9));
    data[7] = f64::NAN; // channel 1
    let (y, statistics) =
        forward_train(&of(data, &[5, 3, 7], DType::F32), Affine::default(), Finish::Plain, EPS)
            .unwrap();
    let nan: Vec<bool> = values(&statistics.var().unwrap()).iter().map(|v| v.is_nan()).collect();
    assert_eq!(nan, [false, true, false]);
    for (i, y) in values(&y).iter().enumerate() {
        assert_eq!(y.is_nan(), i / 7 % 3 == 1);
    }
}

#[test]
fn training_gradients_are_slopes() {
    for shape in [vec![5, 3], vec![4, 2, 3], vec![2, 3, 3, 3], vec![66, 2]] {
        let (x, grad) = (random(&shape, DType::F64, 13), random(&shape, DType::F64, 14));
        let (weight, bias) = affine_parameters(shape[1], DType::F64);
        let forward = |x: &Tensor, w: &Tensor, b: &Tensor| {
            forward_train(x, both(w, b), Finish::Plain, EPS).unwrap()
        };
        let (_, statistics) = forward(&x, &weight, &bias);
        let tolerance = difference_tolerance(x.elem_count() as f64);
        let (dx, dw, db) = backward_train(&x, &grad, Some(&weight), &statistics).unwrap();
        assert_close(
            &dx,
            &numeric_gradient(&x, &grad, |x| forward(x, &weight, &bias).0),
            tolerance,
        );
        assert_close(
            &dw,
            &numeric_gradient(&weight, &grad, |w| forward(&x, w, &bias).0),
            tolerance,
        );
        assert_close(
            &db,
            &numeric_gradient(&bias, &grad, |b| forward(&x, &weight, b).0),
            tolerance,
        );
        let running = Running {
            mean: &statistics.mean().unwrap(),
            var: &statistics.var().unwrap(),
            eps: EPS,
        };
        let eval =
            |x: &Tensor, w: &Tensor, b: &Tensor| forward_eval(x, running, both(w, b)).unwrap();
        let (dx, dw, db) = backward_eval(&x, &grad, Some(&weight), running).unwrap();
        assert_close(&dx, &numeric_gradient(&x, &grad, |x| eval(x, &weight, &bias)), tolerance);
        assert_close(&dw, &numeric_gradient(&weight, &grad, |w| eval(&x, w, &bias)), tolerance);
        assert_close(&db, &numeric_gradient(&bias, &grad, |b| eval(&x, &weight, b)), tolerance);
    }
}

#[test]
fn gradients_in_every_dtype_are_those_of_f64() {
    for dtype in DTYPES {
        for shape in SHAPES.into_iter().filter(|shape| shape[0] > 3) {
            let (x, grad) = (strided(shape, dtype, 15), strided(shape, dtype, 16));
            let (weight, _) = affine_parameters(shape[1], dtype);
            let (x64, grad64, weight64) = (double(&x), double(&grad), double(&weight));
            let (_, exact) = forward_train(&x64, Affine::default(), Finish::Plain, EPS).unwrap();
            let (_, statistics) = forward_train(&x, Affine::default(), Finish::Plain, EPS).unwrap();
            let expected = backward_train(&x64, &grad64, Some(&weight64), &exact).unwrap();
            let ours = backward_train(&x, &grad, Some(&weight), &statistics).unwrap();
            let oracle = portable::backward_train(&x, &grad, Some(&weight), &statistics).unwrap();
            check_gradients(&ours, &expected, dtype);
            check_gradients(&oracle, &expected, dtype);
            let running = Running {
                mean: &statistics.mean().unwrap(),
                var: &statistics.var().unwrap(),
                eps: EPS,
            };
            let expected = backward_eval(&x64, &grad64, Some(&weight64), running).unwrap();
            let ours = backward_eval(&x, &grad, Some(&weight), running).unwrap();
            let oracle = portable::backward_eval(&x, &grad, Some(&weight), running).unwrap();
            check_gradients(&ours, &expected, dtype);
            check_gradients(&oracle, &expected, dtype);
        }
    }
}

#[track_caller]
fn check_gradients(ours: &Gradients, expected: &Gradients, dtype: DType) {
    let wide = accumulator(dtype);
    assert_eq!((ours.0.dtype(), ours.1.dtype(), ours.2.dtype()), (dtype, wide, wide));
    assert_close(&ours.0, &values(&expected.0), 16.0);
    let terms = (expected.0.elem_count() as f64).sqrt();
    assert_close(&ours.1, &values(&expected.1), 16.0 * terms);
    assert_close(&ours.2, &values(&expected.2), 16.0 * terms);
}

#[test]
fn what_follows_is_rounded_with_it() {
    for dtype in DTYPES {
        for shape in SHAPES {
            let (x, residual) = (strided(shape, dtype, 21), strided(shape, dtype, 22));
            let (weight, bias) = affine_parameters(shape[1], dtype);
            let (mean, var) = naive_statistics(&x);
            let plain = naive_affine(&x, &mean, &var, &weight, &bias);
            let sums = plain.iter().zip(values(&residual)).map(|(y, r)| (y + r).max(0.0));
            let relu: Vec<_> = plain.iter().map(|y| y.max(0.0)).collect();
            let relu6 = relu.iter().map(|y| y.min(6.0)).collect();
            for (finish, expected) in [
                (Finish::Rectified(Rectifier::Relu), relu),
                (Finish::Rectified(Rectifier::Relu6), relu6),
                (Finish::AddRelu(&residual), sums.collect()),
            ] {
                let affine = both(&weight, &bias);
                let (ours, _) = forward_train(&x, affine, finish, EPS).unwrap();
                let (oracle, _) = portable::forward_train(&x, affine, finish, EPS).unwrap();
                // Where terms cancel, an error is relative to the terms.
                let largest = expected.iter().fold(1f64, |a, b| a.max(b.abs()));
                let slack = 8.0 * naive_slack(dtype, x.elem_count()) * epsilon(accumulator(dtype));
                for (y, expected) in [ours, oracle].iter().flat_map(|y| {
                    assert_eq!(y.dtype(), dtype);
                    values(y).into_iter().zip(expected.clone()).collect::<Vec<_>>()
                }) {
                    let error = (y - expected).abs();
                    let rounding = epsilon(dtype) * expected.abs();
                    assert!(error <= rounding + slack * 8.0 * largest, "{dtype:?} {y} {expected}");
                }
            }
        }
    }
}

#[test]
fn what_follows_keeps_nan() {
    let mut data = values(&random(&[5, 3, 7], DType::F32, 9));
    data[7] = f64::NAN; // channel 1
    let x = of(data, &[5, 3, 7], DType::F32);
    let zeros = x.zeros_like().unwrap();
    let rectified = RECTIFIERS.map(Finish::Rectified);
    for finish in rectified.into_iter().chain([Finish::AddRelu(&zeros)]) {
        let (y, _) = forward_train(&x, Affine::default(), finish, EPS).unwrap();
        for (i, y) in values(&y).iter().enumerate() {
            assert_eq!(y.is_nan(), i / 7 % 3 == 1);
        }
        let (oracle, _) = portable::forward_train(&x, Affine::default(), finish, EPS).unwrap();
        for (oracle, y) in values(&oracle).iter().zip(values(&y)) {
            assert_eq!(oracle.is_nan(), y.is_nan());
        }
    }
}

/// As PyTorch's: where the result is NaN, relu passes the gradient on.
#[test]
fn the_gradient_of_nan_reaches_the_bias() -> Result<()> {
    for (device, dtype) in devices().into_iter().flat_map(|d| DTYPES.map(|t| (d.clone(), t))) {
        let mut data = values(&random(&[5, 3, 7], DType::F32, 9));
        data[7] = f64::NAN; // all of channel 1 is NaN, once it is normalised
        let x = of(data, &[5, 3, 7], dtype).to_device(&device)?;
        let grad = x.ones_like()?;
        for by in RECTIFIERS {
            let affine = Affine::default();
            let (y, statistics) = forward_train(&x, affine, Finish::Rectified(by), EPS)?;
            let (_, _, dbias) = backward_rectified(by, &x, &y, &grad, affine, &statistics)?;
            let positive =
                |c| values(&y.narrow(1, c, 1).unwrap()).iter().filter(|&&y| y > 0.0).count() as f64;
            let expected = [positive(0), 35.0, positive(2)];
            assert_eq!(values(&dbias), expected, "{device:?} {dtype:?} {by:?}");
        }
    }
    Ok(())
}

/// Backward decides from `x` again where a gradient flows: also where a result was rounded to zero, and for NaN.
#[test]
fn the_gradient_through_a_rectifier_is_that_of_its_parts() -> Result<()> {
    for (device, dtype) in devices().into_iter().flat_map(|d| DTYPES.map(|t| (d.clone(), t))) {
        let shapes = SHAPES.into_iter().chain([&[300, 24][..], &[5, 3, 16]]);
        // As they are, rounded to zero, and many of them beyond six.
        let sizes = [1.0, 1e-7, 20.0];
        for (shape, size) in shapes.flat_map(|shape| sizes.map(|size| (shape, size))) {
            let mut data = values(&random(shape, dtype, 31));
            if shape[1] > 1 {
                data[0] = f64::NAN;
            }
            let x = of(data, shape, dtype).to_device(&device)?;
            let grad = strided(shape, dtype, 32).to_device(&device)?;
            let (weight, bias) = affine_parameters(shape[1], DType::F32);
            let (weight, bias) = ((weight * size)?, (bias * size)?);
            let (weight, bias) = (weight.to_device(&device)?, bias.to_device(&device)?);
            let affine = both(&weight, &bias);
            for by in RECTIFIERS {
                let (y, statistics) = forward_train(&x, affine, Finish::Rectified(by), EPS)?;
                let ours = backward_rectified(by, &x, &y, &grad, affine, &statistics)?;
                let rectified = match by {
                    Rectifier::Relu => relu_backward(&y, &grad)?,
                    Rectifier::Relu6 => portable::relu6_backward(&y, &grad)?,
                };
                let parts = backward_train(&x, &rectified, affine.weight, &statistics)?;
                for (ours, parts) in [(ours.0, parts.0), (ours.1, parts.1), (ours.2, parts.2)] {
                    for (ours, parts) in values(&ours).into_iter().zip(values(&parts)) {
                        let same = ours == parts || ours.is_nan() && parts.is_nan();
                        assert!(same, "{device:?} {dtype:?} {by:?} {shape:?}: {ours} {parts}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// The layouts a GPU takes its own ways: whole packs and not, runs of one, parts of a channel.
///
/// Of two values per channel, gradients cancel to nothing.
const GPU_SHAPES: [&[usize]; 12] = [
    &[5, 1],
    &[1025, 3],
    &[4099, 24], // rows of packs, in parts of every fourth
    &[77, 130],
    &[9, 136],
    &[300, 1032],
    &[3, 5, 1, 31],
    &[5, 7, 33],
    &[4, 2, 4, 4],
    &[33, 3, 16, 16],
    &[1, 2, 65, 1024],
    &[2, 1, 40961],
];

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        let half = epsilon(dtype) > 1e-6;
        for (shape, offset) in GPU_SHAPES.into_iter().flat_map(|s| [(s, 0.0), (s, 1e4)]) {
            // 16-bit dtypes have no room beside a mean of 10,000.
            let offset = if half { offset / 1e3 } else { offset };
            let x = (strided(shape, DType::F64, 31) + offset).unwrap().to_dtype(dtype).unwrap();
            let (residual, grad) = (strided(shape, dtype, 32), strided(shape, dtype, 33));
            let (weight, bias) = affine_parameters(shape[1], dtype);
            let (_, statistics) = forward_train(&x, Affine::default(), Finish::Plain, EPS).unwrap();
            let (mean, var) = (statistics.mean().unwrap(), statistics.var().unwrap());
            let inputs = [&x, &residual, &grad, &weight, &bias, &mean, &var, &statistics.0];
            // Of the mean's epsilons, where the spread is that much less than the mean.
            let terms = (x.elem_count() as f64).sqrt();
            let count = if half { 2.0 } else { 64.0 * (1.0 + offset) };
            for has_affine in [true, false] {
                fn parameters(t: &[Tensor], has_affine: bool) -> (Affine<'_>, Running<'_>) {
                    let affine = if has_affine { both(&t[3], &t[4]) } else { Affine::default() };
                    (affine, Running { mean: &t[5], var: &t[6], eps: EPS })
                }
                let statistics = |t: &[Tensor]| Statistics(t[7].clone());
                assert_gpus_agree(&inputs, count, |t| {
                    let (affine, running) = parameters(t, has_affine);
                    let forward = |finish| {
                        Ok::<_, candle_core::Error>(forward_train(&t[0], affine, finish, EPS)?.0)
                    };
                    Ok(vec![
                        forward(Finish::Plain)?,
                        forward(Finish::Rectified(Rectifier::Relu))?,
                        forward(Finish::Rectified(Rectifier::Relu6))?,
                        forward(Finish::AddRelu(&t[1]))?,
                        forward_eval(&t[0], running, affine)?,
                        backward_train(&t[0], &t[2], affine.weight, &statistics(t))?.0,
                        backward_eval(&t[0], &t[2], affine.weight, running)?.0,
                    ])
                });
                assert_gpus_agree(&inputs, 16.0 * terms * (1.0 + offset), |t| {
                    let (Affine { weight, .. }, running) = parameters(t, has_affine);
                    let (_, dw, db) = backward_train(&t[0], &t[2], weight, &statistics(t))?;
                    let (_, dw_eval, db_eval) = backward_eval(&t[0], &t[2], weight, running)?;
                    Ok(vec![dw, db, dw_eval, db_eval])
                });
            }
            assert_gpus_agree(&[&x], 16.0, |t| {
                let (_, s) = forward_train(&t[0], Affine::default(), Finish::Plain, EPS)?;
                // A mean may be close to 0: its errors are relative to the spread.
                Ok(vec![(s.mean()? + 4.0)?, s.var()?, s.inv_std()?])
            });
        }
    }
}

#[test]
fn on_every_device_nan_stays_in_its_channel_and_a_first_element_costs_nothing() {
    for device in devices() {
        for poison in [f64::NAN, f64::INFINITY] {
            for shape in [&[5, 3, 7][..], &[5, 3, 16], &[5, 3], &[70, 3]] {
                let inner = shape.get(2).copied().unwrap_or(1);
                let mut data = values(&random(shape, DType::F32, 9));
                data[inner] = poison; // channel 1
                let x = of(data, shape, DType::F32).to_device(&device).unwrap();
                let rectified = RECTIFIERS.map(Finish::Rectified);
                for finish in rectified.into_iter().chain([Finish::Plain, Finish::AddRelu(&x)]) {
                    let (y, statistics) =
                        forward_train(&x, Affine::default(), finish, EPS).unwrap();
                    let nan: Vec<bool> =
                        values(&statistics.var().unwrap()).iter().map(|v| v.is_nan()).collect();
                    assert_eq!(nan, [false, true, false]);
                    for (i, y) in values(&y).iter().enumerate() {
                        assert_eq!(y.is_nan(), i / inner % 3 == 1);
                    }
                }
            }
        }
        // All about 10,000, but for the first element of each channel.
        for shape in [&[64, 2, 64][..], &[4096, 2], &[4096, 8]] {
            let mut data = values(&(random(shape, DType::F64, 10) + 1e4).unwrap());
            (data[0], data[shape.get(2).copied().unwrap_or(1)]) = (0.0, -1e4);
            let x = of(data, shape, DType::F32);
            let (means, vars) = naive_statistics(&x);
            let x = x.to_device(&device).unwrap();
            let (_, statistics) = forward_train(&x, Affine::default(), Finish::Plain, EPS).unwrap();
            assert_close(&statistics.mean().unwrap(), &means, 4.0);
            assert_close(&statistics.var().unwrap(), &vars, 64.0);
        }
    }
}

/// `(n, …, c)` is `(rows, c)` of another shape: the same bits of everything.
#[test]
fn channels_last_are_rows() -> Result<()> {
    const LAST: Format = Format::ChannelsLast;
    for device in devices() {
        for (shape, rows) in [(&[5, 3, 7][..], 15), (&[2, 9, 5, 8], 90), (&[33, 4, 16], 132)] {
            let c = shape[shape.len() - 1];
            let of = |seed| on_device(&random(shape, DType::BF16, seed), &device);
            let [x, residual, grad] = [of(1), of(2), of(3)];
            let flat = |x: &Tensor| x.reshape((rows, c));
            let [weight, bias] = [4, 5].map(|s| on_device(&random(&[c], DType::F32, s), &device));
            let affine = both(&weight, &bias);
            let same = |a: &Tensor, b: &Tensor| {
                assert_eq!(values(&a.flatten_all().unwrap()), values(&b.flatten_all().unwrap()));
            };
            let all = |(a, b): (Gradients, Gradients)| {
                assert_eq!(a.0.dims(), shape);
                for (a, b) in [(&a.0, &b.0), (&a.1, &b.1), (&a.2, &b.2)] {
                    same(a, b);
                }
            };

            let (y, s) = super::forward_train(LAST, &x, affine, Finish::AddRelu(&residual), EPS)?;
            let finish = Finish::AddRelu(&flat(&residual)?);
            let (expected, t) = forward_train(&flat(&x)?, affine, finish, EPS)?;
            assert_eq!(y.dims(), shape);
            same(&y, &expected);
            same(&s.0, &t.0);

            let (x2, grad2) = (flat(&x)?, flat(&grad)?);
            all((
                super::backward_train(LAST, &x, &grad, affine.weight, &s)?,
                backward_train(&x2, &grad2, affine.weight, &s)?,
            ));
            for by in RECTIFIERS {
                all((
                    super::backward_rectified(LAST, by, [&x, &y], &grad, affine, &s)?,
                    backward_rectified(by, &x2, &flat(&y)?, &grad2, affine, &s)?,
                ));
            }
            let running = Running { mean: &s.mean()?, var: &s.var()?, eps: EPS };
            same(
                &super::forward_eval(LAST, &x, running, affine)?,
                &forward_eval(&x2, running, affine)?,
            );
            all((
                super::backward_eval(LAST, &x, &grad, affine.weight, running)?,
                backward_eval(&x2, &grad2, affine.weight, running)?,
            ));
        }
    }
    Ok(())
}
