use candle_core::{DType, Device, Tensor};

use super::*;
use crate::kernels::accumulator;
use crate::kernels::elementwise::testing::*;
use crate::kernels::testing::devices::devices;

const SHAPES: [[usize; 2]; 6] = [[1, 1], [3, 17], [33, 10], [1025, 3], [3, 4099], [300, 130]];

fn targets(n: usize, classes: usize) -> Tensor {
    let classes: Vec<u32> = (0..n).map(|i| (i * 7 % classes) as u32).collect();
    Tensor::from_vec(classes, n, &Device::Cpu).unwrap()
}

fn one(dtype: DType) -> Tensor {
    of(vec![1.0], &[], dtype)
}

/// All rows count alike.
fn even(logits: &Tensor, label_smoothing: f64) -> ClassLoss {
    let classes = logits.dims()[1];
    let reduction = Reduction::Mean;
    ClassLoss { classes, label_smoothing, weights: None, ignored: None, reduction }
}

fn forward(logits: &Tensor, targets: &Tensor, smoothing: f64) -> Result<(Tensor, Tensor)> {
    let (reduced, sums) = cross_entropy_forward(&even(logits, smoothing), logits, targets)?;
    assert!(reduced.total.is_none());
    Ok((reduced.loss, sums))
}

fn of_logits<'a>(
    loss: &'a ClassLoss,
    [logits, targets, log_sum_exp, gradient]: [&'a Tensor; 4],
) -> LogitsGradient<'a> {
    LogitsGradient { loss, logits, targets, log_sum_exp, total: None, gradient }
}

fn backward(
    logits: &Tensor,
    targets: &Tensor,
    log_sum_exp: &Tensor,
    scale: &Tensor,
    smoothing: f64,
    out: DType,
) -> Result<Tensor> {
    let loss = even(logits, smoothing);
    cross_entropy_backward(of_logits(&loss, [logits, targets, log_sum_exp, scale]), out)
}

fn nll(log_probs: &Tensor, targets: &Tensor) -> Result<Tensor> {
    Ok(nll_forward(&even(log_probs, 0.0), log_probs, targets)?.loss)
}

fn nll_gradient(x: &Tensor, targets: &Tensor, scale: &Tensor, out: DType) -> Result<Tensor> {
    nll_backward(&even(x, 0.0), targets, None, scale, out)
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
                let (loss, lse) = forward(&logits, &targets, smoothing).unwrap();
                let (plain, even) = (plain(&logits).unwrap(), even(&logits, smoothing));
                let oracle = portable::cross_entropy_forward(&even, &plain, &targets).unwrap();
                let wide = accumulator(dtype);
                assert_eq!((loss.rank(), loss.dtype(), lse.dims()), (0, wide, &[2, shape[0]][..]));
                // Of one class, the loss is the difference of equal numbers near 1.
                let slack = 8.0 * epsilon(wide) * (1.0 + expected);
                let slack = slack * naive_slack(dtype, logits.elem_count());
                assert!((values(&loss)[0] - expected).abs() <= slack);
                assert!((values(&oracle.0.loss)[0] - expected).abs() <= 16.0 * slack);
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
        let (_, lse) = forward(&logits, &targets, smoothing).unwrap();
        let dx = backward(&logits, &targets, &lse, &scale, smoothing, DType::F64).unwrap();
        let derivative =
            numeric_gradient(&logits, &scale, |x| forward(x, &targets, smoothing).unwrap().0);
        assert_close(&dx, &derivative, difference_tolerance(5.0 * 17.0));
    }
}

