//! The learning rate finder, and accumulation.

use candle_amp::optim::{Accumulation, LrFinder, LrFinderConfig, Sgd, SgdConfig};
use candle_amp::{GradScaler, nn, ops};
use candle_core::{DType, Device, Var};

use crate::util::{assert_close, random};

fn sgd() -> Sgd {
    let w = Var::ones(1, DType::F32, &Device::Cpu).unwrap();
    Sgd::new(vec![w], SgdConfig::default()).unwrap()
}

/// A loss that falls fastest at a rate of 1e-2, and rises after 1e-1.
fn loss(lr: f64) -> f64 {
    let at = lr.log10();
    2.0 - ((at + 2.0) * 3.0).tanh() + if at > -1.0 { (at + 1.0).powi(2) * 8.0 } else { 0.0 }
}

#[test]
fn the_finder_suggests_the_steepest_descent() -> candle_amp::Result<()> {
    let mut sgd = sgd();
    let config = LrFinderConfig {
        min_lr: 1e-5,
        max_lr: 10.0,
        steps: 61,
        smoothing: 0.0,
        ..Default::default()
    };
    let mut finder = LrFinder::new(config, &mut sgd)?;
    let mut rates = Vec::new();
    loop {
        rates.push(sgd.learning_rate());
        if !finder.step(loss(sgd.learning_rate()), &mut sgd) {
            break;
        }
    }
    // Ten rates a decade, until the loss is four times its least, which is nearly 1.
    for (i, rate) in rates.iter().enumerate() {
        let expected = 1e-5 * 10f64.powf(i as f64 / 10.0);
        assert!((rate / expected - 1.0).abs() < 1e-12, "{i}: {rate}");
    }
    let least = finder.history().iter().map(|(_, loss)| *loss).fold(f64::INFINITY, f64::min);
    let (before, last) = (finder.history()[rates.len() - 2].1, finder.history()[rates.len() - 1].1);
    assert!(before <= 4.0 * least && last > 4.0 * least, "{before} {last}");
    assert!(rates.len() < 61 && finder.is_over());
    assert!(!finder.step(0.0, &mut sgd));
    assert_eq!(finder.history().len(), rates.len());
    let suggested = finder.suggestion().expect("it fell");
    assert!((suggested / 1e-2 - 1.0).abs() < 1e-9, "{suggested}");
    Ok(())
}

/// The numbers of Lightning's rule: an average from 0, corrected for its start.
#[test]
fn losses_are_smoothed_without_bias() -> candle_amp::Result<()> {
    let mut sgd = sgd();
    let config = LrFinderConfig { steps: 3, smoothing: 0.5, ..Default::default() };
    let mut finder = LrFinder::new(config, &mut sgd)?;
    let going = [3.0, 6.0, 3.0].map(|loss| finder.step(loss, &mut sgd));
    assert_eq!(going, [true, true, false]);
    let smoothed: Vec<f64> = finder.history().iter().map(|(_, loss)| *loss).collect();
    for (actual, expected) in smoothed.iter().zip([3.0, 5.0, 3.375 / 0.875]) {
        assert!((actual - expected).abs() < 1e-12, "{smoothed:?}");
    }
    assert!((sgd.learning_rate() / 10.0 - 1.0).abs() < 1e-12, "it stays at the last rate");
    assert_eq!(finder.suggestion(), None, "ten losses do not count");
    Ok(())
}

#[test]
fn the_finder_ends_where_the_loss_diverges() -> candle_amp::Result<()> {
    let config = LrFinderConfig { smoothing: 0.0, ..Default::default() };
    for (losses, over) in [
        ([1.0, f64::NAN], true),
        ([1.0, f64::INFINITY], true),
        ([1.0, 4.1], true),
        ([1.0, 3.9], false),
        // Below zero, four times is no sign of divergence.
        ([-1.0, 1.9], false),
        ([-1.0, 2.1], true),
    ] {
        let mut sgd = sgd();
        let mut finder = LrFinder::new(config, &mut sgd)?;
        let going = losses.map(|loss| finder.step(loss, &mut sgd));
        assert_eq!(going, [true, !over], "{losses:?}");
    }
    let rising = |i: i32| 1.0 + 1e-3 * f64::from(i);
    let (mut sgd, config) = (sgd(), LrFinderConfig { steps: 30, ..config });
    let mut finder = LrFinder::new(config, &mut sgd)?;
    (0..30).for_each(|i| {
        let _ = finder.step(rising(i), &mut sgd);
    });
    assert_eq!(finder.suggestion(), None, "it fell nowhere");
    Ok(())
}

#[test]
fn settings_of_the_finder_are_checked() {
    let good = LrFinderConfig::default();
    for (wrong, name) in [
        (LrFinderConfig { min_lr: 0.0, ..good }, "min_lr"),
        (LrFinderConfig { min_lr: f64::NAN, ..good }, "min_lr"),
        (LrFinderConfig { max_lr: 1e-8, ..good }, "max_lr"),
        (LrFinderConfig { max_lr: 1e39, ..good }, "max_lr"),
        (LrFinderConfig { steps: 1, ..good }, "steps"),
        (LrFinderConfig { smoothing: 1.0, ..good }, "smoothing"),
        (LrFinderConfig { divergence: 1.0, ..good }, "divergence"),
    ] {
        let message = LrFinder::new(wrong, &mut sgd()).expect_err(name).to_string();
        assert!(message.starts_with(name), "{message}");
    }
    let message = Accumulation::new(0).expect_err("no micro-batch").to_string();
    assert_eq!(message, "steps is 0, expected at least 1");
}

/// Equal micro-batches give the gradient of the whole batch; where an epoch ends, a step is due.
#[test]
fn micro_batches_give_the_gradient_of_the_batch() -> candle_amp::Result<()> {
    let w = Var::from_tensor(&random(1, (4, 6), DType::F32))?;
    let (x, y) = (random(2, (12, 6), DType::F32), random(3, (12, 4), DType::F32));
    let loss = |from, count| {
        let part = ops::linear(&x.narrow(0, from, count)?, &w, None)?;
        nn::loss::mse(&part, &y.narrow(0, from, count)?)
    };
    let (mut scaler, mut accumulation) = (GradScaler::default(), Accumulation::new(3)?);
    scaler.scale(&loss(0, 12)?)?.backward()?;
    let expected = scaler.grad(&w)?.expect("a gradient");
    scaler.zero_grad();
    for part in 0..3 {
        let loss = accumulation.divide(&loss(4 * part, 4)?)?;
        assert_eq!(loss.dtype(), DType::F32);
        scaler.scale(&loss)?.backward()?;
        assert_eq!(accumulation.counted(), part);
        assert_eq!(accumulation.is_step(false), part == 2);
    }
    assert_close("gradient", &scaler.grad(&w)?.expect("a gradient"), &expected, DType::F32, 8.0);
    let due = [false, true, false, false, false].map(|last| accumulation.is_step(last));
    assert_eq!(due, [false, true, false, false, true]);
    assert_eq!((accumulation.steps(), accumulation.counted()), (3, 0));
    Ok(())
}
