//! Values of parts that no run has: an error when they are loaded, not a panic or a standstill later.

use candle_amp::checkpoints::{Checkpoint, State, Stateful};
use candle_amp::optim::{
    AdamW, AdamWConfig, Ema, EmaConfig, PlateauConfig, ReduceOnPlateau, Schedule, Scheduler, Sgd,
    SgdConfig,
};
use candle_amp::{GradScaler, Parameters, Result, random};
use candle_core::{DType, Device, Var};

use super::Folder;
use crate::bad_input::assert_says;

/// Saves what `part` is, but for one value, and loads that into it, which must fail and change
/// nothing, nor a part before it.
#[track_caller]
fn assert_refuses(part: &mut dyn Stateful, name: &str, value: &str, says: &str) -> Result<()> {
    let before = part.save()?;
    let mut changed = before.clone();
    let old = changed.values.insert(name.to_owned(), value.to_owned());
    assert!(old.is_some_and(|old| old != value), "{name} would not change");
    let folder = Folder::new();
    let path = folder.file("run");
    let (epoch, mut first) = (State::default().with("epoch", 3), State::default());
    Checkpoint::new(1).with("first", &epoch)?.with("part", &changed)?.save(&path)?;
    let refused = Checkpoint::open(&path)?.load(&mut [("first", &mut first), ("part", &mut *part)]);
    assert_says(refused, &[says]);
    assert!(first.values.is_empty(), "{name}: another part is loaded");
    assert_eq!(part.save()?.values, before.values);
    // The rest is what fits.
    Checkpoint::new(1).with("part", &before)?.save(&path)?;
    Checkpoint::open(&path)?.load(&mut [("part", part)])
}

#[test]
fn a_scale_that_cannot_be_is_refused() -> Result<()> {
    let mut scaler = GradScaler::default();
    for (name, value, says) in [
        ("scale", "NaN", "scale is NaN"),
        ("scale", "inf", "scale is inf"),
        ("scale", "0", "scale is 0"),
        ("scale", "-1", "scale is -1"),
        ("scale", "1e30", "above max_scale"),
        ("scale", "1e-20", "min_scale"),
        ("min_scale", "100000000", "min_scale 100000000 is above"),
        ("max_scale", "1", "above max_scale 1"),
        ("max_scale", "inf", "max_scale is inf"),
        ("min_scale", "0", "min_scale is 0"),
        ("init_scale", "NaN", "init_scale is NaN"),
        ("growth_factor", "inf", "growth_factor is inf"),
        ("growth_factor", "NaN", "growth_factor is NaN"),
        ("backoff_factor", "0", "backoff_factor is 0"),
        ("growth_interval", "0", "growth_interval is 0"),
        ("hysteresis", "0", "hysteresis is 0"),
        ("growth_tracker", "2000", "growth_tracker is 2000, expected less than growth_interval"),
        ("growth_tracker", "4294967295", "growth_tracker is 4294967295"),
        ("hysteresis_tracker", "1", "hysteresis_tracker is 1, expected less than hysteresis"),
    ] {
        assert_refuses(&mut scaler, name, value, says)?;
    }
    Ok(())
}

/// One more of the last number there is would overflow.
#[test]
fn counts_that_cannot_go_on_are_refused() -> Result<()> {
    let _fork = random::fork_rng_guard();
    let last = u64::MAX.to_string();
    let says = "a count of at most";
    assert_refuses(&mut random::Generator, "draws", &last, says)?;
    let w = Var::ones(2, DType::F32, &Device::Cpu)?;
    let parameters = Parameters::named([("w", w.clone())])?;
    let mut ema = Ema::new(&parameters, EmaConfig::default())?;
    assert_refuses(&mut ema, "updates", &last, says)?;
    let mut adamw = AdamW::new(&parameters, AdamWConfig::default())?;
    adamw.backward_step(&w.sum_all()?)?;
    assert_refuses(&mut adamw, "steps.w", &last, says)?;
    let mut sgd = Sgd::new(&parameters, SgdConfig::default())?;
    let mut scheduler = Scheduler::new(Schedule::cosine(10), &mut sgd)?;
    assert_refuses(&mut scheduler, "taken", &last, says)?;
    for lr in ["1e300", "inf", "NaN", "-1"] {
        assert_refuses(&mut scheduler, "base_lr", lr, "base_lr is")?;
        assert_refuses(&mut sgd, "group.0.settings.lr", lr, "lr is")?;
        assert_refuses(&mut sgd, "group.0.base_lr", lr, "base_lr is")?;
    }
    Ok(())
}

/// Nothing is better than NaN: the rate would fall for ever.
#[test]
fn a_best_measure_of_nan_is_refused() -> Result<()> {
    let mut plateau = ReduceOnPlateau::new(PlateauConfig::default())?;
    assert_refuses(&mut plateau, "best", "NaN", "best is NaN")?;
    let state = State::default();
    assert!(plateau.check(&state).is_err());
    Ok(())
}
