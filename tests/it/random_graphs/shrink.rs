//! Makes a failing program smaller while it still fails.

use candle_core::DType;

use super::blocks::reordered;
use super::interpret::{Value, interpret};
use super::program::{Kind, Program, Scope, Step, Way};
use super::rows::named;

/// A smaller program for which `fails` holds, as it does for this one.
pub(super) fn shrink(program: Program, fails: impl Fn(&Program) -> bool) -> Program {
    let mut best = needed(&program);
    if !fails(&best) {
        return program;
    }
    // Each round removes something, or is the last.
    for _ in 0..2000 {
        let smaller = candidates(&best).into_iter().map(|program| needed(&program));
        let mut smaller = smaller.filter(|program| size(program) < size(&best));
        let Some(next) = smaller.find(&fails) else { break };
        best = next;
    }
    best
}

/// What is to become smaller, most important first.
fn size(program: &Program) -> (usize, usize, usize, usize) {
    let scopes =
        |Scope { autocast, no_grad }: Scope| usize::from(autocast.is_some()) + usize::from(no_grad);
    let calls = |step: &Step| match &step.kind {
        Kind::Leaf { .. } => 0,
        Kind::Call(..) => 2,
        // Steps count more where they are in a block.
        Kind::Checkpoint(body) => 1 + 3 * body.len(),
    };
    let elements = |step: &Step| match &step.kind {
        Kind::Leaf { values, variable, .. } => values.len() + usize::from(*variable),
        _ => 0,
    };
    let ways = program.ways.iter().map(|way| 1 + usize::from(*way != Way::Candle)).sum::<usize>();
    let settings = ways + program.losses.len() + program.scale.unsigned_abs() as usize;
    let all_scopes = program.steps.iter().map(|step| step.scope).chain([program.around]);
    (
        program.steps.iter().map(calls).sum(),
        settings,
        all_scopes.map(scopes).sum(),
        program.steps.iter().map(elements).sum(),
    )
}

/// Without steps and captured values that no loss needs.
pub(super) fn needed(program: &Program) -> Program {
    let mut keep = vec![false; program.steps.len()];
    let mut steps = program.steps.clone();
    let mut due = program.losses.clone();
    while let Some(at) = due.pop() {
        if std::mem::replace(&mut keep[at], true) {
            continue;
        }
        steps[at] = without_captured(&steps[at]);
        due.extend(&steps[at].inputs);
    }
    let order: Vec<usize> = (0..keep.len()).filter(|&at| keep[at]).collect();
    reordered(Program { steps, ..program.clone() }, &order)
}

/// A checkpoint with the inputs that its steps use; the first stays.
fn without_captured(step: &Step) -> Step {
    let Kind::Checkpoint(body) = &step.kind else { return step.clone() };
    let used = |input: &usize| *input == 0 || body.iter().any(|step| step.inputs.contains(input));
    let kept: Vec<usize> = (0..step.inputs.len()).filter(used).collect();
    let place = |old: usize| match old < step.inputs.len() {
        true => kept.iter().position(|&at| at == old).expect("an input that is used"),
        false => old - step.inputs.len() + kept.len(),
    };
    let local = |step: &Step| Step {
        inputs: step.inputs.iter().map(|&input| place(input)).collect(),
        ..step.clone()
    };
    let body = body.iter().map(local).collect();
    let inputs = kept.iter().map(|&at| step.inputs[at]).collect();
    Step { kind: Kind::Checkpoint(body), inputs, ..step.clone() }
}

/// Programs that may be smaller, the smallest first.
fn candidates(program: &Program) -> Vec<Program> {
    let mut all = Vec::new();
    for way in &program.ways {
        all.push(Program { ways: vec![*way], ..program.clone() });
    }
    all.push(Program { ways: vec![Way::Candle], ..program.clone() });
    all.push(Program { scale: 0, ..program.clone() });
    let Scope { autocast, no_grad } = program.around;
    for around in [Scope { autocast: None, no_grad }, Scope { autocast, no_grad: false }] {
        all.push(Program { around, ..program.clone() });
    }
    for at in 0..program.losses.len() {
        let mut less = program.clone();
        less.losses.remove(at);
        if !less.losses.is_empty() {
            all.push(less);
        }
    }
    let plain = |step: &Step| Step { scope: Scope::default(), ..step.clone() };
    all.push(Program { steps: program.steps.iter().map(plain).collect(), ..program.clone() });
    let values = interpret(program).map(|expected| (expected.values, expected.lanes));
    let exact = |at: usize| {
        let (values, lanes) = values.as_ref()?;
        Some((&values[at], lanes[at].iter().map(|lanes| lanes[0]).collect::<Vec<_>>()))
    };
    for at in 0..program.steps.len() {
        let step = &program.steps[at];
        if let (false, Some((value, _))) = (step.is_leaf(), exact(at)) {
            all.push(summed(program, at, value));
        }
        if step.scope != Scope::default() {
            all.push(with(program, at, plain(step)));
        }
        if let Kind::Leaf { dims, dtype, values, variable: true } = &step.kind {
            let (dims, dtype, values) = (dims.clone(), *dtype, values.clone());
            let kind = Kind::Leaf { dims, dtype, values, variable: false };
            all.push(with(program, at, Step { kind, ..step.clone() }));
        }
        if step.is_leaf() {
            continue;
        }
        if let Some((value, exact)) = exact(at) {
            if !program.losses.contains(&at) {
                all.push(with(program, at, leaf(value, exact)));
            }
            for &input in &step.inputs {
                let other = &values.as_ref().expect("one was found").0[input];
                if other.dtype == value.dtype && other.array.dims == value.array.dims {
                    all.push(bypassed(program, at, input));
                }
            }
        }
        if let Kind::Checkpoint(body) = &step.kind {
            all.push(unwrapped(program, at, body));
            all.extend(peeled(program, at, body));
        }
    }
    all
}

