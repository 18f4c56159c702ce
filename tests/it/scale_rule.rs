//! The scale rule: against an oracle over every sequence, against PyTorch's measured behaviour, and
//! without PyTorch's faults.

use candle_amp::{LossScale, ScaleConfig};

/// The rule as Megatron-LM documents it, with its counter that runs down; with a hysteresis of 1,
/// PyTorch's.
struct Oracle {
    scale: f32,
    clean: u32,
    patience: i64,
}

impl Oracle {
    fn after(found_inf: &[bool], config: &ScaleConfig) -> Self {
        let mut at =
            Self { scale: config.init_scale, clean: 0, patience: config.hysteresis.into() };
        for &found_inf in found_inf {
            if found_inf {
                at.clean = 0;
                at.patience -= 1;
                if at.patience <= 0 {
                    at.scale = (f64::from(at.scale) * config.backoff_factor) as f32;
                }
            } else {
                at.clean += 1;
                if at.clean == config.growth_interval {
                    at.clean = 0;
                    at.patience = config.hysteresis.into();
                    at.scale = (f64::from(at.scale) * config.growth_factor) as f32;
                }
            }
            at.scale = at.scale.max(config.min_scale).min(config.max_scale);
        }
        at
    }
}

fn after(scale: LossScale, outcomes: &[bool]) -> LossScale {
    outcomes.iter().fold(scale, |scale, &found_inf| scale.after(found_inf))
}

#[test]
fn every_sequence_of_twelve_steps_matches_the_oracle() {
    for (growth_interval, hysteresis) in (1..=4).flat_map(|g| (1..=4).map(move |h| (g, h))) {
        // No default, no common factor: a swapped field must show. Floor and ceiling are reached.
        let config = ScaleConfig {
            init_scale: 1000.0,
            growth_factor: 3.0,
            backoff_factor: 0.3,
            growth_interval,
            hysteresis,
            min_scale: 0.5,
            max_scale: 50_000.0,
        };
        for bits in 0u16..1 << 12 {
            let outcomes: Vec<bool> = (0..12).map(|i| bits >> i & 1 == 1).collect();
            let got = after(LossScale::new(config).unwrap(), &outcomes);
            let expected = Oracle::after(&outcomes, &config);
            assert_eq!(
                (got.get(), got.growth_tracker(), i64::from(got.hysteresis_tracker())),
                (expected.scale, expected.clean, i64::from(hysteresis) - expected.patience.max(1)),
                "{outcomes:?}, every {growth_interval}, hysteresis {hysteresis}"
            );
        }
    }
}

/// Megatron-LM's default of 2: one overflow is forgiven, also much later, until the scale grows.
#[test]
fn hysteresis_forgives_overflows_until_the_scale_grows() {
    let config =
        ScaleConfig { init_scale: 64.0, growth_interval: 3, hysteresis: 2, ..Default::default() };
    let scale = LossScale::new(config).unwrap();
    let at = |outcomes: &[bool]| after(scale, outcomes).get();
    assert_eq!(at(&[true]), 64.0);
    assert_eq!(at(&[true, true]), 32.0);
    assert_eq!(at(&[true, false, false, true]), 32.0, "clean steps between do not forgive");
    assert_eq!(at(&[true, true, true]), 16.0, "once it backs off, it goes on");
    assert_eq!(at(&[true, false, false, false, true]), 128.0, "growth does");
}

