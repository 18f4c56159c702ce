//! Class losses with weights, ignored rows and every reduction. `tests/it/losses` compares them with F64.

use candle_core::{DType, Device, Result, Tensor};

use super::class::{ClassLoss, Reduction};
use super::*;
use crate::kernels::accumulator;
use crate::kernels::elementwise::testing::*;
use crate::kernels::testing::devices::{devices, gpus};

const SHAPES: [[usize; 2]; 4] = [[3, 17], [33, 10], [1025, 3], [2, 4099]];

/// The row of 1, 5, 9, … is ignored, as class 1, others are of classes that are no neighbours.
fn targets(n: usize, classes: usize) -> Tensor {
    let class = |row: usize| if row % 4 == 1 { 1 } else { (row * 7 % classes) as u32 };
    Tensor::from_vec((0..n).map(class).collect(), n, &Device::Cpu).unwrap()
}

/// Every combination of settings.
fn settings(classes: usize, dtype: DType) -> Vec<ClassLoss> {
    let weights = random(&[classes], accumulator(dtype), 5).affine(0.25, 1.0).unwrap();
    let mut all = Vec::new();
    for label_smoothing in [0.0, 0.1] {
        for weights in [None, Some(weights.clone())] {
            for ignored in [None, Some(1)] {
                for reduction in [Reduction::Mean, Reduction::Sum, Reduction::None] {
                    let weights = weights.clone();
                    all.push(ClassLoss { classes, label_smoothing, weights, ignored, reduction });
                }
            }
        }
    }
    all
}

/// Losses, total and gradients of cross entropy and of the negative log-likelihood of `x - 3`.
fn all(loss: &ClassLoss, t: &[Tensor], portable: bool) -> Result<Vec<Tensor>> {
    let weights = loss.weights.as_ref().map(|_| t[3].clone());
    let (loss, x) = (&ClassLoss { weights, ..loss.clone() }, plain(&t[0])?);
    let (targets, gradient, dtype) = (&t[1], &t[2], x.dtype());
    let (reduced, log_sum_exp) = match portable {
        true => portable::cross_entropy_forward(loss, &x, targets)?,
        false => cross_entropy_forward(loss, &t[0], targets)?,
    };
    let (total, log_sum_exp) = (reduced.total.as_ref(), &log_sum_exp);
    let of = LogitsGradient { loss, logits: &x, targets, log_sum_exp, total, gradient };
    let mut all = vec![reduced.loss.clone()];
    all.extend(reduced.total.clone());
    for out in [dtype, DType::F32] {
        all.push(match portable {
            true => portable::cross_entropy_backward(of, out)?,
            false => cross_entropy_backward(of, out)?,
        });
    }
    if !portable {
        let over = x.copy()?;
        let over = cross_entropy_backward_assign(LogitsGradient { logits: &over, ..of })?;
        let apart = cross_entropy_backward(of, dtype)?.to_device(&Device::Cpu)?;
        assert_close(&over.to_device(&Device::Cpu)?, &values(&apart), 0.0);
    }
    let log_probs = (x - 3.0)?;
    let reduced = match portable {
        true => portable::nll_forward(loss, &log_probs, targets)?,
        false => nll_forward(loss, &log_probs, targets)?,
    };
    all.push(match portable {
        true => portable::nll_backward(loss, [targets, gradient], reduced.total.as_ref(), dtype)?,
        false => nll_backward(loss, targets, reduced.total.as_ref(), gradient, dtype)?,
    });
    all.push(reduced.loss);
    Ok(all)
}

#[test]
fn settings_agree_with_candles_operators_and_gpus() -> Result<()> {
    for dtype in DTYPES {
        for [n, classes] in SHAPES {
            let (x, targets) = (strided(&[n, classes], dtype, 1), targets(n, classes));
            for loss in settings(classes, dtype) {
                let each = loss.reduction == Reduction::None;
                let dims = if each { vec![n] } else { vec![] };
                let gradient = random(&dims, DType::F32, 3);
                let none = Tensor::new(f32::NAN, &Device::Cpu)?;
                let weights = loss.weights.clone().unwrap_or(none);
                let inputs = [&x, &targets, &gradient, &weights];
                let ours = all(&loss, &inputs.map(Tensor::clone), false)?;
                let oracle = all(&loss, &inputs.map(Tensor::clone), true)?;
                assert_eq!(ours.len(), oracle.len());
                for (ours, oracle) in ours.iter().zip(&oracle) {
                    assert_eq!((ours.dtype(), ours.dims()), (oracle.dtype(), oracle.dims()));
                    let count = if ours.dtype() == accumulator(dtype) { 256.0 } else { 2.0 };
                    assert_close(ours, &values(oracle), count);
                }
                for count in gpus().iter().map(|_| 256.0) {
                    assert_gpus_agree(&inputs, count, |t| {
                        // In the dtype of the arithmetic, as 16 bits would leave room for 256 epsilons.
                        let wide = |x: Tensor| x.to_dtype(accumulator(dtype));
                        let kept = |x: &Tensor| x.dtype() == accumulator(dtype);
                        all(&loss, t, false)?.into_iter().filter(kept).map(wide).collect()
                    });
                    assert_gpus_agree(&inputs, 2.0, |t| {
                        let rounded = |x: &Tensor| x.dtype() == dtype && dtype.size_in_bytes() < 4;
                        Ok(all(&loss, t, false)?.into_iter().filter(rounded).collect())
                    });
                }
            }
        }
    }
    Ok(())
}

