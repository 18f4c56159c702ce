//! Activation checkpointing: memory for arithmetic.

use std::collections::HashMap;
use std::sync::Mutex;

use candle_core::{DType, Device, Result, Tensor, Var};

use super::apply::apply_with;
use super::below::Below;
use super::engine::backward_from;
use super::gradient::Gradient;
use super::node::GraphMode;
use super::operator::{Backward, Operator};
use super::stack::with_deep_stack;
use super::token::{self, Trust};
use super::{no_grad, scopes, version};
use crate::error::GraphError;
use crate::error::bail;
use crate::error::lock::lock;
use crate::random::{self, RandomState};
use crate::{Autocast, Cast, Op};

/// Checkpoints within one another: each level of recomputing takes stack.
const MAX_LEVELS: usize = 32;

/// Whether this thread is computing what it has computed before: effects on anything but the result
/// have been had.
pub(crate) fn is_active() -> bool {
    scopes::current().recomputing > 0
}

/// `f(x)`, whose intermediate tensors are not kept: backward computes them once more.
///
/// A block then keeps its input alone between forward and backward, for one more forward pass in
/// time. Backward recomputes under the autocast, and with the random numbers (dropout), that the
/// forward pass had, wherever it is called, and batch norm does not average its statistics twice.
/// Gradients reach `x` and the variables that `f` uses, the same numbers as without; but for the gradient of a 16-bit `x` that
/// several operators of `f` read, which is added up in F32 and rounded once.
///
/// `f` is called twice and must do the same both times. Random numbers have to come from this crate, on the thread that
/// calls `f`: `candle_nn::Dropout` would draw others the second time, and nobody could see that the gradient is wrong.
/// `f` is kept until backward: give it clones of the layers, which share their variables. A tracked tensor that `f`
/// captures gets its gradient by a backward pass within backward, through all that it was computed from: hand a recurrent
/// state in as `x` instead.
///
/// # Precision
///
/// That of `f`.
///
/// # Errors
///
/// Those of `f`, when it is called and in backward. In backward, also
/// [`GraphError::Differs`](crate::error::GraphError::Differs) where the second run had a result of another shape or dtype,
/// drew more or fewer random tensors, or used a variable that the first did not. Also
/// [`GraphError::Recomputed`](crate::error::GraphError::Recomputed) where an operator of this crate within `f` read a tensor
/// that has been written in place since. What candle's operators read is not checked, except for variables.
///
/// # Examples
///
/// ```
/// use candle_amp::autograd::checkpoint;
/// use candle_amp::{Autocast, nn, ops};
/// use candle_core::{DType, Device, Module, Tensor};
///
/// let varmap = nn::VarMap::new();
/// let vb = nn::var_builder(&varmap, DType::F32, &Device::Cpu);
/// let (up, down) = (nn::linear(4, 64, vb.pp("up"))?, nn::linear(64, 4, vb.pp("down"))?);
/// let x = Tensor::ones((2, 4), DType::F32, &Device::Cpu)?;
/// let loss = Autocast::new(DType::BF16).scope(|| {
///     let weight = up.weight().clone();
///     let block = move |x: &Tensor| down.forward(&ops::gelu_tanh(&up.forward(x)?)?);
///     let y = checkpoint(block, &x)?;
///     assert_eq!(y.dtype(), DType::BF16);
///     ops::mean(&y).map(|loss| (loss, weight))
/// })?;
/// let (loss, weight) = loss;
/// let gradients = loss.backward()?;
/// assert_eq!(gradients.get(&weight).unwrap().dtype(), DType::F32);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # References
///
/// Chen et al., [Training Deep Nets with Sublinear Memory Cost](https://arxiv.org/abs/1604.06174);
/// `torch.utils.checkpoint.checkpoint`.
pub fn checkpoint<F>(f: F, x: &Tensor) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
{
    if no_grad::is_active() {
        return f(x);
    }
    let autocast = Autocast::current();
    let (time, newest) =
        (version::now(), version::number(&Tensor::zeros((), DType::U8, &Device::Cpu)?));
    // The graph of this first pass lives only here: it tells which variables `f` uses, and what operators read. So the
    // input is tracked where it is outside: an operator on it may read what is not tracked itself, such as frozen weights.
    let first = match x.track_op() {
        true => Var::from_tensor(&x.detach())?.into_inner(),
        false => x.detach(),
    };
    let (y, draws) = random::record(|| f(&first));
    let y = y?;
    let (mut below, is_captured) = with_deep_stack(|| token::below(&y, &first, time, newest))?;
    // The storage of the result will be taken, where nobody else can have it: not a captured tensor's, nor one that `f` has
    // kept. Only of this crate's operators is that known.
    let is_borrowed = is_captured || !token::is_output(&y);
    let result = y.detach();
    drop(y);
    let is_borrowed = is_borrowed || token::is_output(&result);
    let result = if is_borrowed { result.force_contiguous()? } else { result };
    let result = Mutex::new(Some(result));
    let mut inputs: Vec<Tensor> = std::iter::once(x).chain(below.variables()).cloned().collect();
    // While a function is computed again, a pass may have freed what a checkpoint within it captures. That is an error
    // only where its result is used: the result is tracked, and its backward fails.
    match below.check_not_freed() {
        Err(_) if is_active() => inputs.push(Var::zeros((), DType::F32, x.device())?.into_inner()),
        checked => checked?,
    }
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    let trust = Trust { captured: below.take_captured(), owned: true };
    apply_with(Recomputed { f, autocast, draws, below, result }, &inputs, trust)
}

