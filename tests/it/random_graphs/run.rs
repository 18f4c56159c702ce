//! Runs a program through the crate, and compares.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use candle_amp::autograd::{checkpoint, no_grad_guard};
use candle_amp::{Autocast, GradScaler, ScaleConfig, ops};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::interpret::{Expected, interpret};
use super::program::{Kind, Program, Scope, Step, Way};
use super::tape::{Lanes, epsilon, spread};
use crate::util::to_vec;

/// How many times as far as in the oracle's lanes a result may be from the exact one.
const MARGIN: f64 = 8.0;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kindof {
    Error,
    Panic,
    DType,
    Forward,
    Lost,
    Gradient,
}

#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) kind: Kindof,
    pub(super) text: String,
}

impl Failure {
    /// Whether it says the same but for numbers.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let words = |text: &str| -> String {
            text.split(' ').filter(|word| word.chars().all(char::is_alphabetic)).take(12).collect()
        };
        let all = self.kind == other.kind;
        all && (self.kind != Kindof::Error || words(&self.text) == words(&other.text))
    }
}

/// The first line: what candle adds are its callers.
fn failure(kind: Kindof, text: String) -> Failure {
    Failure { kind, text: text.lines().next().unwrap_or_default().to_owned() }
}

/// The most that rounding may move these numbers, which are compared as one tensor of `dtype`.
pub(super) fn tolerance(lanes: &[Lanes], dtype: DType) -> f64 {
    let spread = lanes.iter().map(spread).fold(0.0, f64::max);
    let largest = lanes.iter().map(|lane| lane[0].abs()).fold(0.0, f64::max);
    let least = if dtype == DType::F16 { 2f64.powi(-24) } else { 0.0 };
    MARGIN * spread + 4.0 * epsilon(dtype) * largest + least
}

/// What is wrong with the program, if anything is. `Ok(false)` if it cannot be compared.
pub(super) fn check(program: &Program) -> std::result::Result<bool, Failure> {
    let Some(expected) = interpret(program) else { return Ok(false) };
    if expected.largest > 2e4 {
        return Ok(false);
    }
    let run = || compare(program, &expected);
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map(|()| true),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string()));
            Err(failure(Kindof::Panic, text.unwrap_or_default()))
        }
    }
}

type Compared = std::result::Result<(), Failure>;

fn compare(program: &Program, expected: &Expected) -> Compared {
    let error =
        |what: String| move |e: candle_core::Error| failure(Kindof::Error, format!("{what}: {e}"));
    let leaves = leaves(&program.steps).map_err(error("leaves".into()))?;
    let values = forward(&program.steps, &leaves).map_err(error("forward".into()))?;
    for (number, (got, value)) in values.iter().zip(&expected.values).enumerate() {
        let what = format!("v{number}");
        if got.dtype() != value.dtype || got.dims() != value.array.dims {
            let text = format!(
                "{what} is {:?} {:?}, not {:?} {:?}",
                got.dtype(),
                got.dims(),
                value.dtype,
                value.array.dims
            );
            return Err(failure(Kindof::DType, text));
        }
        close(Kindof::Forward, &what, got, &expected.lanes[number], 1.0)?;
        if value.tracked && !got.track_op() {
            return Err(failure(Kindof::Lost, format!("{what} is not tracked")));
        }
    }
    for &way in &program.ways {
        let scale =
            if expected.largest * 2f64.powi(program.scale) < 2e4 { program.scale } else { 0 };
        let run = Run { program, leaves: &leaves, scale: 2f32.powi(scale) };
        let found = run.gradients(way).map_err(error(format!("{way:?}")))?;
        for (factor, gradients) in found {
            for (of, gradient) in expected.gradients.iter().zip(gradients) {
                let (number, lanes) = (&of.variable, &of.lanes);
                let what = format!("{way:?}: gradient of v{number}");
                match gradient {
                    Some(gradient) => {
                        let leaf = leaves[*number].as_ref().expect("a variable");
                        if gradient.dims() != leaf.dims() {
                            let text = format!("{what} has dimensions {:?}", gradient.dims());
                            return Err(failure(Kindof::DType, text));
                        }
                        // A scaler's is wide.
                        let own = gradient.dtype() == leaf.dtype();
                        let lanes = if own { lanes } else { &of.wide };
                        close(Kindof::Gradient, &what, &gradient, lanes, factor)?;
                    }
                    None if lanes.iter().all(|lanes| lanes[0] == 0.0) => {}
                    None => return Err(failure(Kindof::Lost, format!("{what} is missing"))),
                }
            }
        }
    }
    Ok(())
}

