//! The average of the weights.

use candle_amp::error::OptimizerError;
use candle_amp::optim::{Ema, EmaConfig, EmaState};
use candle_amp::{Error, Parameters};
use candle_core::{DType, Tensor, Var};

use super::variables;
use crate::util::{assert_same, epsilon, random, to_vec};

fn named(vars: &[Var]) -> candle_amp::Result<Parameters> {
    Parameters::named(["a", "b", "c", "d", "e"].into_iter().zip(vars.iter().cloned()))
}

const DTYPES: [DType; 4] = [DType::F32, DType::BF16, DType::F16, DType::F64];

#[test]
fn it_is_the_formula_whatever_the_dtype() -> candle_amp::Result<()> {
    for (warm_up, decay) in [(false, 0.9), (true, 0.999), (true, 0.25)] {
        let vars = variables(&DTYPES)?;
        let mut ema = Ema::new(&named(&vars)?, EmaConfig { decay, warm_up })?;
        let mut expected: Vec<Vec<f64>> = vars.iter().map(|v| to_vec(v)).collect();
        for n in 1..6u32 {
            let kept = decay.min((1.0 + f64::from(n)) / (10.0 + f64::from(n)));
            let kept = if warm_up { kept } else { decay };
            assert_eq!(ema.decay(), kept);
            for (var, average) in vars.iter().zip(&mut expected) {
                var.set(&random(50 + u64::from(n), var.shape(), var.dtype()))?;
                average
                    .iter_mut()
                    .zip(to_vec(var))
                    .for_each(|(a, w)| *a += (1.0 - kept) * (w - *a));
            }
            ema.update()?;
        }
        for (var, expected) in vars.iter().zip(expected) {
            let average = ema.average(var).expect("it has one");
            assert_ne!(
                average.dtype().is_float(),
                matches!(average.dtype(), DType::BF16 | DType::F16)
            );
            for (a, e) in to_vec(average).iter().zip(expected) {
                // Weights are within 1; five updates of three roundings each.
                assert!((a - e).abs() <= 15.0 * epsilon(average.dtype()), "{a} for {e}");
            }
        }
    }
    Ok(())
}

#[test]
fn the_weights_come_back_bit_for_bit() -> candle_amp::Result<()> {
    let vars = variables(&DTYPES)?;
    let mut ema = Ema::new(&named(&vars)?, EmaConfig::default())?;
    for var in &vars {
        var.set(&random(70, var.shape(), var.dtype()))?;
    }
    ema.update()?;
    let before: Vec<Tensor> = vars.iter().map(|v| v.copy()).collect::<candle_core::Result<_>>()?;
    let same = |what: &str, expected: &[Tensor]| {
        vars.iter().zip(expected).for_each(|(var, expected)| assert_same(what, var, expected));
    };
    let averages = vars.iter().map(|v| ema.average(v).expect("one").to_dtype(v.dtype()));
    let averages: Vec<Tensor> = averages.collect::<candle_core::Result<_>>()?;
    ema.scope(|| same("inside", &averages))?;
    same("after", &before);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let _ = ema.scope(|| panic!("an evaluation that fails"));
    }));
    assert!(panicked.is_err());
    same("after a panic", &before);
    ema.swap_in()?;
    for error in [ema.update(), ema.swap_in(), ema.copy_to()] {
        assert!(matches!(error, Err(Error::Optimizer(OptimizerError::AveragesInPlace { .. }))));
    }
    ema.swap_out()?;
    same("swapped back", &before);
    ema.copy_to()?;
    same("copied", &averages);
    Ok(())
}

#[test]
fn it_goes_on_where_it_was_saved() -> candle_amp::Result<()> {
    let vars = variables(&DTYPES)?;
    let config = EmaConfig { decay: 0.99, warm_up: true };
    let mut first = Ema::new(&named(&vars)?, config)?;
    for var in &vars {
        var.set(&random(80, var.shape(), var.dtype()))?;
    }
    first.update()?;
    let state = first.state()?;
    let mut second = Ema::new(&named(&vars)?, config)?;
    second.load_state(&state)?;
    first.update()?;
    second.update()?;
    assert_eq!(first.updates(), second.updates());
    for var in &vars {
        let (a, b) = (first.average(var).expect("one"), second.average(var).expect("one"));
        assert_same("average", a, b);
    }
    let mut other = state.averages.clone();
    other.remove("c");
    let fewer = EmaState { averages: other, updates: 9 };
    let message = second.load_state(&fewer).unwrap_err().to_string();
    assert!(message.contains("the averages is [\"a\", \"b\", \"d\""), "{message}");
    assert_eq!(second.updates(), 2);
    Ok(())
}

/// One within the other: what the inner one wrote is undone.
#[test]
fn averages_may_be_nested() -> candle_amp::Result<()> {
    let vars = variables(&DTYPES)?;
    let mut outer = Ema::new(&named(&vars)?, EmaConfig::default())?;
    for var in &vars {
        var.set(&random(90, var.shape(), var.dtype()))?;
    }
    let mut inner = Ema::new(&named(&vars)?, EmaConfig::default())?;
    for var in &vars {
        var.set(&random(91, var.shape(), var.dtype()))?;
    }
    let before: Vec<Tensor> = vars.iter().map(|v| v.copy()).collect::<candle_core::Result<_>>()?;
    outer.scope(|| inner.scope(|| assert_ne!(to_vec(&vars[0]), to_vec(&before[0]))))??;
    for (var, before) in vars.iter().zip(&before) {
        assert_same("weights", var, before);
    }
    Ok(())
}