/// With the sum of a step's elements as the only loss.
fn summed(program: &Program, at: usize, value: &Value) -> Program {
    let call = |name, args, input| Step {
        kind: Kind::Call(named(name), args),
        inputs: vec![input],
        scope: Scope::default(),
    };
    let mut steps = program.steps[..=at].to_vec();
    steps.push(call("sum_all", vec![], at));
    if !matches!(value.dtype, DType::F32 | DType::F64) {
        steps.push(call("to_dtype", vec![2], at + 1));
    }
    let losses = vec![steps.len() - 1];
    Program { steps, losses, ..program.clone() }
}

fn with(program: &Program, at: usize, step: Step) -> Program {
    let mut program = program.clone();
    program.steps[at] = step;
    program
}

/// A leaf of the values that a step had, as its dtype has them.
fn leaf(value: &Value, exact: Vec<f64>) -> Step {
    let rounded = |x: f64| match value.dtype {
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        DType::F32 => f64::from(x as f32),
        _ => x,
    };
    let (dims, dtype) = (value.array.dims.clone(), value.dtype);
    let values = exact.into_iter().map(rounded).collect();
    let kind = Kind::Leaf { dims, dtype, values, variable: value.tracked };
    Step { kind, inputs: vec![], scope: Scope::default() }
}

fn bypassed(program: &Program, at: usize, input: usize) -> Program {
    let moved = |old: usize| if old == at { input } else { old };
    let step = |step: &Step| Step {
        inputs: step.inputs.iter().map(|&old| moved(old)).collect(),
        ..step.clone()
    };
    let losses = program.losses.iter().map(|&loss| moved(loss)).collect();
    Program { steps: program.steps.iter().map(step).collect(), losses, ..program.clone() }
}

/// The steps before `at`, those given, and those after, whose inputs are moved by as much.
fn spliced(program: &Program, at: usize, new: Vec<Step>) -> Program {
    let more = new.len() - 1;
    let moved = |old: usize| if old < at { old } else { old + more };
    let after = |step: &Step| Step {
        inputs: step.inputs.iter().map(|&old| moved(old)).collect(),
        ..step.clone()
    };
    let mut steps = program.steps[..at].to_vec();
    steps.extend(new);
    steps.extend(program.steps[at + 1..].iter().map(after));
    let losses = program.losses.iter().map(|&loss| moved(loss)).collect();
    Program { steps, losses, ..program.clone() }
}

/// A step of a block, as it is outside of it.
fn outside(program: &Program, at: usize, step: &Step) -> Step {
    let inputs = &program.steps[at].inputs;
    let place =
        |&old: &usize| if old < inputs.len() { inputs[old] } else { at + old - inputs.len() };
    Step { inputs: step.inputs.iter().map(place).collect(), ..step.clone() }
}

fn unwrapped(program: &Program, at: usize, body: &[Step]) -> Program {
    spliced(program, at, body.iter().map(|step| outside(program, at, step)).collect())
}

/// The same with the first or the last step of a block outside of it.
fn peeled(program: &Program, at: usize, body: &[Step]) -> Vec<Program> {
    let (block, count) = (&program.steps[at], program.steps[at].inputs.len());
    let mut all = Vec::new();
    let [first, .., last] = body else { return all };
    // Its result is another input, after those there were, and numbered as it was.
    let mut inputs = block.inputs.clone();
    inputs.push(at);
    let rest = Kind::Checkpoint(body[1..].to_vec());
    let mut front = vec![outside(program, at, first)];
    let unused = !body[1..].iter().any(|step| step.inputs.contains(&0));
    let mut block_after = Step { kind: rest, inputs, ..block.clone() };
    if unused {
        // It is what the block is of, then.
        let swap = |old: usize| if old == count { 0 } else { old };
        block_after.inputs[0] = at;
        block_after.inputs.pop();
        let renamed = |step: &Step| Step {
            inputs: step
                .inputs
                .iter()
                .map(|&old| if old > count { old - 1 } else { swap(old) })
                .collect(),
            ..step.clone()
        };
        block_after.kind = Kind::Checkpoint(body[1..].iter().map(renamed).collect());
    }
    front.push(block_after);
    all.push(spliced(program, at, front));
    let before = count + body.len() - 2;
    if last.inputs.iter().all(|&old| old < count || old == before) {
        let kept = Kind::Checkpoint(body[..body.len() - 1].to_vec());
        let place = |&old: &usize| if old < count { block.inputs[old] } else { at };
        let inputs = last.inputs.iter().map(place).collect();
        let after = Step { inputs, ..last.clone() };
        all.push(spliced(program, at, vec![Step { kind: kept, ..block.clone() }, after]));
    }
    all
}