fn close(kind: Kindof, what: &str, got: &Tensor, lanes: &[Lanes], factor: f64) -> Compared {
    let tolerance = factor * tolerance(lanes, got.dtype());
    for (at, (got, lanes)) in to_vec(got).into_iter().zip(lanes).enumerate() {
        let exact = factor * lanes[0];
        // An infinite or NaN one is not near either.
        let near = (got - exact).abs() <= tolerance;
        if !near {
            let text = format!("{what}, element {at}: {got} is not {exact} ± {tolerance:.2e}");
            return Err(failure(kind, text));
        }
    }
    Ok(())
}

/// The variables and constants, by step.
fn leaves(steps: &[Step]) -> Result<Vec<Option<Leaf>>> {
    let leaf = |step: &Step| match &step.kind {
        Kind::Leaf { dims, dtype, values, variable } => {
            let x =
                Tensor::from_vec(values.clone(), dims.clone(), &Device::Cpu)?.to_dtype(*dtype)?;
            Ok(Some(if *variable {
                Leaf::Variable(Var::from_tensor(&x)?)
            } else {
                Leaf::Constant(x)
            }))
        }
        _ => Ok(None),
    };
    steps.iter().map(leaf).collect()
}

enum Leaf {
    Variable(Var),
    Constant(Tensor),
}

impl std::ops::Deref for Leaf {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        match self {
            Leaf::Variable(var) => var,
            Leaf::Constant(x) => x,
        }
    }
}

/// Every value. One scope spans all steps in a row that have it.
fn forward(steps: &[Step], leaves: &[Option<Leaf>]) -> Result<Vec<Tensor>> {
    let mut values: Vec<Tensor> = Vec::new();
    let mut rest = steps;
    while let Some(first) = rest.first() {
        let scope = first.scope;
        let count = rest.iter().take_while(|step| step.scope == scope).count();
        let _autocast = scope.autocast.map(|dtype| Autocast::new(dtype).enter());
        let _no_grad = scope.no_grad.then(no_grad_guard);
        for step in &rest[..count] {
            let value = match &leaves[values.len()] {
                Some(leaf) => (**leaf).clone(),
                None => result(step, &values)?,
            };
            values.push(value);
        }
        rest = &rest[count..];
    }
    Ok(values)
}

fn result(step: &Step, values: &[Tensor]) -> Result<Tensor> {
    let inputs: Vec<Tensor> = step.inputs.iter().map(|&input| values[input].clone()).collect();
    match &step.kind {
        Kind::Call(row, args) => (row.run)(&inputs, args),
        Kind::Checkpoint(body) => {
            let (body, captured, ambient) = (body.clone(), inputs[1..].to_vec(), step.scope);
            let block = move |x: &Tensor| {
                let mut values = vec![x.clone()];
                values.extend(captured.iter().cloned());
                for step in &body {
                    values.push(within(ambient, step, &values)?);
                }
                values.pop().ok_or_else(|| candle_core::Error::msg("an empty block"))
            };
            checkpoint(block, &inputs[0])
        }
        Kind::Leaf { .. } => candle_core::bail!("a leaf among the steps of a block"),
    }
}

/// A step of a checkpoint, whose own scope is entered only if it is another.
fn within(ambient: Scope, step: &Step, values: &[Tensor]) -> Result<Tensor> {
    if step.scope == ambient {
        return result(step, values);
    }
    let _no_grad = step.scope.no_grad.then(no_grad_guard);
    let autocast = step.scope.autocast.map_or_else(Autocast::disabled, Autocast::new);
    autocast.scope(|| result(step, values))
}

type Gradients = Vec<Option<Tensor>>;

struct Run<'a> {
    program: &'a Program,
    leaves: &'a [Option<Leaf>],
    scale: f32,
}

