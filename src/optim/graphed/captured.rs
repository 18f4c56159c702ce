//! The graph of a step, and what the host does before and after each replay.

use candle_core::{DType, Tensor, TensorId};
use rand::Rng;

use super::key::GraphKey;
use crate::autograd::version;
use crate::error::CaptureError;
use crate::kernels::capture::{self, Recording};
use crate::kernels::cuda::{self, Gpu, Graph};
use crate::kernels::multi_tensor::optimizer as kernel;
use crate::optim::step::seed_of;
use crate::optim::{Config, Optim};
use crate::random::{self, RandomState};
use crate::{GradScaler, Result, StepOutcome, autocast};

/// What a step returns: the loss, detached, and what became of the step.
pub(super) type LossAndOutcome = (Tensor, StepOutcome);

/// What a capture needs of the step before it, which ran as always.
pub(super) struct Rehearsed {
    pub(super) bound: GraphKey,
    /// How many words a step asks for.
    words: usize,
    /// Of the shapes that a captured step returns.
    loss: Tensor,
    outcome: StepOutcome,
}

/// A graph, and all that it reads and writes.
pub(super) struct Captured {
    pub(super) bound: GraphKey,
    // First, as it names what follows.
    graph: Graph,
    inputs: Vec<Tensor>,
    loss: Tensor,
    outcome: StepOutcome,
    /// What differs from step to step: `recording` says what each word is.
    words: Tensor,
    recording: Recording,
    /// The numbers of its draws, counted from the first of a step.
    draws: Vec<u64>,
    /// The number of the draw that the optimizer's seed is of.
    seed: Option<u64>,
    /// How many draws a step makes.
    all_draws: u64,
    /// Those with gradients.
    variables: Vec<TensorId>,
    /// Temporary memory, which another operator may replace by a larger one.
    _scratch: Vec<Tensor>,
}

/// Copies `from` into the memory of `to`, of the same shape and dtype.
fn copy_into(to: &Tensor, from: &Tensor) -> candle_core::Result<()> {
    if to.elem_count() > 0 {
        let from = from.to_device(to.device())?.contiguous()?;
        to.flatten_all()?.slice_set(&from.flatten_all()?, 0, 0)?;
    }
    Ok(())
}

fn copy(tensor: &Tensor) -> Result<Tensor> {
    Ok(tensor.detach().contiguous()?.copy()?)
}

impl Rehearsed {
    pub(super) fn new(
        loss: &Tensor,
        outcome: &StepOutcome,
        words: usize,
        bound: GraphKey,
    ) -> Result<Self> {
        Ok(Self { bound, words, loss: copy(loss)?, outcome: outcome.with_tensors(copy)? })
    }

    /// Captures `step`. Nothing that the host or the device knows of has changed then.
    pub(super) fn capture<C: Config>(
        &self,
        gpu: &Gpu,
        scaler: &mut GradScaler,
        optimizer: &mut Optim<C>,
        inputs: &[Tensor],
        step: impl FnOnce(&mut GradScaler, &mut Optim<C>, &[Tensor]) -> Result<LossAndOutcome>,
    ) -> Result<Captured> {
        // Memory for the elements alone: an input may be a view of a whole data set.
        let own = |x: &Tensor| -> candle_core::Result<Tensor> {
            let own = gpu.empty(x.shape(), x.dtype())?;
            copy_into(&own, x)?;
            Ok(own)
        };
        let inputs =
            gpu.ordered(|| inputs.iter().map(own).collect::<candle_core::Result<Vec<_>>>())?;
        let (loss, outcome) = (copy(&self.loss)?, self.outcome.with_tensors(copy)?);
        let words = gpu.empty(self.words.max(1), DType::I64)?;
        let buffer = Some((cuda::address(&words)?, self.words));
        // A capture must not free what was allocated before it.
        autocast::drop_cast_cache();
        // What other threads draw meanwhile comes from elsewhere, and stays theirs.
        let fork = random::fork_rng_guard();
        let before = random::state();
        let mut variables = Vec::new();
        let (captured, recording) = capture::record(buffer, || {
            gpu.capture(|| -> Result<()> {
                let watched = |scaler: &mut GradScaler, optimizer: &mut Optim<C>| {
                    let stepped = step(scaler, optimizer, &inputs)?;
                    returned(&stepped, &loss, &outcome)
                };
                let stepped = watched(scaler, optimizer);
                variables = scaler.last_collected();
                // Nor may the graph's own memory stay with anybody.
                autocast::drop_cast_cache();
                optimizer.drop_new_state(&self.bound);
                stepped
            })
        });
        let after = random::state();
        drop(fork);
        let ((), graph) = captured?;
        let unchanged = GraphKey::to(scaler, optimizer) == self.bound;
        if !unchanged || recording.words.len() != self.words {
            return Err(CaptureError::Differs.into());
        }
        // The numbers of the draws, which are those of one generator going on.
        let key = capture::draw_words(&random::stream_of(before, 0));
        let drawn = |&at: &usize| {
            let words = &recording.words[at..at + capture::DRAW];
            (words[..4] == key[..4]).then(|| words[4].wrapping_sub(before.draws))
        };
        let stream = recording.stepped.as_ref().and_then(|stepped| stepped.stream);
        let seed = stream.map(|stream| stream.wrapping_sub(before.draws));
        let all_draws = after.draws.wrapping_sub(before.draws);
        let draws = recording.draws.iter().map(drawn).collect::<Option<Vec<_>>>();
        let ours = |number: &u64| *number < all_draws;
        let Some(draws) = draws.filter(|all| {
            after.seed == before.seed && all.iter().all(ours) && seed.iter().all(ours)
        }) else {
            return Err(CaptureError::Reseeded.into());
        };
        Ok(Captured {
            bound: self.bound.clone(),
            graph,
            inputs,
            loss,
            outcome,
            words,
            recording,
            draws,
            seed,
            all_draws,
            variables,
            _scratch: gpu.kept_scratch(),
        })
    }
}

