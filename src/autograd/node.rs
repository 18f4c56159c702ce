//! Nodes of the graph: what an operator keeps for backward, and where the gradients of its inputs go.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Result, Shape, Tensor};

use super::applied::GradFn;
use super::reclaim::drop_later;
use super::version::{self, Dependency};
use super::view::View;
use crate::error::GraphError;
use crate::error::lock::lock;

/// What a pass leaves of the graph it goes through.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GraphMode {
    /// All of it, as candle does.
    Kept,
    /// Nodes created before this time. It frees the others once no consumer needs them.
    FreedFrom(u64),
}

impl GraphMode {
    pub(crate) const FREED: Self = Self::FreedFrom(0);

    /// What exists by now is kept.
    pub(crate) fn freed_from_here() -> Self {
        Self::FreedFrom(version::now())
    }

    pub(super) fn frees(self, number: u64) -> bool {
        matches!(self, Self::FreedFrom(first) if number >= first)
    }
}

/// One application of an operator.
pub(super) struct Node {
    pub(super) name: &'static str,
    /// The time it was applied, or for a leaf made. The nodes of an operator's inputs have lower numbers, except for leaves.
    pub(super) number: u64,
    /// Whether only operators of this crate lie between it and its variables.
    pub(super) is_whole: bool,
    /// Whether it hands its gradient to a variable as it is: in `F32`, where that is collected.
    pub(super) is_leaf: bool,
    /// How many nodes candle walks below it, one above the other.
    pub(super) depth: usize,
    /// Whether candle does not see what is below it: a chain that its recursion could not walk.
    pub(super) is_cut: bool,
    /// `None` once a pass has freed it.
    saved: Mutex<Option<Arc<Saved>>>,
    /// Cloned for every consumer that is yet to run backward.
    consumers: Arc<()>,
}

/// What is kept for backward.
pub(super) struct Saved {
    /// One for each input.
    pub(super) edges: Vec<Edge>,
    pub(super) dependencies: Vec<Dependency>,
    /// Nodes that backward goes through in a pass of its own: they count as consumed until then.
    pub(super) captured: Vec<Consumed>,
    pub(super) grad_fn: GradFn,
}

impl Drop for Saved {
    fn drop(&mut self) {
        // What an operator saved may hold an earlier part of the graph too, as a checkpoint's function does.
        let grad_fn = std::mem::replace(&mut self.grad_fn, GradFn::Leaf);
        drop_later((std::mem::take(&mut self.edges), std::mem::take(&mut self.captured), grad_fn));
    }
}

/// The name of a node that hands a gradient to an input as it is.
pub(super) const LEAF: &str = "leaf";

/// Where the gradient of an input goes.
pub(super) struct Edge {
    pub(super) dtype: DType,
    /// Of the input, and so of its gradient.
    pub(super) shape: Shape,
    pub(super) target: Target,
}

pub(super) enum Target {
    /// The input is not tracked.
    Nowhere,
    /// To the node that made the input, or what the input is a view of.
    Node(Consumed, Option<View>),
    /// To a variable, or to candle as the gradient of the argument of that number.
    Argument(Tensor, usize),
}

/// A node, as one of its consumers has it.
#[derive(Clone)]
pub(super) struct Consumed {
    pub(super) node: Arc<Node>,
    _alive: Arc<()>,
}

impl Consumed {
    pub(super) fn number(&self) -> u64 {
        self.node.number
    }
}

impl Node {
    /// A node of this `number`, taken from the clock before the operator read its inputs.
    pub(super) fn new(
        name: &'static str,
        number: u64,
        saved: Saved,
        max_depth: usize,
    ) -> Arc<Self> {
        let edges = &saved.edges;
        let below = edges.iter().filter_map(Edge::depth).max();
        let depth = below.map_or(0, |depth| depth + 1);
        let is_cut = depth > max_depth;
        Arc::new(Self {
            name,
            number,
            is_whole: edges.iter().all(Edge::is_whole),
            is_leaf: name == LEAF && edges.iter().any(Edge::is_variable),
            depth: if is_cut { 0 } else { depth },
            is_cut,
            saved: Mutex::new(Some(Arc::new(saved))),
            consumers: Arc::new(()),
        })
    }

    pub(super) fn consume(self: &Arc<Self>) -> Consumed {
        Consumed { node: self.clone(), _alive: self.consumers.clone() }
    }

    /// What backward needs, and whether this is its last use. If the pass frees the graph and no consumer is left but
    /// `own`, which the pass has had pending, the node gives it up.
    pub(super) fn begin(&self, graph: GraphMode, own: Consumed) -> Result<(Arc<Saved>, bool)> {
        let mut saved = lock(&self.saved);
        // Under the lock: of two passes that begin at once, the first still counts the second.
        drop(own);
        let unused = Arc::strong_count(&self.consumers) == 1;
        let freed = unused && graph.frees(self.number);
        let taken = if freed { saved.take() } else { saved.clone() };
        let taken = taken.ok_or(GraphError::Freed { op: self.name })?;
        let last = Arc::strong_count(&taken) == 1;
        Ok((taken, last))
    }

    /// What backward needs; `None` if it is freed.
    pub(super) fn saved(&self) -> Option<Arc<Saved>> {
        lock(&self.saved).clone()
    }
}

impl Edge {
    fn is_variable(&self) -> bool {
        matches!(&self.target, Target::Argument(arg, _) if arg.is_variable())
    }

    fn depth(&self) -> Option<usize> {
        match &self.target {
            Target::Node(node, _) => Some(node.node.depth),
            _ => None,
        }
    }

    fn is_whole(&self) -> bool {
        match &self.target {
            Target::Nowhere => true,
            Target::Node(node, _) => node.node.is_whole,
            Target::Argument(arg, _) => arg.is_variable(),
        }
    }
}
