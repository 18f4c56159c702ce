//! The state of one backward pass.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::gradient::Gradient;
use super::maps::{ById, Ids};
use super::marker;
use super::no_grad::{EnableGrad, enable_grad};
use super::node::{Consumed, Edge, GraphMode, Target};
use crate::autocast::{self, AutocastGuard};
use crate::error::bail;

/// One backward pass: the gradients on their way, and where those of variables go.
///
/// It is handed from node to node. Where candle schedules the nodes, through callbacks that it hands nothing of ours,
/// a thread-local has it between them; see [`within`]. A pass that fails is dropped with all it holds.
pub(super) struct Pass {
    /// The gradients that nodes have yet to receive, by the node's number. The consumers of a node have higher numbers,
    /// except for a leaf's only one.
    pending: BTreeMap<u64, PendingNode>,
    /// The gradients of variables; `None` where candle's store takes them.
    pub(super) leaves: Option<Leaves>,
    pub(super) graph: GraphMode,
    /// What candle walks. A scaler's pass begins with all of it; candle's own tells with its first callback.
    covered: Ids,
    /// Tokens that have a gradient in candle's store. One is enough: it is never read.
    given: Ids,
    /// The nodes that candle has run.
    ran: HashSet<u64>,
    /// Whether a gradient was in F16.
    pub(super) saw_f16: bool,
    /// Shared with the tensors that stand for token gradients in candle's store: the pass is alive while one of
    /// them is. Only of candle's own passes, whose end nobody tells us.
    alive: Option<Arc<()>>,
}

/// What a node has yet to receive. It counts as a consumer of the node, so that no other pass frees that meanwhile.
pub(super) struct PendingNode {
    pub(super) node: Consumed,
    /// `None` where its consumers sent none.
    pub(super) gradient: Option<Gradient>,
}

/// The gradients of variables, `F32` for 16-bit ones, in the order of their arrival.
#[derive(Default)]
pub(super) struct Leaves {
    gradients: Vec<(Tensor, Gradient)>,
    index: ById<usize>,
    watch: Option<CompletionHook>,
}

/// Is given the gradient of a variable as soon as nothing more is added to it, while the pass goes on.
pub(crate) type OnComplete = Box<dyn FnMut(&Tensor, Gradient) -> crate::Result<()>>;

/// Who is waiting for complete gradients.
struct CompletionHook {
    /// How many uses of each variable have not run backward yet.
    uses: ById<usize>,
    on_complete: OnComplete,
}

impl Leaves {
    /// Adds to the gradient of `variable`.
    pub(super) fn add(&mut self, variable: &Tensor, gradient: Gradient) -> Result<()> {
        match self.index.get(&variable.id()) {
            Some(&at) => {
                let before = &mut self.gradients[at].1;
                // Where the sum fails, the pass does.
                let taken = std::mem::replace(before, Gradient::shared(variable.clone()));
                *before = taken.add(gradient)?;
            }
            None => {
                self.index.insert(variable.id(), self.gradients.len());
                self.gradients.push((variable.clone(), gradient));
            }
        }
        Ok(())
    }

    /// Has `on_complete` take gradients as soon as all `uses` of their variables have run backward.
    pub(super) fn watch(&mut self, uses: ById<usize>, on_complete: OnComplete) {
        self.watch = Some(CompletionHook { uses, on_complete });
    }

    /// A use of `variable` has run backward, or was skipped. `true` if its gradient was complete, and is gone.
    pub(super) fn used(&mut self, variable: &Tensor) -> Result<bool> {
        let Some(CompletionHook { uses, on_complete }) = &mut self.watch else { return Ok(false) };
        let Some(left) = uses.get_mut(&variable.id()) else { return Ok(false) };
        *left = left.saturating_sub(1);
        if *left > 0 {
            return Ok(false);
        }
        let Some(at) = self.index.remove(&variable.id()) else { return Ok(false) };
        let (_, gradient) = self.gradients.swap_remove(at);
        if let Some((moved, _)) = self.gradients.get(at) {
            self.index.insert(moved.id(), at);
        }
        on_complete(variable, gradient)?;
        Ok(true)
    }

    pub(super) fn into_vec(self) -> Vec<(Tensor, Gradient)> {
        self.gradients
    }
}

impl Pass {
    /// A pass that collects the gradients of variables.
    pub(super) fn collecting(graph: GraphMode) -> Self {
        Self { leaves: Some(Leaves::default()), graph, ..Self::of_candle() }
    }

    /// candle's own, which keeps the graph and has a store for the gradients of variables.
    fn of_candle() -> Self {
        Self {
            pending: BTreeMap::new(),
            leaves: None,
            graph: GraphMode::Kept,
            covered: Ids::default(),
            given: Ids::default(),
            ran: HashSet::new(),
            saw_f16: false,
            alive: None,
        }
    }

    /// Whether candle is known to walk `output` in this pass.
    pub(super) fn covers(&self, output: &Tensor) -> bool {
        self.covered.contains(&output.id())
    }

    /// Notes what candle walks.
    pub(super) fn cover(&mut self, nodes: &[&Tensor]) {
        self.covered.extend(nodes.iter().map(|node| node.id()));
    }

    /// Notes that candle runs a node. `false` if it has before in this pass: a second pass is under way within it.
    pub(super) fn runs(&mut self, number: u64) -> bool {
        self.ran.insert(number)
    }