#[test]
fn cross_entropy_gradients_in_every_dtype_are_those_of_f64() {
    for dtype in DTYPES {
        for out in DTYPES {
            for shape in SHAPES.into_iter().skip(1) {
                let (logits, targets) = (strided(&shape, dtype, 3), targets(shape[0], shape[1]));
                let logits64 = double(&logits);
                let (_, lse64) = forward(&logits64, &targets, 0.1).unwrap();
                let (_, lse) = forward(&logits, &targets, 0.1).unwrap();
                let scale = of(vec![128.0 * shape[0] as f64], &[], DType::F32);
                let backward = |logits: &Tensor, lse: &Tensor, out| {
                    backward(logits, &targets, lse, &scale, 0.1, out).unwrap()
                };
                let expected = values(&backward(&logits64, &lse64, DType::F64));
                let (plain, even) = (plain(&logits).unwrap(), even(&logits, 0.1));
                let of = of_logits(&even, [&plain, &targets, &lse, &scale]);
                let oracle = portable::cross_entropy_backward(of, out);
                let ours = backward(&logits, &lse, out);
                assert_eq!(ours.dtype(), out);
                let count = 16.0 * (epsilon(accumulator(dtype)) / epsilon(out)).max(1.0);
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
        let (loss, _) = forward(&logits, &targets(2, 50_257), 0.0).unwrap();
        assert_within(&loss, &[50_257f64.ln()], accumulator(dtype), 2.0);
    }
}

#[test]
fn a_target_that_is_no_class_is_named() {
    let logits = random(&[3, 10], DType::F32, 4);
    let targets = Tensor::new(&[0u32, 9, 10], &Device::Cpu).unwrap();
    let error = forward(&logits, &targets, 0.0).unwrap_err().to_string();
    assert!(error.contains("row 2 is 10, expected one of 10 classes"), "{error}");
}

#[test]
fn infinite_logits() {
    let inf = f64::INFINITY;
    for dtype in DTYPES {
        let targets = Tensor::new(&[0u32], &Device::Cpu).unwrap();
        let loss = |data: Vec<f64>, smoothing| {
            let logits = of(data, &[1, 3], dtype);
            values(&forward(&logits, &targets, smoothing).unwrap().0)[0]
        };
        assert!(loss(vec![1.0, inf, 0.0], 0.0).is_nan());
        assert!(loss(vec![1.0, f64::NAN, 0.0], 0.0).is_nan());
        assert_eq!(loss(vec![-inf, 1.0, 0.0], 0.0), inf);
        assert!((loss(vec![0.0, -inf, 0.0], 0.0) - 2f64.ln()).abs() <= epsilon(DType::F32));
        assert_eq!(loss(vec![0.0, -inf, 0.0], 0.1), inf);
        let logits = of(vec![0.0, -inf, 0.0], &[1, 3], dtype);
        let (_, lse) = forward(&logits, &targets, 0.0).unwrap();
        let dx = backward(&logits, &targets, &lse, &one(dtype), 0.0, dtype).unwrap();
        assert_close(&dx, &[-0.5, 0.0, 0.5], 1.0);
    }
}

const PAIRWISE: [Pairwise; 7] = [
    Pairwise::Mse,
    Pairwise::Huber { delta: 0.75 },
    Pairwise::BinaryCrossEntropy,
    Pairwise::BinaryCrossEntropyWithLogit,
    Pairwise::L1,
    Pairwise::KlDiv { log_target: false },
    Pairwise::KlDiv { log_target: true },
];

fn exact(loss: Pairwise, a: f64, b: f64) -> f64 {
    match loss {
        Pairwise::Mse => (a - b).powi(2),
        Pairwise::Huber { delta } if (a - b).abs() > delta => delta * ((a - b).abs() - delta / 2.0),
        Pairwise::Huber { .. } => (a - b).powi(2) / 2.0,
        Pairwise::BinaryCrossEntropy => -b * a.ln() - (1.0 - b) * (1.0 - a).ln(),
        Pairwise::BinaryCrossEntropyWithLogit => {
            exact(Pairwise::BinaryCrossEntropy, 1.0 / (1.0 + (-a).exp()), b)
        }
        Pairwise::L1 => (a - b).abs(),
        Pairwise::KlDiv { log_target: false } => b * (b.ln() - a),
        Pairwise::KlDiv { log_target: true } => b.exp() * (b - a),
    }
}

/// Inputs from -2 to 2, or probabilities away from 0 and 1, where 16-bit dtypes are coarse.
fn pair(loss: Pairwise, shape: &[usize], dtype: DType) -> (Tensor, Tensor) {
    let (a, b) = (strided(shape, DType::F64, 5), random(shape, DType::F64, 6));
    let probability = |x: Tensor| x.affine(0.2, 0.5).unwrap();
    let (a, b) = match loss {
        Pairwise::BinaryCrossEntropy => (probability(a), probability(b)),
        Pairwise::BinaryCrossEntropyWithLogit | Pairwise::KlDiv { log_target: false } => {
            (a, probability(b))
        }
        _ => (a, b),
    };
    (a.to_dtype(dtype).unwrap(), b.to_dtype(dtype).unwrap())
}

#[test]
fn pairwise_losses_match_a_loop() {
    for loss in PAIRWISE {
        for dtype in DTYPES {
            for shape in SHAPES {
                let (a, b) = pair(loss, &shape, dtype);
                let count = a.elem_count() as f64;
                let pairs = values(&a).into_iter().zip(values(&b));
                let expected = pairs.map(|(a, b)| exact(loss, a, b)).sum::<f64>() / count;
                let mean = pairwise_forward(loss, Reduction::Mean, &a, &b).unwrap();
                assert_eq!((mean.rank(), mean.dtype()), (0, accumulator(dtype)));
                let slack = naive_slack(dtype, a.elem_count());
                assert_close(&mean, &[expected], 16.0 * slack);
                let oracle =
                    portable::pairwise_forward(loss, Reduction::Mean, &plain(&a).unwrap(), &b)
                        .unwrap();
                assert_close(&oracle, &[expected], 64.0 * slack);
            }
        }
    }
}

#[test]
fn pairwise_gradients_are_slopes_in_every_dtype() {
    for loss in PAIRWISE {
        for argument in [LossArgument::Input, LossArgument::Target] {
            let (a, b) = pair(loss, &[3, 11], DType::F64);
            let derivative = |a: &Tensor, b: &Tensor, out| {
                let scale = of(vec![3.0], &[], DType::F32);
                pairwise_backward((loss, argument), Reduction::Mean, [a, b, &scale], out).unwrap()
            };
            let weight = of(vec![3.0], &[], DType::F64);
            let moved = if argument == LossArgument::Input { &a } else { &b };
            let expected = numeric_gradient(moved, &weight, |x| {
                let (a, b) = if argument == LossArgument::Input { (x, &b) } else { (&a, x) };
                pairwise_forward(loss, Reduction::Mean, a, b).unwrap()
            });
            assert_close(&derivative(&a, &b, DType::F64), &expected, difference_tolerance(99.0));
            for dtype in DTYPES {
                for shape in SHAPES {
                    let (a, b) = pair(loss, &shape, dtype);
                    let exact = values(&derivative(&double(&a), &double(&b), DType::F64));
                    let scale = of(vec![3.0], &[], DType::F32);
                    for out in [dtype, DType::F32] {
                        let (a, b) = (plain(&a).unwrap(), plain(&b).unwrap());
                        let count = 8.0 * (epsilon(accumulator(dtype)) / epsilon(out)).max(1.0);
                        let ours = derivative(&a, &b, out);
                        assert_eq!((ours.dtype(), ours.dims()), (out, &shape[..]));
                        assert_close(&ours, &exact, count);
                        let kind = (loss, argument);
                        let oracle = portable::pairwise_backward(
                            kind,
                            Reduction::Mean,
                            [&a, &b, &scale],
                            out,
                        );
                        assert_close(&oracle.unwrap(), &exact, count);
                    }
                }
            }
        }
    }
}

#[test]
fn certain_probabilities_cost_a_hundred_at_most() {
    let (p, t) = (of(vec![0.0, 1.0], &[2], DType::F32), of(vec![1.0, 1.0], &[2], DType::F32));
    let loss = pairwise_forward(Pairwise::BinaryCrossEntropy, Reduction::Mean, &p, &t).unwrap();
    assert_eq!(values(&loss), [50.0]);
    let kind = (Pairwise::BinaryCrossEntropy, LossArgument::Input);
    let derivative =
        pairwise_backward(kind, Reduction::Mean, [&p, &t, &one(DType::F32)], DType::F32).unwrap();
    assert!(values(&derivative).iter().all(|x| x.is_finite()));
    // A logit has no such end.
    let logits = of(vec![-300.0, 300.0], &[2], DType::F32);
    let loss =
        pairwise_forward(Pairwise::BinaryCrossEntropyWithLogit, Reduction::Mean, &logits, &t)
            .unwrap();
    assert_eq!(values(&loss), [150.0]);
}

#[test]
fn pairwise_losses_at_their_edges() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let pairs = |loss, argument, a: &[f64], b: &[f64]| {
        let (a, b) =
            (of(a.to_vec(), &[a.len()], DType::F32), of(b.to_vec(), &[b.len()], DType::F32));
        let n = [a.elem_count() as f64];
        let scale = of(n.to_vec(), &[], DType::F32);
        let kind = (loss, argument);
        let ours = pairwise_backward(kind, Reduction::Mean, [&a, &b, &scale], DType::F32).unwrap();
        let oracle =
            portable::pairwise_backward(kind, Reduction::Mean, [&a, &b, &scale], DType::F32)
                .unwrap();
        let terms = pairwise_forward(loss, Reduction::None, &a, &b).unwrap();
        let text = |t: &Tensor| format!("{:?}", values(t));
        assert_eq!(text(&ours), text(&oracle), "{loss:?} {argument:?}");
        (text(&terms), text(&ours))
    };
    let (terms, slopes) =
        pairs(Pairwise::L1, LossArgument::Input, &[2.0, 1.0, -inf, nan], &[2.0, 3.0, 1.0, 1.0]);
    assert_eq!((&*terms, &*slopes), ("[0.0, 2.0, inf, NaN]", "[0.0, -1.0, -1.0, NaN]"));
    let kl = |log_target| Pairwise::KlDiv { log_target };
    let (terms, slopes) = pairs(kl(false), LossArgument::Target, &[-1.0, nan], &[0.0, 1.0]);
    assert_eq!((&*terms, &*slopes), ("[0.0, NaN]", "[-inf, NaN]"));
    let (terms, slopes) = pairs(kl(true), LossArgument::Input, &[-1.0, 0.0], &[-1.0, nan]);
    assert!(terms.starts_with("[0.0, NaN") && slopes.ends_with("NaN]"), "{terms} {slopes}");
}

#[test]
fn nll_picks_and_its_gradient_puts_back() {
    for dtype in DTYPES {
        for shape in SHAPES {
            let (x, targets) = (strided(&shape, dtype, 7), targets(shape[0], shape[1]));
            let rows: Vec<_> = values(&x).chunks(shape[1]).map(<[f64]>::to_vec).collect();
            let picked = rows.iter().zip(values(&targets)).map(|(row, class)| row[class as usize]);
            let expected = -picked.sum::<f64>() / shape[0] as f64;
            let tolerance = 8.0 * epsilon(accumulator(dtype));
            let plain = plain(&x).unwrap();
            let oracle = portable::nll_forward(&even(&x, 0.0), &plain, &targets).unwrap().loss;
            for loss in [nll(&x, &targets).unwrap(), oracle] {
                assert!((values(&loss)[0] - expected).abs() <= tolerance);
            }
            let scale = of(vec![4.0 * shape[0] as f64], &[], DType::F32);
            let dx = nll_gradient(&x, &targets, &scale, dtype).unwrap();
            let (classes, mut derivatives) = (values(&targets), vec![0.0; x.elem_count()]);
            for (row, class) in classes.iter().enumerate() {
                derivatives[row * shape[1] + *class as usize] = -4.0;
            }
            assert_eq!((dx.dtype(), values(&dx)), (dtype, derivatives));
        }
    }
    let x = random(&[2, 3], DType::F32, 8);
    let error = nll(&x, &Tensor::new(&[0u32, 3], &Device::Cpu).unwrap()).unwrap_err();
    assert!(error.to_string().contains("row 1 is 3, expected one of 3 classes"), "{error}");
}

#[test]
fn gpus_agree() {
    for dtype in DTYPES {
        let scale = of(vec![128.0], &[], DType::F32);
        for shape in SHAPES.into_iter().chain([[3, 64], [2, 9000]]) {
            let (x, targets) = (strided(&shape, dtype, 1), targets(shape[0], shape[1]));
            for smoothing in [0.0, 0.1] {
                assert_gpus_agree(&[&x, &targets], 64.0, |t| {
                    let (loss, sums) = forward(&t[0], &t[1], smoothing)?;
                    Ok(vec![loss, sums])
                });
                let (_, sums) = forward(&x, &targets, smoothing).unwrap();
                for out in DTYPES.into_iter().filter(|_| shape[1] > 1) {
                    let count = 64.0 * (epsilon(accumulator(dtype)) / epsilon(out)).max(1.0);
                    assert_gpus_agree(&[&x, &targets, &sums, &scale], count, |t| {
                        let dx = backward(&t[0], &t[1], &t[2], &t[3], smoothing, out)?;
                        Ok(vec![dx])
                    });
                }
            }
            assert_gpus_near(&[&x, &targets, &scale], 64.0, |t| {
                let dx = nll_gradient(&t[0], &t[1], &t[2], dtype)?;
                Ok(vec![nll(&t[0], &t[1])?, dx])
            });
            for loss in PAIRWISE {
                let (a, b) = pair(loss, &shape, dtype);
                let each = random(&shape, DType::F32, 9);
                for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                    let gradient = if reduction == Reduction::None { &each } else { &scale };
                    assert_gpus_near(&[&a, &b, gradient], 64.0, |t| {
                        let mut all = vec![pairwise_forward(loss, reduction, &t[0], &t[1])?];
                        for argument in [LossArgument::Input, LossArgument::Target] {
                            for out in [DType::F32, dtype] {
                                let (of, t) = ((loss, argument), [&t[0], &t[1], &t[2]]);
                                all.push(pairwise_backward(of, reduction, t, out)?);
                            }
                        }
                        Ok(all)
                    });
                }
            }
        }
    }
}