impl Run<'_> {
    fn variables(&self) -> impl Iterator<Item = &Var> {
        self.leaves.iter().filter_map(|leaf| match leaf {
            Some(Leaf::Variable(var)) => Some(var),
            _ => None,
        })
    }

    fn losses(&self) -> Result<Vec<Tensor>> {
        let values = forward(&self.program.steps, self.leaves)?;
        Ok(self.program.losses.iter().map(|&loss| values[loss].clone()).collect())
    }

    /// The scopes that backward is called in.
    fn around(&self) -> impl Sized + use<> {
        let Scope { autocast, no_grad } = self.program.around;
        (autocast.map(|dtype| Autocast::new(dtype).enter()), no_grad.then(no_grad_guard))
    }

    /// One number, by an operator of the crate's and one of candle's in turn.
    fn sum(&self, losses: &[Tensor]) -> Result<Tensor> {
        let flat: Vec<Tensor> =
            losses.iter().map(|loss| loss.reshape(())).collect::<Result<_>>()?;
        let mut sum = flat[0].clone();
        for (at, loss) in flat.iter().enumerate().skip(1) {
            sum = if at % 2 == 1 { ops::add(&sum, loss)? } else { (sum + loss)? };
        }
        Ok(sum)
    }

    fn candle(&self, losses: &[Tensor]) -> Result<Gradients> {
        let _around = self.around();
        let stores = losses.iter().map(|loss| loss.backward()).collect::<Result<Vec<_>>>()?;
        let sum = |var: &Var| {
            let parts = stores.iter().filter_map(|store| store.get(var));
            parts.cloned().map(Ok).reduce(|a, b| a? + b?).transpose()
        };
        self.variables().map(sum).collect()
    }

    fn scaler(&self) -> Result<GradScaler> {
        Ok(GradScaler::new(ScaleConfig::constant(self.scale))?)
    }

    fn collected(&self, scaler: &GradScaler) -> Result<Gradients> {
        let one = |var: &Var| Ok(scaler.grad(var)?);
        let gradients: Gradients = self.variables().map(one).collect::<Result<_>>()?;
        for (gradient, var) in gradients.iter().zip(self.variables()) {
            let wide = if var.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
            if gradient.as_ref().is_some_and(|gradient| gradient.dtype() != wide) {
                candle_core::bail!(
                    "a gradient of {:?} was collected in another dtype",
                    var.dtype()
                );
            }
        }
        Ok(gradients)
    }

    fn scaled(&self, losses: &[Tensor]) -> Result<Gradients> {
        let mut scaler = self.scaler()?;
        self.scale_all(&mut scaler, losses)?;
        self.collected(&scaler)
    }

    /// Of all losses, which may share a graph: as in PyTorch that is kept until the last, but where operators of the
    /// crate alone have made it, for those keep what others still need.
    fn scale_all(&self, scaler: &mut GradScaler, losses: &[Tensor]) -> Result<()> {
        for (at, loss) in losses.iter().enumerate() {
            let scaled = scaler.scale(loss)?;
            let _around = self.around();
            match at + 1 < losses.len() && !self.program.is_whole() {
                true => scaled.retain_graph().backward()?,
                false => scaled.backward()?,
            }
        }
        Ok(())
    }

    fn retained(&self, losses: &[Tensor]) -> Result<Gradients> {
        let mut scaler = self.scaler()?;
        for loss in losses.iter().chain(losses.iter().rev()) {
            let scaled = scaler.scale(loss)?.retain_graph();
            let _around = self.around();
            scaled.backward()?;
        }
        self.collected(&scaler)
    }

    /// The gradients, and how many times those of the sum of the losses they should be.
    fn gradients(&self, way: Way) -> Result<Vec<(f64, Gradients)>> {
        let once = |gradients| vec![(1.0, gradients)];
        Ok(match way {
            Way::Candle => once(self.candle(&self.losses()?)?),
            Way::CandleOfSum => once(self.candle(&[self.sum(&self.losses()?)?])?),
            Way::Scaler => once(self.scaled(&self.losses()?)?),
            Way::ScalerOfSum => once(self.scaled(&[self.sum(&self.losses()?)?])?),
            Way::Retained => vec![(2.0, self.retained(&self.losses()?)?)],
            Way::Accumulated => {
                let (first, second, mut scaler) = (self.losses()?, self.losses()?, self.scaler()?);
                self.scale_all(&mut scaler, &second)?;
                self.scale_all(&mut scaler, &first)?;
                vec![(2.0, self.collected(&scaler)?)]
            }
            Way::CandleThenScaler => {
                let losses = self.losses()?;
                let candles = self.candle(&losses)?;
                vec![(1.0, candles), (2.0, self.retained(&losses)?), (1.0, self.scaled(&losses)?)]
            }
            Way::TwoThreads => {
                let losses = self.losses()?;
                let [a, b] = both(|| self.candle(&losses))?;
                vec![(1.0, a), (1.0, b), (1.0, self.candle(&losses)?)]
            }
            Way::TwoScalers => {
                let losses = self.losses()?;
                let [a, b] = both(|| self.retained(&losses))?;
                vec![(2.0, a), (2.0, b), (1.0, self.scaled(&losses)?)]
            }
            Way::OtherThread => {
                let losses = thread::scope(|scope| {
                    scope.spawn(|| self.losses()).join().expect("forward does not panic")
                })?;
                once(self.scaled(&losses)?)
            }
        })
    }
}

/// The same on two threads at once.
fn both<T: Send>(f: impl Fn() -> Result<T> + Sync) -> Result<[T; 2]> {
    thread::scope(|scope| {
        let other = scope.spawn(&f);
        let here = f();
        let there = other.join().expect("backward does not panic");
        Ok([here?, there?])
    })
}