/// NaN in the logits of an ignored row reaches nothing.
#[test]
fn ignored_rows_are_exactly_zero() -> Result<()> {
    for device in devices() {
        for loss in settings(3, DType::F32).into_iter().filter(|loss| loss.ignored.is_some()) {
            let bad = [[0.5f32, -1.0, 2.0], [f32::NAN, f32::INFINITY, 0.0], [1.0, 0.0, -0.5]];
            let x = Tensor::new(&bad, &device)?;
            let targets = Tensor::new(&[0u32, 1, 2], &device)?;
            let each = loss.reduction == Reduction::None;
            let dims = if each { vec![3] } else { vec![] };
            let gradient = random(&dims, DType::F32, 3);
            let weights = loss.weights.clone().unwrap_or(gradient.clone()).to_device(&device)?;
            let t = [x, targets, gradient.to_device(&device)?, weights];
            let results = all(&loss, &t, false)?;
            for result in results.iter().chain(&all(&loss, &t, true)?) {
                let result = values(&result.to_device(&Device::Cpu)?);
                assert!(result.iter().all(|x| x.is_finite()), "{loss:?}: {result:?}");
                if result.len() == 9 {
                    assert_eq!(result[3..6], [0.0; 3], "{loss:?}");
                    assert!(result[0] != 0.0 && result[8] != 0.0, "{loss:?}");
                } else if each {
                    assert_eq!(result[1], 0.0);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn targets_become_numbers_on_every_device() -> Result<()> {
    for device in devices() {
        let numbers = |targets: &[i64], ignore_index| {
            let (targets, ignored) =
                class_targets("nll", &Tensor::new(targets, &device)?, 5, ignore_index)?;
            Ok::<_, candle_core::Error>((targets.to_vec1::<u32>()?, ignored))
        };
        const IGNORED: u32 = u32::MAX - 1;
        assert_eq!(numbers(&[0, -100, 4], Some(-100))?, (vec![0, IGNORED, 4], Some(IGNORED)));
        assert_eq!(numbers(&[0, 3, 4], Some(3))?, (vec![0, 3, 4], Some(3)));
        assert_eq!(numbers(&[0, 9, 4], Some(9))?, (vec![0, 9, 4], Some(9)));
        assert_eq!(numbers(&[0, 3], None)?, (vec![0, 3], None));
        let u8s = Tensor::new(&[0u8, 255], &device)?;
        let (u8s, ignored) = class_targets("nll", &u8s, 5, Some(255))?;
        assert_eq!((u8s.to_vec1::<u32>()?, ignored), (vec![0, 255], Some(255)));
        let u32s = Tensor::new(&[0u32, 4], &device)?;
        assert_eq!(class_targets("nll", &u32s, 5, Some(-100))?.1, None);
        let wrong = [0, -100, -1, 1 << 32, i64::from(IGNORED), i64::MIN];
        if device.is_cuda() {
            let max = u32::MAX;
            assert_eq!(numbers(&wrong, Some(-100))?.0, [0, IGNORED, max, max, max, max]);
        } else {
            for wrong in &wrong[2..] {
                let error = numbers(&[-100, 0, *wrong], Some(-100)).unwrap_err().to_string();
                assert!(error.contains(&format!("row 2 is {wrong}, expected one of 5")), "{error}");
            }
        }
    }
    Ok(())
}

#[test]
fn gpus_give_nan_for_a_mean_of_no_rows_and_for_what_is_no_class() -> Result<()> {
    for gpu in gpus() {
        let x = random(&[3, 5], DType::F16, 1).to_device(&gpu)?;
        let read = |t: &Tensor| t.to_device(&Device::Cpu).map(|t| values(&t));
        for loss in settings(5, DType::F16).into_iter().filter(|loss| loss.ignored.is_some()) {
            let each = loss.reduction == Reduction::None;
            let gradient = Tensor::ones(if each { vec![3] } else { vec![] }, DType::F32, &gpu)?;
            let weights =
                loss.weights.clone().map(|weights| weights.to_device(&gpu)).transpose()?;
            let weights = weights.unwrap_or_else(|| gradient.clone());
            let tensors = |targets: [u32; 3]| {
                let targets = Tensor::new(&targets, &gpu)?;
                all(&loss, &[x.clone(), targets, gradient.clone(), weights.clone()], false)
            };
            let none = tensors([1, 1, 1])?;
            let expected = if loss.reduction == Reduction::Mean { f64::NAN } else { 0.0 };
            for result in none {
                let result = read(&result)?;
                // A total of 0 among them.
                let fits = |x: &f64| *x == 0.0 || expected.is_nan() && x.is_nan();
                assert!(result.iter().all(fits), "{loss:?}: {result:?}");
                assert!(result.len() == 1 || result.iter().all(|&x| x == 0.0));
            }
            let wrong = tensors([0, 1, 7])?;
            let dx = read(&wrong[wrong.len() - 2])?;
            let nan: Vec<bool> = dx.chunks(5).map(|row| row.iter().all(|x| x.is_nan())).collect();
            // A mean over weights, of which one is NaN, is NaN as a whole.
            let whole = loss.reduction == Reduction::Mean;
            assert!(nan[2] && !nan[1] && (whole || !nan[0]), "{loss:?}: {dx:?}");
            assert!(read(&wrong[0])?.iter().any(|x| x.is_nan()));
        }
    }
    Ok(())
}