/// States from before there was a hysteresis go on as they did.
#[cfg(feature = "serde")]
#[test]
fn a_state_without_hysteresis_is_read_as_pytorch_s() {
    let config = r#"{"init_scale":8.0,"growth_factor":2.0,"backoff_factor":0.5,"#.to_owned()
        + r#""growth_interval":7,"min_scale":0.5,"max_scale":64.0}"#;
    let saved = format!(r#"{{"config":{config},"scale":4.0,"growth_tracker":3}}"#);
    let read: LossScale = serde_json::from_str(&saved).unwrap();
    let config = ScaleConfig {
        init_scale: 8.0,
        growth_interval: 7,
        min_scale: 0.5,
        max_scale: 64.0,
        ..Default::default()
    };
    assert_eq!(read, LossScale::restore(config, 4.0, 3).unwrap());
    let saved = serde_json::to_string(&read.after(true)).unwrap();
    assert_eq!(serde_json::from_str::<LossScale>(&saved).unwrap(), read.after(true));
}

/// Whatever is wrong with a saved state is an error when it is read: a minimum over the maximum
/// would panic at the next step, and a scale of NaN would skip every step, for ever.
#[cfg(feature = "serde")]
#[test]
fn a_state_that_cannot_be_is_not_read() {
    let config = ScaleConfig {
        init_scale: 8.0,
        growth_interval: 7,
        hysteresis: 3,
        min_scale: 0.5,
        max_scale: 64.0,
        ..Default::default()
    };
    let state = LossScale::restore(config, 4.0, 6).unwrap().with_hysteresis_tracker(2);
    let saved = serde_json::to_value(state).unwrap();
    assert_eq!(serde_json::from_value::<LossScale>(saved.clone()).unwrap(), state);
    for (field, value, says) in [
        ("scale", 0.25, "min_scale 0.5 is above scale 0.25"),
        ("scale", 65.0, "scale 65 is above max_scale 64"),
        ("scale", 0.0, "scale is 0"),
        ("scale", -4.0, "scale is -4"),
        ("scale", 1e-40, "scale is 0.0000"),
        ("growth_tracker", 7.0, "growth_tracker is 7, expected less than growth_interval"),
        ("hysteresis_tracker", 3.0, "hysteresis_tracker is 3, expected less than hysteresis"),
        ("config.min_scale", 128.0, "min_scale 128 is above"),
        ("config.min_scale", 0.0, "min_scale is 0"),
        ("config.max_scale", 0.25, "above max_scale 0.25"),
        ("config.growth_factor", 1.0, "growth_factor is 1"),
        ("config.backoff_factor", 1.0, "backoff_factor is 1"),
        ("config.growth_interval", 0.0, "growth_interval is 0"),
        ("config.hysteresis", 0.0, "hysteresis is 0"),
    ] {
        let mut changed = saved.clone();
        let at = field.split('.').fold(&mut changed, |at, name| &mut at[name]);
        *at = match at.is_u64() {
            true => serde_json::json!(value as u64),
            false => serde_json::json!(value),
        };
        let read = serde_json::from_value::<LossScale>(changed);
        let error = read.expect_err(field).to_string();
        assert!(error.contains(says), "{field} {value}: {error}");
    }
    // Formats that have NaN and infinities give them to the same check.
    for scale in [f32::NAN, f32::INFINITY] {
        assert!(LossScale::restore(config, scale, 0).is_err());
    }
}

/// The other states that are read are checked as those are that are made.
#[cfg(feature = "serde")]
#[test]
fn a_schedule_that_cannot_be_is_not_read() {
    use candle_amp::optim::{ReduceOnPlateau, Scheduler};
    let plateau = |factor: f64| {
        let counts = r#""patience":1,"threshold":0.0,"relative":false,"cooldown":0"#;
        let config =
            format!(r#""maximize":false,"factor":{factor},{counts},"min_lr":0.0,"eps":0.0"#);
        let state = r#"{"best":null,"bad":0,"cooldown":0}"#;
        serde_json::from_str::<ReduceOnPlateau>(&format!(
            r#"{{"config":{{{config}}},"state":{state}}}"#
        ))
    };
    assert!(plateau(0.5).is_ok() && plateau(1.5).is_err());
    let scheduler = |size: u64, base_lr: &str| {
        let schedule =
            format!(r#"{{"warm_up":0,"shape":{{"Step":{{"size":{size},"gamma":0.5}}}}}}"#);
        let text = format!(r#"{{"schedule":{schedule},"base_lr":{base_lr},"taken":3}}"#);
        serde_json::from_str::<Scheduler>(&text)
    };
    assert!(scheduler(2, "0.1").is_ok());
    assert!(scheduler(0, "0.1").is_err(), "it would divide by zero");
    assert!(scheduler(2, "1e300").is_err() && scheduler(2, "-1").is_err());
}

/// A tracker past its limit is of other settings; it counts as the last before the limit.
#[test]
fn trackers_stay_below_their_limits() {
    let config = ScaleConfig { growth_interval: 3, hysteresis: 2, ..Default::default() };
    let scale = LossScale::restore(config, 512.0, u32::MAX).unwrap();
    let scale = scale.with_hysteresis_tracker(u32::MAX);
    assert_eq!((scale.growth_tracker(), scale.hysteresis_tracker()), (2, 1));
    assert_eq!((scale.after(false).get(), scale.after(true).get()), (1024.0, 256.0));
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

/// A history with no room, or with more than it has room for, is one with room.
#[cfg(feature = "serde")]
#[test]
fn a_history_that_cannot_be_is_read_as_one_that_can() {
    use candle_amp::diagnostics::ScaleHistory;

    let mut history = ScaleHistory::new(3);
    (0..5).for_each(|step| history.push(2.0, step == 4));
    let saved = serde_json::to_value(&history).unwrap();
    assert_eq!(serde_json::from_value::<ScaleHistory>(saved.clone()).unwrap(), history);
    let mut crowded = saved.clone();
    crowded["capacity"] = 0.into();
    crowded["total"] = u64::MAX.into();
    let mut read: ScaleHistory = serde_json::from_value(crowded).unwrap();
    assert_eq!((read.len(), read.iter().next().unwrap().step), (1, 4));
    read.push(4.0, true);
    assert_eq!((read.len(), read.total(), read.total_skipped()), (1, u64::MAX, 2));
}
