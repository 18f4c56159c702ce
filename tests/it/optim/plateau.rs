//! When a measure counts as better, and when the rate falls.

use candle_amp::optim::{PlateauConfig, PlateauState, ReduceOnPlateau, Sgd, SgdConfig};

use crate::bad_input::assert_says;

fn sgd() -> candle_amp::Result<Sgd> {
    Sgd::new(vec![], SgdConfig { lr: 0.5, ..Default::default() })
}

/// Numbers that are exact, so that the limit itself can be tried.
#[test]
fn a_measure_is_better_beyond_the_threshold_alone() -> candle_amp::Result<()> {
    for (maximize, relative, limit, beyond) in [
        (false, true, 4.0, 3.75),
        (false, false, 7.5, 7.25),
        (true, true, 12.0, 12.25),
        (true, false, 8.5, 8.75),
    ] {
        let config =
            PlateauConfig { maximize, relative, threshold: 0.5, ..PlateauConfig::default() };
        let state = PlateauState { best: Some(8.0), ..Default::default() };
        for (measure, best, bad) in [(limit, 8.0, 1), (beyond, beyond, 0)] {
            let mut plateau = ReduceOnPlateau::restore(config, state)?;
            plateau.step(measure, &mut sgd()?);
            let expected = PlateauState { best: Some(best), bad, cooldown: 0 };
            assert_eq!(plateau.state(), expected, "{config:?}, {measure}");
        }
    }
    Ok(())
}

#[test]
fn a_fall_that_is_not_above_eps_is_left_out() -> candle_amp::Result<()> {
    for (eps, rate) in [(0.25, 0.5), (0.125, 0.25)] {
        let config = PlateauConfig { factor: 0.5, patience: 0, eps, ..Default::default() };
        let (mut plateau, mut sgd) = (ReduceOnPlateau::new(config)?, sgd()?);
        plateau.step(3.0, &mut sgd);
        plateau.step(3.0, &mut sgd);
        assert_eq!(sgd.learning_rate(), rate, "{eps}");
    }
    Ok(())
}

#[test]
fn bad_settings_name_themselves() {
    let new = |config| ReduceOnPlateau::new(config);
    let config = PlateauConfig::default();
    assert_says(new(PlateauConfig { eps: -0.5, ..config }), &["eps is -0.5"]);
    assert_says(new(PlateauConfig { threshold: f64::INFINITY, ..config }), &["threshold is inf"]);
    assert_says(new(PlateauConfig { factor: 1.0, ..config }), &["factor is 1"]);
}
