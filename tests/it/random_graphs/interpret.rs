//! What a program should give: the value of every step, and the gradients of its losses, in `F64`.

use candle_amp::{Cast, Op, Policy};
use candle_core::DType;

use super::array::Array;
use super::program::{Kind, Program, Row, Scope, Step};
use super::tape::{LANES, Lanes, Scalar, Tape, epsilon};

/// The result of a step, and the dtype that it should have.
#[derive(Clone)]
pub(super) struct Value {
    pub(super) array: Array,
    pub(super) dtype: DType,
    /// Whether a variable is behind it.
    pub(super) tracked: bool,
}

/// What the inputs of `row` are cast to in `scope`, or an error for what is refused there.
pub(super) fn cast_of(row: &Row, scope: Scope, inputs: &[DType]) -> Option<Option<DType>> {
    let (Some(op), Some(compute)) = (row.op, scope.autocast) else { return Some(None) };
    let rule = Policy::default().cast(op);
    if inputs.contains(&DType::F64) && rule != Cast::Banned {
        return Some(None);
    }
    let widest = |a, b| if a == b { a } else { DType::F32 };
    match rule {
        Cast::Lower => Some(Some(compute)),
        Cast::Full => Some(Some(DType::F32)),
        Cast::Promote => Some(inputs.iter().copied().reduce(widest)),
        Cast::Banned if compute != DType::F32 => None,
        _ => Some(None),
    }
}

/// Whether these dtypes are accepted as they are.
pub(super) fn fits(row: &Row, cast: Option<DType>, inputs: &[DType]) -> bool {
    cast.is_some() || row.mixed || inputs.iter().all(|dtype| *dtype == inputs[0])
}

fn returns(row: &Row, args: &[usize], first: DType) -> DType {
    let losses = [
        Op::CrossEntropy,
        Op::LinearCrossEntropy,
        Op::Nll,
        Op::Mse,
        Op::L1,
        Op::KlDiv,
        Op::Huber,
        Op::BinaryCrossEntropyWithLogit,
        Op::BinaryCrossEntropy,
    ];
    match row.op {
        Some(op) if losses.contains(&op) => wide(first),
        None if row.name == "to_dtype" => DTYPES[args[0]],
        _ => first,
    }
}

/// What `to_dtype` has as its setting.
pub(super) const DTYPES: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// The result of one step, from those of its inputs. `None` for what the crate should refuse.
pub(super) fn evaluate(tape: &mut Tape, step: &Step, inputs: &[Value]) -> Option<Value> {
    match &step.kind {
        Kind::Leaf { dims, dtype, values, variable } => {
            let make = |value: &f64| match variable {
                true => tape.leaf(*value, *dtype),
                false => tape.constant(*value),
            };
            let array = Array::new(dims.clone(), values.iter().map(make).collect());
            Some(Value { array, dtype: *dtype, tracked: *variable })
        }
        Kind::Call(row, args) => call(tape, row, args, step.scope, inputs),
        Kind::Checkpoint(body) => {
            let mut values = inputs.to_vec();
            for step in body {
                let inputs: Vec<Value> = step.inputs.iter().map(|&i| values[i].clone()).collect();
                values.push(evaluate(tape, step, &inputs)?);
            }
            values.pop()
        }
    }
}

fn call(
    tape: &mut Tape,
    row: &Row,
    args: &[usize],
    scope: Scope,
    inputs: &[Value],
) -> Option<Value> {
    let dtypes: Vec<DType> = inputs.iter().map(|input| input.dtype).collect();
    let cast = cast_of(row, scope, &dtypes)?;
    if !fits(row, cast, &dtypes) {
        return None;
    }
    let first = cast.unwrap_or(dtypes[0]);
    let out = returns(row, args, first);
    // candle's own compute in their dtype, the crate's in F32.
    let arithmetic = epsilon(if row.op.is_some() { wide(first) } else { first });
    tape.forward = if row.exact { 0.0 } else { 2.0 * arithmetic };
    tape.backward = if row.rounded { epsilon(first) } else { 2.0 * arithmetic };
    let mut arrays = Vec::new();
    for input in inputs {
        let narrower = cast.is_some_and(|to| epsilon(to) > epsilon(input.dtype));
        let swapped = cast == Some(DType::F16) && input.dtype == DType::BF16;
        arrays.push(match cast {
            // The gradient comes in the dtype that the input had.
            Some(to) if narrower || swapped => input.array.each(|x| tape.rounded(x, to)),
            _ => input.array.clone(),
        });
    }
    let array = (row.reference)(tape, &arrays, args);
    let tracked = inputs.iter().any(|input| input.tracked);
    let cut = row.cuts || scope.no_grad && row.op.is_some();
    let exact = row.exact && epsilon(out) <= epsilon(first);
    let array = array.each(|x| {
        let x = tape.round(x, out, exact);
        if cut { tape.cut(x) } else { x }
    });
    Some(Value { array, dtype: out, tracked: tracked && !cut })
}

