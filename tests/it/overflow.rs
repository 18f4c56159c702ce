//! Overflows that explain themselves: reports, the scale's history, warnings.

use std::fmt::Write;
use std::sync::{Arc, Mutex};

use candle_amp::optim::{Sgd, SgdConfig};
use candle_amp::{
    Autocast, GradScaler, LossScale, Parameters, Result, ScaleConfig, autograd,
    diagnostics::{NonFinite, ScaleHistory, Warnings},
    ops,
};
use candle_core::{DType, Device, Tensor, Var};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::bad_input::assert_says;
use crate::util::{listening, random};

fn var(values: &[f32]) -> Var {
    Var::new(values, &Device::Cpu).unwrap()
}

/// A loss whose gradient by `w` is `factors`.
fn loss(w: &Var, factors: &[f32]) -> Tensor {
    let factors = Tensor::new(factors, &Device::Cpu).unwrap();
    (w.as_tensor() * factors).and_then(|x| x.sum_all()).unwrap()
}

#[test]
fn a_report_counts_infinities_and_nan_by_name() -> Result<()> {
    const LEN: usize = 70_003; // more than one task, and no vector's multiple
    let (big, small, good) = (var(&[0.0; LEN]), var(&[0.0; 2]), var(&[0.0]));
    let nameless = var(&[0.0; 3]);
    let named = [("z.big", &big), ("a.small", &small), ("good", &good)];
    let parameters = Parameters::named(named.map(|(name, var)| (name, var.clone())))?;
    let mut factors = [1f32; LEN];
    for at in [0, 65_536, LEN - 1] {
        factors[at] = f32::NEG_INFINITY;
    }
    factors[40_000] = f32::NAN;
    let all = [&big, &small, &good, &nameless].map(Clone::clone);
    for unscale_first in [false, true] {
        let mut sgd = Sgd::new(all.to_vec(), SgdConfig::default())?;
        let mut scaler = GradScaler::new(ScaleConfig::constant(4.0))?;
        scaler.scale(&loss(&big, &factors))?.backward()?;
        scaler.scale(&loss(&small, &[f32::NAN, 1.0]))?.backward()?;
        scaler.scale(&loss(&good, &[1.0]))?.backward()?;
        scaler.scale(&loss(&nameless, &[f32::MAX, 1.0, f32::MAX]))?.backward()?;
        if unscale_first {
            // Clipping by an infinite norm makes NaN of infinities; the counts are from before.
            scaler.clip_grad_norm(1.0)?;
        }
        let outcome = scaler.step(&mut sgd)?;
        let report = outcome.report(&parameters)?;
        let found = |infinite, nan, elements| NonFinite { infinite, nan, elements };
        let expected = [
            (Some("a.small"), found(0, 1, 2)),
            (Some("z.big"), found(3, 1, LEN)),
            (None, found(2, 0, 3)),
        ];
        assert_eq!(report.iter().collect::<Vec<_>>(), expected);
        assert_eq!((report.len(), report.is_empty(), report.scale()), (3, false, 4.0));
        assert_eq!(
            report.to_string(),
            "skipped at scale 4: 3 of 4 gradients are not finite\n\
             variable   infinite  NaN     of\n\
             a.small           0    1      2\n\
             z.big             3    1  70003\n\
             (no name)         2    0      3"
        );
        scaler.update()?;
        scaler.scale(&loss(&good, &[1.0]))?.backward()?;
        let report = scaler.step(&mut sgd)?.report(&parameters)?;
        assert!(report.is_empty());
        assert_eq!(report.to_string(), "no gradient overflowed at scale 4");
    }
    Ok(())
}

#[test]
fn infinities_added_after_unscale_are_counted() -> Result<()> {
    let w = var(&[0.0; 3]);
    let parameters = Parameters::named([("w", w.clone())])?;
    let mut sgd = Sgd::new(vec![w.clone()], SgdConfig::default())?;
    let mut scaler = GradScaler::default();
    scaler.scale(&loss(&w, &[1.0; 3]))?.backward()?;
    scaler.unscale()?;
    scaler.scale(&loss(&w, &[1.0, f32::INFINITY, f32::INFINITY]))?.backward()?;
    let report = scaler.step(&mut sgd)?.report(&parameters)?;
    let rows: Vec<_> = report.iter().collect();
    assert_eq!(rows, [(Some("w"), NonFinite { infinite: 2, nan: 0, elements: 3 })]);
    Ok(())
}

