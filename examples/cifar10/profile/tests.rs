use std::fs;

use candle_amp::{GradScaler, ops};
use candle_core::{DType, Shape, Tensor, Var};
use serde_json::Value;

use super::*;
use crate::{
    common::testing::{assert_plain, parse},
    testing::Folder,
};

/// A row of `name` within `depth` others, from `start` on, in milliseconds.
fn row(
    name: &'static str,
    start: u64,
    duration: u64,
    depth: usize,
) -> candle_amp::diagnostics::ProfileRow {
    candle_amp::diagnostics::ProfileRow {
        name,
        backward: false,
        start: Duration::from_millis(start),
        duration: Duration::from_millis(duration),
        depth,
        input_shapes: vec![Shape::from((2, 3)), Shape::from((4, 3))],
        wanted: Vec::new(),
        output: DType::BF16,
        output_shape: Shape::from((2, 4)),
        algorithm: None,
    }
}

#[test]
fn a_row_has_its_own_time_without_that_of_rows_within() {
    let rows = [
        row("checkpoint", 0, 100, 0),
        row("conv2d", 10, 40, 1),
        row("inner", 20, 15, 2),
        row("relu", 60, 30, 1),
        row("sum", 200, 7, 0),
    ];
    let own = table::own_times(&rows).into_iter().map(|time| time.as_millis());
    assert_eq!(own.collect::<Vec<_>>(), [30, 25, 15, 30, 7]);
}

/// Looks at steps 3 to 5 of six, of two layers.
fn profiler(arguments: &str) -> Result<(Profiler<'static>, Vec<String>)> {
    profiler_of(arguments, 6)
}

/// The same, in a run that ends after `taken` of them.
fn profiler_of(arguments: &str, taken: usize) -> Result<(Profiler<'static>, Vec<String>)> {
    let options = parse(arguments)?;
    let mut profiler = Profiler::new(&options, 0..6, &Device::Cpu);
    let var = |shape: (usize, usize)| Var::randn(0f32, 1., shape, &Device::Cpu);
    let (first, second) = (var((32, 24))?, var((10, 32))?);
    let x = Tensor::ones((8, 24), DType::F32, &Device::Cpu)?;
    let y = Tensor::zeros(8, DType::U32, &Device::Cpu)?;
    let (amp, mut scaler) = (Autocast::new(DType::BF16), GradScaler::disabled());
    let mut news = Vec::new();
    for number in 0..taken {
        profiler.step(number, |phases| {
            let x = phases.run("batch", || x.copy())?;
            let loss = phases.forward(&amp, || {
                let hidden = ops::relu(&ops::linear(&x, &first, None)?)?;
                ops::cross_entropy(&ops::linear(&hidden, &second, None)?, &y)
            })?;
            phases.run("backward", || scaler.scale(&loss)?.backward())
        })?;
        news.extend(profiler.news());
    }
    Ok((profiler, news))
}

#[test]
fn a_run_that_ends_amid_has_the_table_of_its_steps() -> Result<()> {
    let (profiler, news) = profiler_of("--profile", 5)?;
    assert!(news.is_empty(), "{news:?}");
    let text = profiler.rest().expect("a table");
    assert!(text.contains("Profile of 2 steps after step 3"), "{text}");
    assert!(text.contains("linear") && text.contains("a step"), "{text}");
    for (arguments, taken) in [("--profile", 6), ("--profile", 3), ("", 5)] {
        assert!(profiler_of(arguments, taken)?.0.rest().is_none(), "{arguments}, {taken}");
    }
    Ok(())
}

#[test]
fn the_lines_add_up_to_the_steps() -> Result<()> {
    let (profiler, news) = profiler("--profile")?;
    let numbers: Vec<_> = profiler.steps.iter().map(|step| step.number).collect();
    assert_eq!(numbers, [3, 4, 5]);
    let lines = table::lines(&profiler.steps);
    let total: Duration = lines.iter().map(table::Line::total).sum();
    let steps: Duration = profiler.steps.iter().map(|step| step.profile.duration()).sum();
    assert_eq!(total, steps, "nothing is lost, and nothing counted twice: {lines:?}");
    assert!(lines.is_sorted_by(|a, b| a.calls == 0 || b.calls == 0 || a.total() >= b.total()));

    let line = |name: &str| lines.iter().find(|line| line.name == name).expect("a line");
    let linear = line("linear");
    assert_eq!((linear.calls, line("cross_entropy").calls), (6, 3));
    // Forward, the weights' gradients, and that of the second layer's input.
    let (first, second) = (8. * 24. * 32., 8. * 32. * 10.);
    assert_eq!(linear.flops, 3. * 2. * (2. * first + 3. * second));
    assert!(!linear.forward.is_zero() && !linear.backward.is_zero());
    assert!(!line("batch").rest.is_zero() && !line("between operators").backward.is_zero());

    assert_eq!(news.len(), 1);
    assert_plain(&news[0]);
    assert!(news[0].contains("\nProfile of 3 steps after step 3, in milliseconds a step:\n"));
    assert!(news[0].contains("\nlinear                  2 "), "{}", news[0]);
    assert!(news[0].contains(" 100.0 %\n"), "{}", news[0]);
    Ok(())
}