/// The gradient of a variable.
pub(super) struct OfVariable {
    /// By its step.
    pub(super) variable: usize,
    pub(super) lanes: Vec<Lanes>,
    /// As a scaler collects it: in F32, where it comes from operators of the crate alone.
    pub(super) wide: Vec<Lanes>,
}

/// Whether operators of the crate alone use this step. Others round gradients to the dtype of their inputs.
fn is_of_crate(steps: &[Step], at: usize) -> bool {
    steps.iter().filter(|step| step.inputs.contains(&at)).all(|step| match &step.kind {
        Kind::Call(row, _) => row.op.is_some(),
        Kind::Checkpoint(body) => {
            let places = (0..step.inputs.len()).filter(|&place| step.inputs[place] == at);
            places.into_iter().all(|place| is_of_crate(body, place))
        }
        Kind::Leaf { .. } => true,
    })
}

/// A program's values, and the gradients of the sum of its losses.
pub(super) struct Expected {
    pub(super) values: Vec<Value>,
    pub(super) lanes: Vec<Vec<Lanes>>,
    /// Of each variable.
    pub(super) gradients: Vec<OfVariable>,
    /// The largest gradient of an `F16` tensor on the way.
    pub(super) largest: f64,
}

/// `None` for a program that is no good for a comparison.
pub(super) fn interpret(program: &Program) -> Option<Expected> {
    // Where every loss was taken back, there is nothing to differentiate.
    if program.losses.is_empty() {
        return None;
    }
    let mut tape = Tape::new();
    let mut values: Vec<Value> = Vec::new();
    for step in &program.steps {
        let inputs: Vec<Value> = step.inputs.iter().map(|&i| values[i].clone()).collect();
        values.push(evaluate(&mut tape, step, &inputs)?);
        if tape.trouble.is_some() {
            return None;
        }
    }
    let variables = || (0..values.len()).filter(|&at| program.steps[at].is_variable());
    let zeros = |at: usize| vec![[0.0; LANES]; values[at].array.at.len()];
    let mut gradients: Vec<_> = variables()
        .map(|at| OfVariable { variable: at, lanes: zeros(at), wide: zeros(at) })
        .collect();
    let mut largest = 0.0f64;
    for &loss in &program.losses {
        let value = &values[loss];
        if !value.tracked || value.array.at.len() != 1 || value.dtype != wide(value.dtype) {
            return None;
        }
        let of: Vec<Scalar> = variables().flat_map(|at| values[at].array.at.clone()).collect();
        let (found, size) = tape.gradients(value.array.at[0], &of);
        largest = largest.max(size);
        let sums = gradients.iter_mut().flat_map(|of| of.lanes.iter_mut().zip(&mut of.wide));
        for ((sum, wide_sum), [one, wide]) in sums.zip(found) {
            sum.iter_mut().zip(one).for_each(|(sum, one)| *sum += one);
            wide_sum.iter_mut().zip(wide).for_each(|(sum, one)| *sum += one);
        }
    }
    for of in gradients.iter_mut().filter(|of| !is_of_crate(&program.steps, of.variable)) {
        of.wide.clone_from(&of.lanes);
    }
    let lanes = |value: &Value| value.array.at.iter().map(|x| *tape.lanes(*x)).collect();
    let lanes = values.iter().map(lanes).collect();
    Some(Expected { values, lanes, gradients, largest })
}