/// Copies what a captured step returns to where each replay leaves it.
fn returned(
    (loss, outcome): &LossAndOutcome,
    to_loss: &Tensor,
    to_outcome: &StepOutcome,
) -> Result<()> {
    let (mut from, mut to) = (vec![loss.clone()], vec![to_loss.clone()]);
    let all = |outcome: &StepOutcome, list: &mut Vec<Tensor>| {
        outcome.with_tensors(|tensor| {
            list.push(tensor.clone());
            Ok(tensor.clone())
        })
    };
    all(outcome, &mut from)?;
    all(to_outcome, &mut to)?;
    let same = |(a, b): (&Tensor, &Tensor)| a.shape() == b.shape() && a.dtype() == b.dtype();
    if from.len() != to.len() || !from.iter().zip(&to).all(same) {
        return Err(CaptureError::Differs.into());
    }
    Ok(from.iter().zip(&to).try_for_each(|(from, to)| copy_into(to, from))?)
}

impl Captured {
    /// One step. Before the graph is launched, the host only draws.
    pub(super) fn replay<C: Config>(
        &mut self,
        gpu: &Gpu,
        scaler: &mut GradScaler,
        optimizer: &mut Optim<C>,
        inputs: &[Tensor],
    ) -> Result<LossAndOutcome> {
        if let Some(stepped) = &self.recording.stepped {
            optimizer.check_masters_of(stepped.places.iter().map(|&at| &optimizer.slots[at]))?;
        }
        optimizer.groups.iter().try_for_each(|group| group.config.validate())?;
        // Taken before they are used, or another thread could draw the same. An error from here on has used them up.
        self.set_words(optimizer, random::take(self.all_draws));
        let inputs = self.inputs.iter().zip(inputs);
        gpu.ordered(|| inputs.into_iter().try_for_each(|(own, given)| copy_into(own, given)))?;
        Gpu::upload(&self.words, &self.recording.words)?;
        gpu.replay(&self.graph)?;
        if let Some(stepped) = &self.recording.stepped {
            optimizer.stepped(&stepped.places);
        }
        version::written(&self.recording.written);
        if let Some(stepped) = &self.recording.stepped {
            optimizer.are_current(&stepped.places);
        }
        scaler.replayed(&self.variables)?;
        Ok((copy(&self.loss)?, self.outcome.with_tensors(copy)?))
    }

    /// The words of the next step, whose draws begin at `state`.
    fn set_words<C: Config>(&mut self, optimizer: &Optim<C>, state: RandomState) {
        let Self { recording, draws, seed, .. } = self;
        for (&at, &number) in recording.draws.iter().zip(&*draws) {
            let words = capture::draw_words(&random::stream_of(state, number));
            recording.words[at..at + capture::DRAW].copy_from_slice(&words);
        }
        let seed = seed.map_or(0, |number| random::stream_of(state, number).random::<u64>());
        let Some(stepped) = &recording.stepped else { return };
        // Most variables are at the same step.
        let mut last = None;
        for &(at, slot) in &recording.rows {
            let place = stepped.places[slot];
            let slot = &optimizer.slots[place];
            let key = (slot.group, slot.steps + 1);
            let rule = match last {
                Some((known, rule)) if known == key => rule,
                _ => optimizer.groups[key.0].config.rule(key.1, false),
            };
            last = Some((key, rule));
            let words = kernel::per_step(rule, seed_of(seed, place));
            recording.words[at..at + capture::ROW].copy_from_slice(&words);
        }
    }
}

impl<C: Config> Optim<C> {
    /// Drops master and states that a capture has made, in memory that nobody has written.
    fn drop_new_state(&mut self, bound: &GraphKey) {
        let old = |tensor: &Tensor| bound.optimizer.contains(&tensor.id());
        for slot in self.slots.iter_mut().filter(|slot| slot.steps == 0) {
            slot.master = slot.master.take().filter(old);
            slot.states.retain(old);
        }
        self.skips = self.skips.take().filter(old);
    }
}
