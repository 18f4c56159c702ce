//! Random graphs of all operators, and their gradients against an oracle that knows neither the crate nor candle.
//!
//! `cargo test` runs a sample. `CANDLE_AMP_GRAPHS=10000` runs as many, and `CANDLE_AMP_GRAPHS_SEED`, the seed that a
//! failure prints, one alone. A failing graph is printed as small as it can be made.

mod array;
mod blocks;
mod draft;
mod interpret;
mod program;
mod rows;
mod run;
mod shrink;
mod tape;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use candle_amp::Op;
use candle_core::DType;

use draft::draw;
use interpret::{OfVariable, interpret};
use program::{Kind, Program, Step, Way};
use run::{Failure, check};

/// As many as `cargo test` takes ten seconds for.
const SAMPLE: u64 = 1000;

fn seeds(sample: u64) -> Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    match number("CANDLE_AMP_GRAPHS_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("CANDLE_AMP_GRAPHS").unwrap_or(sample),
    }
}

/// The failure of this kind, if the program has it. What threads do, they do not always.
fn fails(program: &Program, like: &Failure) -> bool {
    let attempts = if program.ways.iter().any(|way| *way > Way::CandleThenScaler) { 3 } else { 1 };
    (0..attempts).any(|_| check(program).is_err_and(|failure| failure.is_like(like)))
}

/// Compares the graphs of `seeds`, on two threads, and prints the first that fail.
fn compare(test: &str, seeds: Range<u64>, draw: impl Fn(u64) -> Program + Sync) {
    let (next, compared) = (AtomicU64::new(seeds.start), AtomicU64::new(0));
    let failures = Mutex::new(Vec::new());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= seeds.end || failures.lock().unwrap().len() > 4 {
                break;
            }
            match check(&draw(seed)) {
                Ok(good) => _ = compared.fetch_add(good.into(), Relaxed),
                Err(failure) => failures.lock().unwrap().push((seed, failure)),
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(work);
        scope.spawn(work);
    });
    let failures = failures.into_inner().unwrap();
    let mut text = String::new();
    for (seed, failure) in &failures {
        let small = shrink::shrink(draw(*seed), |program| fails(program, failure));
        let now = check(&small).err().unwrap_or_else(|| failure.clone());
        text += &format!(
            "\ngraph {seed}: {}\nmade smaller: {}\n{small}\nrun it again: CANDLE_AMP_GRAPHS_SEED={seed} \
             cargo test --test it {test}\n",
            failure.text, now.text
        );
    }
    assert!(failures.is_empty(), "{text}");
    let (count, compared) = (seeds.end - seeds.start, compared.into_inner());
    assert!(compared * 10 >= count * 9, "only {compared} of {count} graphs could be compared");
}

#[test]
fn gradients_are_those_of_the_oracle() {
    compare("gradients_are_those_of_the_oracle", seeds(SAMPLE), draw);
}

/// A checkpoint whose function uses, besides its argument, what other operators have computed.
#[test]
fn checkpoints_may_capture_what_others_have_computed() {
    let draw = |seed| draft::draw_with(seed, true);
    compare("checkpoints_may_capture_what_others_have_computed", seeds(SAMPLE / 4), draw);
}

/// The calls of a program, those in checkpoints too.
fn calls(steps: &[Step]) -> Vec<&Step> {
    let mut all = Vec::new();
    for step in steps {
        match &step.kind {
            Kind::Leaf { .. } => {}
            Kind::Call(..) => all.push(step),
            Kind::Checkpoint(body) => all.extend(calls(body)),
        }
    }
    all
}

#[test]
fn every_operator_is_drawn() {
    let (mut names, mut missing) = (BTreeSet::new(), Vec::new());
    let all: BTreeSet<&str> = rows::rows().iter().map(|row| row.name).collect();
    let (mut checkpoints, mut no_grads, mut scopes) = (0, 0, 0);
    let (mut nested, mut without_gradients, mut orders) = (0, 0, BTreeSet::new());
    for seed in 0..400 {
        let program = draw(seed);
        let blocks = program.steps.iter().filter(|step| matches!(step.kind, Kind::Checkpoint(_)));
        for block in blocks {
            let Kind::Checkpoint(body) = &block.kind else { continue };
            checkpoints += 1;
            nested += body.iter().filter(|step| matches!(step.kind, Kind::Checkpoint(_))).count();
            without_gradients += calls(body).iter().filter(|step| step.scope.no_grad).count();
        }
        if let [a, b, c] = program.losses[..] {
            orders.insert((a < b, b < c, a < c));
        }
        for step in calls(&program.steps) {
            no_grads += usize::from(step.scope.no_grad);
            scopes += usize::from(step.scope.autocast.is_some());
            if let Kind::Call(row, _) = &step.kind {
                names.insert(row.name);
            }
        }
    }
    assert_eq!(all.difference(&names).collect::<Vec<_>>(), Vec::<&&str>::new(), "never drawn");
    for op in Op::ALL {
        if !rows::rows().iter().any(|row| row.op == Some(*op)) {
            missing.push(op.name());
        }
    }
    assert_eq!(missing, Vec::<&str>::new(), "operators without a row");
    assert!(nested > 20 && without_gradients > 20, "{nested} {without_gradients}");
    assert_eq!(orders.len(), 6, "three losses go back in every order");
    assert!(checkpoints > 50 && no_grads > 50 && scopes > 500, "{checkpoints} {no_grads} {scopes}");
}