/// Clipping by an infinite norm has made NaN of the infinity by then.
#[test]
fn a_gradient_that_was_counted_is_not_counted_again() -> Result<()> {
    let w = var(&[0.5; 3]);
    let parameters = Parameters::named([("w", w.clone())])?;
    let mut sgd = Sgd::new(vec![w.clone()], SgdConfig::default())?;
    let mut scaler = GradScaler::default();
    scaler.scale(&loss(&w, &[1.0, f32::INFINITY, 2.0]))?.backward()?;
    scaler.clip_grad_norm(1.0)?;
    scaler.scale(&loss(&w, &[3.0, 1.0, 2.0]))?.backward()?;
    let report = scaler.step(&mut sgd)?.report(&parameters)?;
    let rows: Vec<_> = report.iter().collect();
    assert_eq!(rows, [(Some("w"), NonFinite { infinite: 1, nan: 0, elements: 3 })]);
    Ok(())
}

/// One iteration with a gradient of `factor`.
fn iterate(scaler: &mut GradScaler, w: &Var, factor: f32) -> Result<()> {
    scaler.scale(&loss(w, &[factor]))?.backward()?;
    scaler.unscale()?;
    scaler.update()
}

#[test]
fn the_history_is_that_of_the_scale() -> Result<()> {
    let w = var(&[0.0]);
    let config = ScaleConfig { init_scale: 8.0, growth_interval: 2, ..Default::default() };
    let mut scaler = GradScaler::new(config)?;
    scaler.set_history(ScaleHistory::new(4));
    let mut scale = LossScale::new(config)?;
    let mut expected = Vec::new();
    for (step, factor) in [1.0, 1.0, f32::NAN, 1.0, f32::INFINITY, 1.0].into_iter().enumerate() {
        let skipped = !factor.is_finite();
        expected.push((step as u64, scale.get(), skipped));
        scale = scale.after(skipped);
        iterate(&mut scaler, &w, factor)?;
    }
    let history = scaler.history();
    let got: Vec<_> = history.iter().map(|s| (s.step, s.scale, s.skipped)).collect();
    assert_eq!(got, expected[2..]);
    assert_eq!((history.len(), history.total(), history.total_skipped()), (4, 6, 2));
    assert_eq!([1, 2, 3, 100].map(|n| history.skipped_of_last(n)), [0, 1, 1, 2]);
    assert_eq!(
        history.to_string(),
        "steps  scale  skipped\n2         16        1\n3-4        8        1\n5          4        0"
    );
    assert!(!history.is_empty());
    let mut disabled = GradScaler::disabled();
    iterate(&mut disabled, &w, 1.0)?;
    assert!(disabled.history().is_empty());
    Ok(())
}

/// Keeps the messages of warnings, with their fields.
#[derive(Clone, Default)]
struct Warned(Arc<Mutex<Vec<String>>>);

