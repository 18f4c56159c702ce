//! The scale rule: against an oracle over every sequence, against PyTorch's measured behaviour, and
//! without PyTorch's faults.

use candle_amp::{LossScale, ScaleConfig};

/// The rule as documented, written the slow, obvious way.
fn oracle(found_inf: &[bool], config: &ScaleConfig) -> (f32, u32) {
    let (mut scale, mut clean) = (config.init_scale, 0);
    for &found_inf in found_inf {
        if found_inf {
            scale = (f64::from(scale) * config.backoff_factor) as f32;
            clean = 0;
        } else {
            clean += 1;
            if clean == config.growth_interval {
                scale = (f64::from(scale) * config.growth_factor) as f32;
                clean = 0;
            }
        }
        scale = scale.max(config.min_scale).min(config.max_scale);
    }
    (scale, clean)
}

fn after(scale: LossScale, outcomes: &[bool]) -> LossScale {
    outcomes.iter().fold(scale, |scale, &found_inf| scale.after(found_inf))
}

#[test]
fn every_sequence_of_twelve_steps_matches_the_oracle() {
    for growth_interval in 1..=4 {
        // No default, no common factor: a swapped field must show. Floor and ceiling are reached.
        let config = ScaleConfig {
            init_scale: 1000.0,
            growth_factor: 3.0,
            backoff_factor: 0.3,
            growth_interval,
            min_scale: 0.5,
            max_scale: 50_000.0,
        };
        for bits in 0u16..1 << 12 {
            let outcomes: Vec<bool> = (0..12).map(|i| bits >> i & 1 == 1).collect();
            let got = after(LossScale::new(config).unwrap(), &outcomes);
            let expected = oracle(&outcomes, &config);
            assert_eq!(
                (got.get(), got.growth_tracker()),
                expected,
                "{outcomes:?}, every {growth_interval}"
            );
        }
    }
}

/// `test_grad_scaling_update_scale` of PyTorch: growth 2, backoff 0.25, interval 2.
#[test]
fn pytorch_update_scale() {
    let config = ScaleConfig {
        init_scale: 4.0,
        backoff_factor: 0.25,
        growth_interval: 2,
        ..Default::default()
    };
    let scale = LossScale::new(config).unwrap();
    let scale = scale.after(false);
    assert_eq!((scale.get(), scale.growth_tracker()), (4.0, 1));
    let scale = scale.after(false);
    assert_eq!((scale.get(), scale.growth_tracker()), (8.0, 0));
    let scale = scale.after(true);
    assert_eq!((scale.get(), scale.growth_tracker()), (2.0, 0));
}

/// apex's `test_grad_scaler`: four clean steps and two overflows, by factors that are not exact.
#[test]
fn factors_are_doubles_and_products_are_rounded_once() {
    let config = ScaleConfig {
        init_scale: 3.21,
        growth_factor: 1.23,
        backoff_factor: 0.876,
        growth_interval: 1,
        ..Default::default()
    };
    let scale =
        after(LossScale::new(config).unwrap(), &[false, true, false, false, true, false]).get();
    let expected = 3.21 * 1.23f64.powi(4) * 0.876f64.powi(2);
    assert!((f64::from(scale) - expected).abs() < 6.0 * f64::from(f32::EPSILON) * expected);
}

/// `test_grad_scale_will_not_overflow` of PyTorch.
#[test]
fn growth_stops_at_the_ceiling() {
    let config = ScaleConfig {
        init_scale: 1e38,
        growth_factor: 16.0,
        growth_interval: 1,
        max_scale: f32::MAX,
        ..Default::default()
    };
    let scale = after(LossScale::new(config).unwrap(), &[false; 5]);
    assert_eq!(scale.get(), f32::MAX);
    assert!(scale.inverse() > 0.0);
    assert_eq!(
        after(LossScale::new(ScaleConfig::default()).unwrap(), &[false; 2000 * 20]).get(),
        2f32.powi(24)
    );
}

/// PyTorch's scale is 0 after 166 overflows, and its next step makes every weight NaN.
#[test]
fn no_number_of_overflows_takes_the_scale_below_its_floor() {
    let scale = after(LossScale::new(ScaleConfig::default()).unwrap(), &[true; 500]);
    assert_eq!(scale.get(), 2f32.powi(-24));
    let lowest = ScaleConfig { min_scale: f32::MIN_POSITIVE, ..Default::default() };
    let scale = after(LossScale::new(lowest).unwrap(), &[true; 500]);
    assert_eq!(scale.get(), f32::MIN_POSITIVE);
    assert!(scale.inverse().is_finite());
    assert!(after(scale, &[false; 2000]).get() > scale.get(), "it must be able to recover");
}

/// PyTorch tests with `==`, and never grows again once the tracker is past the interval.
#[test]
fn an_interval_shorter_than_the_tracker_grows_at_once() {
    let long = ScaleConfig { growth_interval: 100, ..Default::default() };
    let tracker = after(LossScale::new(long).unwrap(), &[false; 5]).growth_tracker();
    let short = ScaleConfig { growth_interval: 3, ..long };
    let scale = LossScale::restore(short, 512.0, tracker).unwrap().after(false);
    assert_eq!((scale.get(), scale.growth_tracker()), (1024.0, 0));
}

#[test]
fn a_constant_scale_never_moves() {
    let scale = LossScale::new(ScaleConfig::constant(96.0)).unwrap();
    for bits in 0u16..1 << 12 {
        let outcomes: Vec<bool> = (0..12).map(|i| bits >> i & 1 == 1).collect();
        assert_eq!(after(scale, &outcomes).get(), 96.0);
    }
    assert_eq!(after(scale, &[false; 5000]).get(), 96.0);
}

#[test]
fn inverses_are_exact_for_powers_of_two() {
    for exponent in -24..=24 {
        let scale =
            LossScale::new(ScaleConfig { init_scale: 2f32.powi(exponent), ..Default::default() })
                .unwrap();
        assert_eq!(scale.inverse() * scale.get(), 1.0);
    }
}