/// The oracle's own derivatives, against differences of its values.
#[test]
fn the_oracle_is_right() {
    let step = f64::EPSILON.cbrt();
    let mut compared = 0;
    for seed in 0..300 {
        let program = draw(seed);
        let Some(expected) = interpret(&program) else { continue };
        let value = |program: &Program| -> Option<f64> {
            let expected = interpret(program)?;
            Some(program.losses.iter().map(|&loss| expected.lanes[loss][0][0]).sum())
        };
        for OfVariable { variable: number, lanes, .. } in &expected.gradients {
            let element = seed as usize % lanes.len();
            // The second derivative of relu2 jumps at 0, and differences across it are half a step off.
            let at_zero = |values: &[f64]| values[element] == 0.0;
            if matches!(&program.steps[*number].kind, Kind::Leaf { values, .. } if at_zero(values))
            {
                continue;
            }
            let moved = |by: f64| {
                let mut program = program.clone();
                if let Kind::Leaf { values, .. } = &mut program.steps[*number].kind {
                    values[element] += by;
                }
                value(&program)
            };
            // Rounding is not in lane 0. Detached values move too, so that graphs with such are left out.
            let detached = |step: &&Step| {
                matches!(&step.kind, Kind::Call(row, _) if row.cuts) || step.scope.no_grad
            };
            if calls(&program.steps).iter().any(detached) {
                continue;
            }
            let (Some(up), Some(down)) = (moved(step), moved(-step)) else { continue };
            let (got, difference) = (lanes[element][0], (up - down) / (2.0 * step));
            let scale = 1.0 + up.abs() + difference.abs();
            assert!(
                (got - difference).abs() < 1e-6 * scale,
                "seed {seed}, v{number}: {got}, {difference}"
            );
            compared += 1;
        }
    }
    assert!(compared > 300, "{compared}");
}

#[test]
fn a_failing_graph_is_made_small() {
    for seed in 0..40 {
        let program = draw(seed);
        let bad = |program: &Program| {
            let culprit =
                |step: &&Step| matches!(&step.kind, Kind::Call(row, _) if row.name.contains("mul"));
            calls(&program.steps).iter().any(culprit) && interpret(program).is_some()
        };
        if bad(&shrink::needed(&program)) {
            let small = shrink::shrink(program, bad);
            assert!(draft::operators(&small.steps) <= 4, "{small}");
        }
    }
}

/// Tolerances follow rounding, and so must not swallow what they are compared with.
#[test]
fn tolerances_are_far_below_gradients() {
    let (mut exact, mut coarse, mut scaled) = (Vec::new(), Vec::new(), Vec::new());
    for seed in 0..200 {
        let program = draw(seed);
        let Some(expected) = interpret(&program) else { continue };
        for OfVariable { variable: number, lanes, wide } in &expected.gradients {
            let largest = lanes.iter().map(|lanes| lanes[0].abs()).fold(0.0, f64::max);
            if largest == 0.0 {
                continue;
            }
            let dtypes: BTreeSet<_> =
                expected.values.iter().map(|value| value.dtype.size_in_bytes()).collect();
            let dtype = expected.values[*number].dtype;
            let relative = run::tolerance(lanes, dtype) / largest;
            if dtypes.contains(&2) {
                coarse.push(relative)
            } else {
                exact.push(relative)
            }
            if dtype.size_in_bytes() == 2 {
                scaled.push(run::tolerance(wide, DType::F32) / largest);
            }
        }
    }
    for all in [&mut exact, &mut coarse, &mut scaled] {
        all.sort_by(f64::total_cmp);
    }
    let at = |all: &[f64], part: f64| all[(all.len() as f64 * part) as usize];
    let of = |all: &[f64]| [0.1, 0.5, 0.9, 0.95, 0.99].map(|part| at(all, part));
    let (exact, coarse, scaled) = (of(&exact), of(&coarse), of(&scaled));
    assert!(exact[1] < 1e-3 && exact[2] < 1e-2 && coarse[0] < 1e-2, "{exact:?}, {coarse:?}");
    for sixteen_bits in [coarse, scaled] {
        assert!(sixteen_bits[1] < 0.25 && sixteen_bits[2] < 0.75, "{sixteen_bits:?}");
    }
}