    /// Whether candle still holds a gradient of a pass that it has begun. As long as a node that candle will run has a
    /// pending gradient, the node's token has a gradient in candle's store. candle takes it out when it runs the token.
    fn is_alive(&self) -> bool {
        self.leaves.is_some()
            || self.alive.as_ref().is_some_and(|alive| Arc::strong_count(alive) > 1)
    }

    /// Adds to what `node` receives.
    pub(super) fn send(&mut self, node: &Consumed, gradient: Option<Gradient>) -> Result<()> {
        let pending = self.pending.entry(node.number());
        let pending = pending.or_insert_with(|| PendingNode { node: node.clone(), gradient: None });
        pending.gradient = match (pending.gradient.take(), gradient) {
            (Some(before), Some(gradient)) => Some(before.add(gradient)?),
            (before, gradient) => before.or(gradient),
        };
        Ok(())
    }

    /// What a node receives, which leaves the pass.
    pub(super) fn take(&mut self, number: u64) -> Option<PendingNode> {
        self.pending.remove(&number)
    }

    /// The pending gradient of a node that other consumers may still add to.
    pub(super) fn take_so_far(&mut self, number: u64) -> Option<Gradient> {
        self.pending.get_mut(&number)?.gradient.take()
    }

    /// Tells whoever waits for complete gradients that a node with these edges has run backward, or was skipped.
    pub(super) fn has_run(&mut self, edges: &[Edge]) -> Result<()> {
        let Some(leaves) = &mut self.leaves else { return Ok(()) };
        for edge in edges {
            if let Target::Argument(variable, _) = &edge.target
                && leaves.used(variable)?
            {
                self.saw_f16 |= variable.dtype() == DType::F16;
            }
        }
        Ok(())
    }

    /// The node whose consumers have all run: the latest.
    pub(super) fn next(&mut self) -> Option<PendingNode> {
        self.pending.pop_last().map(|(_, pending)| pending)
    }

    /// A gradient for candle's edge to `token`, which is never read. `None` if the token has one, or if candle does not
    /// walk it: no variable is below.
    pub(super) fn token_gradient(&mut self, token: &Tensor) -> Result<Option<Tensor>> {
        if !self.covers(token) || !self.given.insert(token.id()) {
            return Ok(None);
        }
        if self.leaves.is_some() {
            return Ok(Some(token.detach()));
        }
        let alive = self.alive.get_or_insert_default().clone();
        marker::alive(token, alive).map(Some)
    }

    /// An operator's backward was given a gradient in F16, which needs a loss scale.
    pub(super) fn note_f16(&mut self) {
        self.saw_f16 = true;
        let warned = || PASS.with_borrow_mut(|thread| std::mem::replace(&mut thread.warned, true));
        if self.leaves.is_none() && !warned() {
            tracing::warn!(
                "F16 gradients without a GradScaler: those below 2^-25 become zero; run backward \
                 by `scaler.scale(&loss)?.backward()?`, or compute in BF16"
            );
        }
    }
}

/// Where a thread keeps the pass that candle walks, between callbacks.
struct ThreadPass {
    pass: Option<Pass>,
    /// Whether this thread has warned of F16 gradients without a scaler.
    warned: bool,
}

thread_local! {
    static PASS: RefCell<ThreadPass> = const { RefCell::new(ThreadPass { pass: None, warned: false }) };
}

fn replace(pass: Option<Pass>) -> Option<Pass> {
    PASS.with_borrow_mut(|thread| std::mem::replace(&mut thread.pass, pass))
}

/// Keeps the caller's autocast scope and `no_grad` from a user's backward, of this crate's operators or of candle's, which
/// may build a graph and run backward through it.
pub(super) fn alone() -> (Option<AutocastGuard>, EnableGrad) {
    (autocast::suspend(), enable_grad())
}

/// Gives `f`, one of candle's callbacks, the pass that candle walks: a scaler's, or candle's own. Of candle's own it
/// is a new one if the last has ended.
///
/// Meanwhile the thread-local is empty, so that a backward pass that `f` runs has one of its own.
pub(super) fn within<T>(f: impl FnOnce(&mut Pass) -> Result<T>) -> Result<T> {
    let mut pass = replace(None).filter(Pass::is_alive).unwrap_or_else(Pass::of_candle);
    let result = f(&mut pass);
    let pass = if result.is_ok() || pass.leaves.is_some() { Some(pass) } else { None };
    drop(replace(pass));
    result
}

/// Has candle `walk` the graph of these `nodes` for `pass`. What is pending afterwards is for cut nodes, below which
/// candle does not see.
pub(super) fn walked_by_candle<T>(
    mut pass: Pass,
    nodes: &[&Tensor],
    walk: impl FnOnce() -> Result<T>,
) -> Result<(T, Pass)> {
    /// Puts the outer pass back, on error and panic too.
    struct Outer(Option<Pass>);
    impl Drop for Outer {
        fn drop(&mut self) {
            drop(replace(self.0.take()));
        }
    }
    let _alone = alone();
    pass.cover(nodes);
    let outer = Outer(replace(Some(pass)).filter(Pass::is_alive));
    let result = walk();
    let pass = replace(None);
    drop(outer);
    match (result?, pass) {
        (result, Some(mut pass)) => {
            // candle does not run nodes above no variable, so that theirs is left as well.
            pass.pending.retain(|_, pending| pending.node.node.is_cut);
            Ok((result, pass))
        }
        (_, None) => bail!("a backward pass has lost its gradients"),
    }
}