impl Warned {
    /// The messages since the last call.
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

impl Subscriber for Warned {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // That target is a log, not a warning.
        metadata.target().starts_with("candle_amp") && metadata.target() != "candle_amp::algorithm"
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
                write!(self.0, "{field}={value:?} ").unwrap();
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        assert_eq!(*event.metadata().level(), tracing::Level::WARN);
        self.0.lock().unwrap().push(text.0);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Runs `f` on a thread of its own, with what it warns of.
fn warned(f: impl FnOnce(&Warned) -> Result<()> + Send) -> Result<()> {
    let run = || {
        let warned = Warned::default();
        listening(warned.clone(), || f(&warned))
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

#[track_caller]
fn assert_one(messages: Vec<String>, parts: &[&str]) {
    assert_eq!(messages.len(), 1, "{messages:?}");
    for part in parts {
        assert!(messages[0].contains(part), "{messages:?} does not say {part:?}");
    }
}

#[test]
fn overflowing_at_the_floor_is_told_once_until_the_scale_has_left_it() -> Result<()> {
    warned(|warned| {
        let w = var(&[0.0]);
        let config = ScaleConfig {
            init_scale: 2.0,
            min_scale: 1.0,
            growth_interval: 2,
            ..Default::default()
        };
        let mut scaler = GradScaler::new(config)?;
        iterate(&mut scaler, &w, f32::NAN)?; // 2 to 1
        assert!(warned.take().is_empty());
        iterate(&mut scaler, &w, f32::NAN)?;
        assert_one(warned.take(), &["at its floor", "scale=1.0"]);
        for factor in [f32::NAN, 1.0, f32::NAN] {
            iterate(&mut scaler, &w, factor)?;
        }
        assert!(warned.take().is_empty(), "it is still there");
        for factor in [1.0, 1.0, f32::NAN] {
            iterate(&mut scaler, &w, factor)?; // 2, and back to 1
        }
        assert!(warned.take().is_empty());
        iterate(&mut scaler, &w, f32::NAN)?;
        assert_one(warned.take(), &["at its floor"]);
        // A constant scale is where it should be.
        let mut constant = GradScaler::new(ScaleConfig::constant(8.0))?;
        (0..3).try_for_each(|_| iterate(&mut constant, &w, f32::NAN))?;
        assert!(warned.take().is_empty());
        Ok(())
    })
}

#[test]
fn many_skipped_steps_are_told_once_until_there_are_few() -> Result<()> {
    warned(|warned| {
        let w = var(&[0.0]);
        let mut scaler = GradScaler::new(ScaleConfig::constant(8.0))?;
        scaler.set_warnings(Warnings { skipped: 4, of_last: 10, ..Default::default() })?;
        let mut run = |factors: &[f32]| {
            factors.iter().try_for_each(|factor| iterate(&mut scaler, &w, *factor))
        };
        run(&[f32::NAN, 1.0, f32::NAN, 1.0, f32::NAN])?;
        assert!(warned.take().is_empty());
        run(&[f32::NAN])?;
        assert_one(warned.take(), &["many steps are skipped", "skipped=4", "of_last=10"]);
        run(&[f32::NAN, 1.0, 1.0, 1.0, 1.0, f32::NAN])?;
        assert!(warned.take().is_empty(), "not again before it was over");
        run(&[1.0; 10])?;
        run(&[f32::NAN; 4])?;
        assert_one(warned.take(), &["many steps"]);
        Ok(())
    })
}

#[test]
fn skipped_steps_are_few_below_half_of_what_is_told() -> Result<()> {
    warned(|warned| {
        let w = var(&[0.5]);
        let mut scaler = GradScaler::new(ScaleConfig::constant(8.0))?;
        scaler.set_warnings(Warnings { skipped: 6, of_last: 8, ..Default::default() })?;
        let mut run = |factor: f32, times: usize| {
            (0..times).try_for_each(|_| iterate(&mut scaler, &w, factor))
        };
        run(f32::NAN, 6)?;
        assert_one(warned.take(), &["many steps are skipped", "skipped=6"]);
        run(2.0, 5)?; // three of the last eight are left
        run(f32::NAN, 6)?;
        assert!(warned.take().is_empty(), "half of six are not few");
        run(2.0, 6)?; // two
        run(f32::NAN, 6)?;
        assert_one(warned.take(), &["many steps are skipped", "skipped=6"]);
        Ok(())
    })
}

#[test]
fn a_run_that_finds_its_scale_warns_of_nothing() -> Result<()> {
    warned(|warned| {
        let w = var(&[0.0]);
        let mut scaler = GradScaler::default();
        (0..24).try_for_each(|_| iterate(&mut scaler, &w, f32::INFINITY))?;
        (0..200).try_for_each(|_| iterate(&mut scaler, &w, 1.0))?;
        assert_eq!(warned.take(), [""; 0]);
        Ok(())
    })
}

#[test]
fn f16_gradients_without_a_scale_are_told() -> Result<()> {
    warned(|warned| {
        let w = Var::from_tensor(&random(1, (3, 3), DType::F32))?;
        let loss = |dtype| {
            let amp = Autocast::new(dtype);
            amp.scope(|| ops::sum(&ops::matmul(&random(2, (3, 3), DType::F32), &w)?))
        };
        let backward = |scaler: &mut GradScaler, dtype| -> Result<()> {
            scaler.scale(&loss(dtype)?)?.backward()?;
            scaler.zero_grad();
            Ok(())
        };
        let (mut disabled, mut enabled) = (GradScaler::disabled(), GradScaler::default());
        backward(&mut enabled, DType::F16)?;
        backward(&mut disabled, DType::BF16)?;
        backward(&mut disabled, DType::F32)?;
        assert!(warned.take().is_empty());
        backward(&mut disabled, DType::F16)?;
        assert_one(warned.take(), &["without a loss scale", "BF16"]);
        backward(&mut disabled, DType::F16)?;
        assert!(warned.take().is_empty(), "once");
        backward(&mut disabled, DType::BF16)?;
        backward(&mut disabled, DType::F16)?;
        assert_one(warned.take(), &["without a loss scale"]);
        // candle's own operators have no policy, but dtypes.
        let half = Var::from_tensor(&random(3, 4, DType::F16))?;
        let mut other = GradScaler::disabled();
        other.scale(&half.to_dtype(DType::F32)?.sum_all()?)?.backward()?;
        assert_one(warned.take(), &["without a loss scale"]);
        // Nor does candle's backward know of a scaler.
        loss(DType::BF16)?.backward()?;
        assert!(warned.take().is_empty());
        loss(DType::F16)?.backward()?;
        assert_one(warned.take(), &["without a GradScaler"]);
        loss(DType::F16)?.backward()?;
        assert!(warned.take().is_empty(), "once a thread");
        Ok(())
    })
}

#[test]
fn f16_gradients_within_a_checkpoint_are_told() -> Result<()> {
    warned(|warned| {
        let x = Var::from_tensor(&random(1, (3, 3), DType::F32))?;
        let inner = |x: &Tensor| {
            let half = Autocast::new(DType::F16).scope(|| ops::matmul(x, x))?;
            half.to_dtype(DType::F32)
        };
        let loss = ops::sum(&autograd::checkpoint(inner, &x)?)?;
        GradScaler::disabled().scale(&loss)?.backward()?;
        assert_one(warned.take(), &["F16 gradients without a loss scale"]);
        Ok(())
    })
}

#[test]
fn variables_that_never_get_a_gradient_are_named() -> Result<()> {
    warned(|warned| {
        let (used, late, never) = (var(&[0.0]), var(&[0.0]), var(&[0.0]));
        let named = [("used", &used), ("late", &late), ("c.never", &never), ("b.never", &never)];
        let parameters = Parameters::named(named.map(|(name, var)| (name, var.clone())))?;
        let mut scaler = GradScaler::disabled();
        scaler.set_warnings(Warnings { missing_after: 3, ..Default::default() })?;
        scaler.watch(&parameters);
        iterate(&mut scaler, &used, 1.0)?;
        iterate(&mut scaler, &late, 1.0)?;
        assert!(warned.take().is_empty());
        iterate(&mut scaler, &used, 1.0)?;
        assert_one(warned.take(), &["\"b.never, c.never\"", "updates=3"]);
        (0..5).try_for_each(|_| iterate(&mut scaler, &used, 1.0))?;
        assert!(warned.take().is_empty());
        Ok(())
    })
}

#[test]
fn impossible_warnings_are_refused() {
    let default = Warnings::default();
    let cases: [(Warnings, &[&str]); 3] = [
        (Warnings { skipped: 0, ..default }, &["skipped is 0", "at least 1"]),
        (Warnings { missing_after: 0, ..default }, &["missing_after is 0"]),
        (Warnings { skipped: 5, of_last: 4, ..default }, &["skipped 5 is above of_last 4"]),
    ];
    for (warnings, parts) in cases {
        assert_says(GradScaler::default().set_warnings(warnings), parts);
    }
}
