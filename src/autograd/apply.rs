//! Puts an operator into the graph: casts its inputs, runs its forward, links the output, and tells the trace and
//! the profile.

use candle_core::{DType, Result, Tensor};

use super::applied::{AnyOperator, Applied};
use super::operator::Operator;
use super::profile::Timer;
use super::token::{self, Trust};
use super::{frozen, no_grad, storage, version};
use crate::autocast;
use crate::autocast::trace::{self, KeptActivation, TraceRow};
use crate::kernels::choice::algorithm;

/// Applies `operator` to `inputs`: casts them, computes, and links the output into the graph.
///
/// Inputs that are not floating point (targets, masks) get no gradient, nor do [frozen](crate::Parameters::freeze)
/// variables. Where no input is tracked, or under [`no_grad`], the output is not tracked either and nothing is saved.
///
/// # Errors
///
/// Those of the operator's `forward`, and [`AutocastError::ComputeDType`](crate::error::AutocastError::ComputeDType) of
/// the active scope.
pub fn apply<O: Operator>(operator: O, inputs: &[&Tensor]) -> Result<Tensor> {
    let trust = Trust { captured: Vec::new(), owned: !operator.op().is_user() };
    apply_with(operator, inputs, trust)
}

pub(super) fn apply_with<O: Operator>(
    operator: O,
    inputs: &[&Tensor],
    trust: Trust,
) -> Result<Tensor> {
    apply_any(Box::new(Applied::new(operator)), inputs, trust)
}

fn apply_any(operator: Box<dyn AnyOperator>, inputs: &[&Tensor], trust: Trust) -> Result<Tensor> {
    let (op, timer) = (operator.op(), Timer::start()?);
    let (output, algorithm) = run(operator, inputs, trust, timer.is_some())?;
    if let Some(timer) = timer {
        let shapes = inputs.iter().map(|input| input.shape().clone()).collect();
        timer.stop(op.name(), &output, shapes, None, algorithm)?;
    }
    Ok(output)
}

/// The output, and if it is `timed` or traced by which algorithm.
fn run(
    mut operator: Box<dyn AnyOperator>,
    inputs: &[&Tensor],
    trust: Trust,
    timed: bool,
) -> Result<(Tensor, Option<&'static str>)> {
    let rule = autocast::target(operator.op(), inputs.iter().map(|t| t.dtype()))?;
    let target = rule.filter(|dtype| {
        let dtypes = || inputs.iter().map(|t| t.dtype()).collect::<Vec<_>>();
        !(*dtype == DType::F32 && operator.widens(&dtypes()))
    });
    let mut cache_hits = 0;
    let mut cast_inputs = Vec::with_capacity(inputs.len());
    for input in inputs {
        let (cast, found) = match target {
            Some(dtype) => autocast::cast(input, dtype)?,
            None => (input.detach(), false),
        };
        cache_hits += usize::from(found);
        cast_inputs.push(cast);
    }
    let op = operator.op();
    let observed = timed || trace::is_active();
    if observed {
        algorithm::take();
    }
    // Before the inputs are read, so that a write by another thread meanwhile is later.
    let number = version::tick();
    let output = {
        let _alone = op.is_user().then(autocast::suspend);
        operator.forward(&cast_inputs)?
    };
    let algorithm = if observed { algorithm::take() } else { None };
    // Asked once: another thread may freeze a variable meanwhile.
    let wanted: Vec<bool> = inputs.iter().map(|input| frozen::requires_grad(input)).collect();
    let tracked = !no_grad::is_active() && wanted.contains(&true);
    let traced = trace::is_active().then(|| {
        let row = TraceRow {
            op,
            inputs: inputs.iter().map(|t| t.dtype()).collect(),
            cast: rule,
            input_shapes: inputs.iter().map(|t| t.shape().clone()).collect(),
            output: output.dtype(),
            output_shape: output.shape().clone(),
            saved_bytes: 0,
            cache_hits,
            algorithm,
        };
        let all = inputs.iter().zip(&cast_inputs).enumerate();
        let read = all.filter(|&(at, (input, _))| {
            tracked && operator.reads(at, &wanted) && !input.is_variable()
        });
        (row, read.map(|(_, (_, cast))| kept(cast)).collect::<Vec<_>>())
    });
    if !tracked {
        if let Some((row, all)) = traced {
            trace::record(&row, &all);
        }
        return Ok((output, algorithm));
    }
    operator.trim(&wanted)?;
    // Nobody knows what else an operator of a user holds: the storage of its output will be taken.
    let aliased =
        !trust.owned || cast_inputs.iter().any(|input| storage::share_storage(input, &output));
    let inputs = inputs.iter().zip(&cast_inputs).enumerate().map(|(at, (tensor, cast))| {
        // A copy that was cast is not read where the input is.
        let read = tensor.dtype() == cast.dtype() && operator.reads(at, &wanted);
        token::Input { tensor, wanted: wanted[at], read }
    });
    let inputs: Vec<token::Input<'_>> = inputs.collect();
    drop(cast_inputs);
    let output = if aliased { output.force_contiguous()? } else { output };
    let keeps_output = operator.keeps_output();
    let output = token::link(operator, number, &inputs, trust, output)?;
    if let Some((row, mut all)) = traced {
        // By the storage that the graph has moved it to.
        all.extend(keeps_output.then(|| kept(&output)));
        trace::record(&row, &all);
    }
    Ok((output, algorithm))
}

/// What a trace counts of an activation.
fn kept(activation: &Tensor) -> KeptActivation {
    let (place, bytes) = (storage::place(activation), storage::bytes(activation));
    KeptActivation { place, bytes, handle: activation.detach() }
}