/// What is behind the classes, here NaN, changes nothing, and gets no gradient.
#[test]
fn rows_on_gpus_may_be_longer_than_their_classes() -> Result<()> {
    assert_eq!(room(50257, &Device::Cpu), 50257);
    for gpu in crate::kernels::testing::devices::gpus() {
        assert_eq!([1, 1023, 1024, 1025].map(|n| room(n, &gpu)), [1, 1023, 1024, 1088]);
        for dtype in DTYPES {
            for [n, classes, apart] in [[3, 17, 24], [2, 1025, 1088], [5, 1031, 1033]] {
                let x = random(&[n, classes], dtype, 1).to_device(&gpu)?;
                let nan = (x.ones_like()?.narrow(1, 0, 1)? * f64::NAN)?;
                let behind = nan.broadcast_as((n, apart - classes))?;
                let long = Tensor::cat(&[&x, &behind], 1)?;
                let targets = targets(n, classes).to_device(&gpu)?;
                let scale = Tensor::new(128f32, &gpu)?;
                for smoothing in [0.0, 0.1] {
                    let even = even(&x, smoothing);
                    let (reduced, sums) = cross_entropy_forward(&even, &long, &targets)?;
                    let of = of_logits(&even, [&long, &targets, &sums, &scale]);
                    let dx = cross_entropy_backward(of, dtype)?;
                    let (plain, plain_sums) = forward(&x, &targets, smoothing)?;
                    let plain_dx = backward(&x, &targets, &sums, &scale, smoothing, dtype)?;
                    let read = |t: &Tensor| t.to_device(&Device::Cpu).map(|t| values(&t));
                    assert_eq!(read(&dx.narrow(1, 0, classes)?)?, read(&plain_dx)?);
                    let rest = read(&dx.narrow(1, classes, apart - classes)?)?;
                    assert!(rest.iter().all(|&x| x == 0.0), "{rest:?}");
                    // Threads share out a row by how it lies, and so add it up in another order.
                    assert_close(&reduced.loss.to_device(&Device::Cpu)?, &read(&plain)?, 8.0);
                    assert_close(&sums.to_device(&Device::Cpu)?, &read(&plain_sums)?, 8.0);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_target_that_is_no_class_is_nan_on_gpus() {
    for gpu in crate::kernels::testing::devices::gpus() {
        let x = random(&[2, 3], DType::F16, 8).to_device(&gpu).unwrap();
        let targets = Tensor::new(&[0u32, 3], &gpu).unwrap();
        let (loss, sums) = forward(&x, &targets, 0.0).unwrap();
        let scale = Tensor::new(1f32, &gpu).unwrap();
        let dx = backward(&x, &targets, &sums, &scale, 0.0, DType::F32).unwrap();
        let read = |t: &Tensor| values(&t.to_device(&Device::Cpu).unwrap());
        assert!(read(&loss)[0].is_nan() && read(&nll(&x, &targets).unwrap())[0].is_nan());
        let nan: Vec<bool> = read(&dx).iter().map(|x| x.is_nan()).collect();
        assert_eq!(nan, [false, false, false, true, true, true]);
    }
}

#[test]
fn gpus_agree_on_infinite_logits() {
    let inf = f64::INFINITY;
    let rows = vec![1.0, inf, 0.0, 1.0, f64::NAN, 0.0, -inf, 1.0, 0.0, 1.0, -inf, 0.0];
    for dtype in DTYPES {
        for row in rows.chunks(3) {
            let (x, targets) = (of(row.to_vec(), &[1, 3], dtype), targets(1, 3));
            assert_gpus_agree(&[&x, &targets], 8.0, |t| {
                let (loss, sums) = forward(&t[0], &t[1], 0.0)?;
                Ok(vec![loss, sums])
            });
        }
    }
}

/// A logarithm that is kept as one number loses the digits of `log_sum_exp - logit` as the logits grow.
#[test]
fn an_offset_of_the_logits_does_not_matter() -> Result<()> {
    let near = strided(&[5, 9], DType::F32, 8);
    // Whole steps of 2^-8, which every offset leaves exact.
    let near = ((near * 256.0)?.round()? / 256.0)?;
    let (targets, scale) = (targets(5, 9), one(DType::F32));
    for offset in [0.0, 100.0, 10_000.0, -10_000.0] {
        let logits = (&near + offset)?;
        let exact = near.to_dtype(DType::F64)?;
        let (_, lse) = forward(&exact, &targets, 0.1)?;
        let expected = values(&backward(&exact, &targets, &lse, &scale, 0.1, DType::F64)?);
        let even = even(&logits, 0.1);
        let (_, lse) = portable::cross_entropy_forward(&even, &logits, &targets)?;
        let of = of_logits(&even, [&logits, &targets, &lse, &scale]);
        let mut every = vec![portable::cross_entropy_backward(of, DType::F32)?];
        for device in devices() {
            let [logits, targets, scale] =
                [&logits, &targets, &scale].map(|t| t.to_device(&device));
            let (logits, targets, scale) = (logits?.copy()?, targets?, scale?);
            let (_, lse) = forward(&logits, &targets, 0.1)?;
            every.push(backward(&logits, &targets, &lse, &scale, 0.1, DType::F32)?);
            // Last, as it is written over the logits.
            let of = of_logits(&even, [&logits, &targets, &lse, &scale]);
            every.push(cross_entropy_backward_assign(of)?);
        }
        for dx in every {
            for (actual, expected) in values(&dx).into_iter().zip(&expected) {
                // Of numbers up to 1/5, from an exponential and a logarithm of a few places each.
                let error = (actual - expected).abs();
                assert!(
                    error <= 2.0 * f64::from(f32::EPSILON),
                    "{offset}: {actual}, not {expected}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn room_is_rows_of_zeros_on_every_device() -> Result<()> {
    for device in devices() {
        for dtype in [DType::BF16, DType::F32] {
            let x = on_device(&random(&[5, 3], dtype, 1), &device);
            let bias = on_device(&random(&[5], dtype, 2), &device);
            for x in [&x, &x.t()?, &bias] {
                let rows = x.dim(0)?;
                assert_eq!(with_room(x, rows)?.dims(), x.dims());
                let y = with_room(x, rows + 4)?;
                assert_eq!(y.dim(0)?, rows + 4);
                let all: Vec<f64> =
                    values(x).into_iter().chain(vec![0.0; 4 * x.elem_count() / rows]).collect();
                assert_eq!(values(&y), all);
            }
        }
    }
    Ok(())
}
