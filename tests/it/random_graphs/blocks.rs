//! Puts runs of steps into checkpoints.

use std::collections::BTreeSet;

use rand::Rng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use super::program::{Kind, Program, Scope, Step};

/// The same program with leaves first, and sometimes with one or two checkpoints, one of which may be in the other.
pub(super) fn with_checkpoints(program: Program, rng: &mut ChaCha8Rng, captures: bool) -> Program {
    let mut program = leaves_first(program);
    for _ in 0..rng.random_range(0..3) {
        let mut spans = Vec::new();
        for start in 0..program.steps.len() {
            for end in start + 1..=(start + 7).min(program.steps.len()) {
                if is_block(&program, start, end) && (captures || inputs(&program, start, end) < 2)
                {
                    spans.push((start, end));
                }
            }
        }
        spans.shuffle(rng);
        // Those of several steps say more.
        spans.sort_by_key(|(start, end)| end - start < 2);
        // So do those around another, or with steps that record nothing.
        if rng.random_bool(0.5) {
            let rich = |step: &Step| matches!(step.kind, Kind::Checkpoint(_)) || step.scope.no_grad;
            spans.sort_by_key(|(start, end)| {
                let steps = &program.steps[*start..*end];
                steps.len() < 2 || !steps.iter().any(rich)
            });
        }
        let Some((start, end)) = spans.first() else { break };
        program = wrapped(program, *start, *end, rng);
    }
    program
}

fn leaves_first(program: Program) -> Program {
    let count = program.steps.len();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by_key(|&at| !program.steps[at].is_leaf());
    reordered(program, &order)
}

/// The steps of these numbers, in this order, which all others can do without.
pub(super) fn reordered(program: Program, order: &[usize]) -> Program {
    let place = |old: usize| order.iter().position(|&at| at == old).expect("a step that is kept");
    let step = |&old: &usize| {
        let step = &program.steps[old];
        let inputs = step.inputs.iter().map(|&input| place(input)).collect();
        Step { inputs, ..step.clone() }
    };
    let steps = order.iter().map(step).collect();
    let losses = program.losses.iter().map(|&loss| place(loss)).collect();
    Program { steps, losses, ..program }
}

/// Whether these steps have one result that others use, the last, and an input.
fn is_block(program: &Program, start: usize, end: usize) -> bool {
    let steps = &program.steps[start..end];
    let inner = start..end - 1;
    let outside = program.steps[end..].iter().flat_map(|step| &step.inputs).chain(&program.losses);
    steps.iter().all(|step| !step.is_leaf())
        && outside.into_iter().all(|used| !inner.contains(used))
        && steps.iter().any(|step| step.inputs.iter().any(|&input| input < start))
}

/// How many results of other operators these steps take.
fn inputs(program: &Program, start: usize, end: usize) -> usize {
    let used = program.steps[start..end].iter().flat_map(|step| step.inputs.clone());
    let outer = used.filter(|&input| input < start && !program.steps[input].is_leaf());
    outer.collect::<BTreeSet<usize>>().len()
}

fn wrapped(program: Program, start: usize, end: usize, rng: &mut ChaCha8Rng) -> Program {
    let steps = &program.steps[start..end];
    let mut inputs: Vec<usize> =
        steps.iter().flat_map(|step| step.inputs.clone()).filter(|&input| input < start).collect();
    inputs.sort_unstable();
    inputs.dedup();
    // Captured are variables and constants, rather than what others have computed.
    inputs.shuffle(rng);
    inputs.sort_by_key(|&input| program.steps[input].is_leaf());
    let place = |input: usize| match inputs.iter().position(|&at| at == input) {
        Some(at) => at,
        None => inputs.len() + input - start,
    };
    let local = |step: &Step| Step {
        inputs: step.inputs.iter().map(|&input| place(input)).collect(),
        ..step.clone()
    };
    let body: Vec<Step> = steps.iter().map(local).collect();
    let scope = Scope { autocast: body[0].scope.autocast, no_grad: false };
    let moved = |old: usize| if old < start { old } else { old + 1 - (end - start) };
    let after = |step: &Step| Step {
        inputs: step.inputs.iter().map(|&input| moved(input)).collect(),
        ..step.clone()
    };
    let block = Step { kind: Kind::Checkpoint(body), inputs, scope };
    let mut all = program.steps[..start].to_vec();
    all.push(block);
    all.extend(program.steps[end..].iter().map(after));
    let losses = program.losses.iter().map(|&loss| moved(loss)).collect();
    Program { steps: all, losses, ..program }
}