#[test]
fn events_lie_within_their_phase_and_that_within_its_step() -> Result<()> {
    let folder = Folder::new()?;
    let path = folder.path("profile.json");
    let (profiler, _) = profiler(&format!("--profile={}", path.display()))?;
    profiler.write()?;
    let trace: Value = serde_json::from_slice(&fs::read(&path)?)?;
    let events = trace["traceEvents"].as_array().expect("events");
    let span = |event: &Value| {
        let [start, duration] = ["ts", "dur"].map(|key| event[key].as_f64().expect("a number"));
        (start, start + duration)
    };
    let of = |kinds: &[&str]| -> Vec<&Value> {
        let is = |event: &&Value| event["cat"].as_str().is_some_and(|cat| kinds.contains(&cat));
        events.iter().filter(is).collect()
    };
    let (steps, phases) = (of(&["step"]), of(&["phase"]));
    let operators = of(&["forward", "backward"]);
    assert_eq!((steps.len(), phases.len(), operators.len()), (3, 9, 24));
    assert_eq!(events.len(), 1 + 3 + 9 + 24);
    let names: Vec<_> = operators[..8].iter().map(|event| event["name"].as_str()).collect();
    let expected = [
        "linear",
        "relu",
        "linear",
        "cross_entropy",
        "cross_entropy'",
        "linear'",
        "relu'",
        "linear'",
    ];
    assert_eq!(names, expected.map(Some));
    assert_eq!(operators[0]["args"]["inputs"], serde_json::json!(["8x24", "32x24"]));
    assert_eq!(operators[0]["args"]["dtype"], "bf16");
    assert!(operators[0]["args"]["algorithm"].is_string() && steps[0]["name"] == "step 4");

    const ROUNDING: f64 = 0.0005; // half a nanosecond, in microseconds
    let within = |inner: &Value, outer: &[&Value], named: &dyn Fn(&Value) -> bool| {
        let (start, end) = span(inner);
        let fits = |outer: &&&Value| {
            let (from, to) = span(outer);
            from <= start + ROUNDING && end <= to + ROUNDING && named(outer)
        };
        assert_eq!(outer.iter().filter(fits).count(), 1, "{inner}");
    };
    for phase in &phases {
        within(phase, &steps, &|_| true);
    }
    for operator in &operators {
        within(operator, &phases, &|phase| phase["name"] == operator["cat"]);
    }
    for all in [&steps, &phases, &operators] {
        let ordered = |pair: &[&Value]| span(pair[0]).1 <= span(pair[1]).0 + ROUNDING;
        assert!(all.windows(2).all(ordered), "one after the other");
    }
    Ok(())
}

#[test]
fn a_trace_lists_what_ran_alike_once() -> Result<()> {
    let (profiler, news) = profiler("--trace")?;
    assert!(profiler.steps.is_empty(), "no step is measured");
    let [text] = &news[..] else { anyhow::bail!("{news:?}") };
    let lines: Vec<Vec<&str>> =
        text.lines().map(|line| line.split_whitespace().collect()).collect();
    let has = |start: &str| {
        let start: Vec<_> = start.split_whitespace().collect();
        lines.iter().filter(|line| line.starts_with(&start)).count() == 1
    };
    // As of --profile's own network: the two layers differ in shape, and so in row.
    assert!(has("1 x linear f32 f32 in bf16 bf16 8x24 32x24 -> 8x32"), "{text}");
    assert!(has("1 x linear bf16 f32 in bf16 bf16 8x32 10x32 -> 8x10"), "{text}");
    assert!(has("1 x cross_entropy bf16 u32 in f32 f32 8x10 8 -> scalar"), "{text}");
    assert!(has("1 x cross_entropy f32 scalar") && has("1 x linear bf16 8x10"), "{text}");
    Ok(())
}

#[test]
fn a_run_too_short_to_warm_up_is_measured_at_its_end() -> Result<()> {
    let measured = |steps| {
        let options = parse("--profile")?;
        anyhow::Ok(Profiler::new(&options, steps, &Device::Cpu).measured)
    };
    assert_eq!(measured(0..1)?, 0..1);
    assert_eq!(measured(0..3)?, 2..3);
    assert_eq!(measured(0..100)?, 3..13);
    assert_eq!(measured(40..45)?, 43..45);
    assert!(measured(7..7)?.is_empty(), "of a run that has ended");
    Ok(())
}