struct Recomputed<F> {
    f: F,
    autocast: Autocast,
    /// The random numbers of the first pass.
    draws: Vec<RandomState>,
    /// What the first pass depended on. Its variables are the inputs after the first.
    below: Below,
    /// What the first pass computed, until it is handed out.
    result: Mutex<Option<Tensor>>,
}

impl<F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static> Operator for Recomputed<F> {
    /// The first input.
    type Saved = Tensor;

    fn op(&self) -> Op {
        Op::user("checkpoint", Cast::Keep)
    }

    fn forward(&self, inputs: &[Tensor]) -> Result<(Tensor, Tensor)> {
        let result = lock(&self.result).take();
        match result {
            Some(result) => Ok((result, inputs[0].clone())),
            None => bail!("a checkpoint was applied twice"),
        }
    }

    fn backward(&self, ctx: &Backward<'_, Tensor>) -> Result<Vec<Option<Gradient>>> {
        let x = match ctx.wants[0] {
            Some(_) => Var::from_tensor(ctx.saved)?.into_inner(),
            None => ctx.saved.clone(),
        };
        self.below.check_not_freed()?;
        if self.below.is_modified() {
            return Err(GraphError::Recomputed.into());
        }
        // What it makes itself, such as a variable of its own, nobody else has.
        let before = version::number(&Tensor::zeros((), DType::U8, &Device::Cpu)?);
        let graph = GraphMode::freed_from_here();
        let y = self.recompute(&x)?;
        let facts = |y: &Tensor| format!("a result of {:?} and shape {:?}", y.dtype(), y.shape());
        let (first, second) = (facts(ctx.gradient), facts(&y));
        if first != second {
            return Err(GraphError::Differs { first, second }.into());
        }
        let gradients = backward_from(&y, ctx.gradient.clone(), graph)?;
        if gradients.saw_f16 {
            ctx.arrivals.0.note_f16();
        }
        let leaves = gradients.leaves.into_iter();
        let leaves = leaves.filter(|(var, _)| version::number(var) < before);
        let mut leaves: HashMap<_, _> = leaves.map(|(var, g)| (var.id(), g)).collect();
        let inputs = std::iter::once(&x).chain(self.below.variables());
        let gradients = inputs.zip(ctx.wants);
        let gradients = gradients
            .map(|(input, want)| leaves.remove(&input.id()).filter(|_| want.is_some()))
            .collect();
        if let Some(gradient) = leaves.into_values().next() {
            let shape = format!("{:?}", gradient.into_tensor().shape());
            let first = format!("no variable of shape {shape} among those it used");
            let second = format!("another variable of shape {shape}");
            return Err(GraphError::Differs { first, second }.into());
        }
        Ok(gradients)
    }
}

impl<F: Fn(&Tensor) -> Result<Tensor>> Recomputed<F> {
    /// `f(x)` as the first time.
    fn recompute(&self, x: &Tensor) -> Result<Tensor> {
        /// Leaves a level of recomputing, on error and panic too.
        struct Level;
        impl Drop for Level {
            fn drop(&mut self) {
                scopes::change(|scopes| scopes.recomputing -= 1);
            }
        }
        if scopes::current().recomputing == MAX_LEVELS {
            return Err(GraphError::TooDeep { op: "checkpoint" }.into());
        }
        scopes::change(|scopes| scopes.recomputing += 1);
        let _level = Level;
        let run = || self.autocast.scope(|| (self.f)(x));
        let (y, draws) = random::replay(&self.draws, run);
        let y = y?;
        if draws != self.draws.len() {
            let facts = |count| format!("{count} random tensors");
            let (first, second) = (facts(self.draws.len()), facts(draws));
            return Err(GraphError::Differs { first, second }.into());
        }
        Ok(y)
    }
}
