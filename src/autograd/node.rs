//! Nodes of the graph: what an operator keeps for backward, and where the gradients of its inputs go.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Result, Shape, Tensor, TensorId};

use super::pass::{Leaves, Pass, Pending};
use super::reclaim::{Link, drop_links};
use super::storage::lock;
use super::version::{self, Read};
use super::{Arrivals, Gradient, second_order};
use crate::autocast;
use crate::error::GraphError;

/// One application of an operator.
pub(super) struct Node {
    pub(super) name: &'static str,
    /// The time it was applied, or for a leaf made. The nodes of an operator's inputs have lower numbers, except for leaves.
    number: u64,
    /// Whether only operators of this crate lie between it and its variables.
    pub(super) is_whole: bool,
    /// Whether it hands its gradient to a variable as it is: in `F32`, where that is collected.
    is_leaf: bool,
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
struct Saved {
    /// One for each input.
    edges: Vec<Edge>,
    /// Calls the operator's backward.
    run: Box<Run>,
}

impl Drop for Saved {
    fn drop(&mut self) {
        // What an operator saved may hold an earlier part of the graph too, as a checkpoint's function does.
        let run = std::mem::replace(&mut self.run, Box::new(|_| Ok(Vec::new())));
        drop_links(self.edges.drain(..).map(Link::Edge).chain([Link::Run(run)]));
    }
}

/// The name of a node that hands a gradient to an input as it is.
pub(super) const LEAF: &str = "leaf";

pub(super) type Run = dyn Fn(Arguments<'_>) -> Result<Vec<Option<Gradient>>> + Send + Sync;

/// What an operator's backward is given.
pub(super) struct Arguments<'a> {
    pub(super) gradient: &'a Gradient,
    pub(super) wants: &'a [Option<DType>],
    pub(super) last: bool,
    pub(super) arrivals: Arrivals<'a>,
}

/// Where the gradient of an input goes.
pub(super) struct Edge {
    pub(super) dtype: DType,
    /// Of the input, and so of its gradient.
    pub(super) shape: Shape,
    /// The input's storage, if backward may read it and no operator of the crate has made it.
    pub(super) read: Option<Read>,
    pub(super) target: Target,
}

pub(super) enum Target {
    /// The input is not tracked.
    Nowhere,
    /// To the node that made the input, in the shape of that node's output where the input is a view of it.
    Node(Consumed, Option<Shape>),
    /// To a variable, or to candle as the gradient of the argument of that number.
    Argument(Tensor, usize),
}

/// What a graph depends on that was begun at some time.
pub(super) struct Below {
    time: u64,
    seen: HashSet<u64>,
    /// In the order they were found, so that sums over them are the same each time.
    variables: Vec<Tensor>,
    known: HashSet<TensorId>,
    /// Nodes of an earlier graph whose outputs it reads. They count as consumed as long as this lives.
    captured: Vec<Consumed>,
    /// The storages that backward reads.
    reads: Vec<Read>,
}

impl Below {
    pub(super) fn since(time: u64) -> Self {
        Self {
            time,
            seen: HashSet::new(),
            variables: Vec::new(),
            known: HashSet::new(),
            captured: Vec::new(),
            reads: Vec::new(),
        }
    }

    pub(super) fn variables(&self) -> &[Tensor] {
        &self.variables
    }

    pub(super) fn add(&mut self, variable: &Tensor) {
        if self.known.insert(variable.id()) {
            self.variables.push(variable.clone());
        }
    }

    /// Adds what is below `node`, as far as it is reached without candle.
    pub(super) fn visit(&mut self, node: Consumed) -> Result<()> {
        let mut rest = vec![(node, true)];
        while let Some((consumed, from_own)) = rest.pop() {
            let node = consumed.node().clone();
            if !self.seen.insert(node.number) {
                continue;
            }
            let own = node.number >= self.time;
            if from_own && !own {
                self.captured.push(consumed);
            }
            let saved = lock(&node.saved).clone().ok_or(GraphError::Freed { op: node.name })?;
            for Edge { read, target, .. } in &saved.edges {
                self.reads.extend(read.filter(|_| own));
                match target {
                    Target::Node(input, _) => rest.push((input.clone(), own)),
                    Target::Argument(input, _) if input.is_variable() => {
                        self.add(input);
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Whether backward reads what has been written since.
    pub(super) fn is_modified(&self) -> bool {
        version::written_since(self.time, self.reads.iter().copied().map(Some)).is_some()
    }
}

/// A node, as one of its consumers has it.
#[derive(Clone)]
pub(super) struct Consumed {
    node: Arc<Node>,
    _alive: Arc<()>,
}

impl Consumed {
    pub(super) fn number(&self) -> u64 {
        self.node.number
    }

    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }
}

impl Node {
    /// A node of this `number`, taken from the clock before the operator read its inputs.
    pub(super) fn new(
        name: &'static str,
        number: u64,
        run: Box<Run>,
        edges: Vec<Edge>,
        max_depth: usize,
    ) -> Arc<Self> {
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
            saved: Mutex::new(Some(Arc::new(Saved { edges, run }))),
            consumers: Arc::new(()),
        })
    }

    pub(super) fn consume(self: &Arc<Self>) -> Consumed {
        Consumed { node: self.clone(), _alive: self.consumers.clone() }
    }

    /// What backward needs, and whether this is its last use. If the pass frees the graph and no consumer is left but
    /// `own`, which the pass has had pending, the node gives it up.
    fn begin(&self, pass: &Pass, own: Option<Consumed>) -> Result<(Arc<Saved>, bool)> {
        let mut saved = lock(&self.saved);
        // Under the lock: of two passes that begin at once, the first still counts the second.
        drop(own);
        let unused = Arc::strong_count(&self.consumers) == 1;
        let freed = unused && pass.graph.frees(self.number);
        let taken = if freed { saved.take() } else { saved.clone() };
        let taken = taken.ok_or(GraphError::Freed { op: self.name })?;
        let last = Arc::strong_count(&taken) == 1;
        Ok((taken, last))
    }

    /// Computes the gradients of the inputs from that of the output, and sends them on. Returns those for candle, with
    /// the numbers of its arguments.
    fn run(
        &self,
        pass: &mut Pass,
        gradient: Gradient,
        saved: &Saved,
        last: bool,
    ) -> Result<Vec<(usize, Tensor)>> {
        if second_order::is_wanted() && pass.leaves.is_none() {
            return Err(GraphError::SecondOrder { op: self.name }.into());
        }
        let reads = saved.edges.iter().map(|edge| edge.read);
        if let Some(input) = version::written_since(self.number, reads) {
            let shape = saved.edges[input].shape.clone();
            return Err(GraphError::Modified { op: self.name, input, shape }.into());
        }
        autocast::clear_cast_cache();
        let wants: Vec<_> = saved.edges.iter().map(|edge| edge.wants(pass)).collect();
        let dtype = gradient.tensor().dtype();
        let gradient = gradient.into_dtype(dtype)?;
        if dtype == DType::F16 {
            pass.note_f16();
        }
        let arrivals = (&saved.edges[..], RefCell::new(&mut *pass));
        let arrivals = Arrivals(&arrivals);
        let gradients =
            (saved.run)(Arguments { gradient: &gradient, wants: &wants, last, arrivals })?;
        if gradients.len() != wants.len() {
            let (got, expected) = (gradients.len(), wants.len());
            return Err(GraphError::GradientCount { op: self.name, got, expected }.into());
        }
        let mut arguments = Vec::new();
        let sends = saved.edges.iter().zip(wants).zip(gradients);
        for (input, ((edge, want), gradient)) in sends.enumerate() {
            let (Some(want), Some(gradient)) = (want, gradient) else { continue };
            if gradient.tensor().shape() != &edge.shape {
                let (got, expected) = (gradient.tensor().shape().clone(), edge.shape.clone());
                return Err(
                    GraphError::GradientShape { op: self.name, input, got, expected }.into()
                );
            }
            let gradient = gradient.into_dtype(want)?;
            match (&edge.target, &mut pass.leaves) {
                (Target::Nowhere, _) => {}
                (Target::Node(node, None), _) => pass.send(node, Some(gradient))?,
                (Target::Node(node, Some(output)), _) => {
                    pass.send(node, Some(gradient.reshape(output)?))?
                }
                (Target::Argument(input, _), Some(leaves)) if input.is_variable() => {
                    leaves.add(input, gradient)?
                }
                (Target::Argument(_, i), _) => arguments.push((*i, gradient.into_tensor())),
            }
        }
        Ok(arguments)
    }

    /// Runs backward where candle schedules it. Returns the gradients of the custom op's arguments.
    pub(super) fn backward_for_candle(
        &self,
        pass: &mut Pass,
        args: &[&Tensor],
    ) -> Result<Vec<Option<Tensor>>> {
        let mut out = vec![None; args.len()];
        if self.is_cut {
            // The one argument is a variable, so that candle asks for no gradient.
            return match pass.leaves {
                Some(_) => Ok(out),
                None => Err(GraphError::TooDeep { op: self.name }.into()),
            };
        }
        // Whoever gave the token a gradient has sent something, if only that there is none.
        let pending = pass.take(self.number).filter(|_| pass.runs(self.number));
        let Some(Pending { node, gradient }) = pending else {
            return Err(GraphError::Nested { op: self.name }.into());
        };
        let (saved, last) = self.begin(pass, Some(node))?;
        for (i, gradient) in self.run_or_skip(pass, gradient, &saved, last)? {
            out[i] = Some(gradient);
        }
        // candle panics where a tracked argument that is no variable gets no gradient.
        for edge in &saved.edges {
            if let Target::Argument(arg, i) = &edge.target
                && out[*i].is_none()
                && !arg.is_variable()
            {
                out[*i] = Some(arg.zeros_like()?);
            }
        }
        for (gradient, arg) in out.iter_mut().zip(args) {
            if gradient.is_none() && !arg.is_variable() {
                *gradient = pass.token_gradient(arg)?;
            }
        }
        Ok(out)
    }

    /// Runs backward through every node with a pending gradient and those below, latest first, without candle.
    pub(super) fn run_pending(pass: &mut Pass) -> Result<()> {
        while let Some(pending) = pass.next() {
            let node = pending.node.node().clone();
            if !node.is_whole {
                return Err(GraphError::TooDeep { op: node.name }.into());
            }
            let (saved, last) = node.begin(pass, Some(pending.node))?;
            node.run_or_skip(pass, pending.gradient, &saved, last)?;
        }
        Ok(())
    }

    /// [Runs](Self::run) if there is a gradient, and sends to every input's node at least that there is none: it is
    /// run or freed all the same.
    fn run_or_skip(
        &self,
        pass: &mut Pass,
        gradient: Option<Gradient>,
        saved: &Saved,
        last: bool,
    ) -> Result<Vec<(usize, Tensor)>> {
        let arguments = match gradient {
            Some(gradient) => self.run(pass, gradient, saved, last)?,
            None => Vec::new(),
        };
        for edge in &saved.edges {
            if let Target::Node(node, _) = &edge.target {
                pass.send(node, None)?;
            }
        }
        Ok(arguments)
    }

    pub(super) fn number(&self) -> u64 {
        self.number
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

    /// The dtype that the input's gradient is wanted in.
    fn wants(&self, pass: &Pass) -> Option<DType> {
        let leaf = match &self.target {
            Target::Nowhere => return None,
            Target::Node(node, _) => node.node.is_leaf,
            Target::Argument(arg, _) => arg.is_variable(),
        };
        Some(if leaf && pass.leaves.is_some() { Leaves::dtype(self.dtype) } else { self.dtype })
    }

    /// What other consumers have sent so far where this edge goes, in the dtype and the shape of the input.
    pub(super) fn take_pending(&self, pass: &mut Pass) -> Result<Option<Gradient>> {
        let Target::Node(node, _) = &self.target else { return Ok(None) };
        if node.node.is_leaf {
            return Ok(None);
        }
        let Some(gradient) = pass.take_so_far(node.number()) else { return Ok(None) };
        gradient.into_dtype(self.dtype)?.reshape(&self.shape).map(Some)
    }

    fn is_whole(&self) -> bool {
        match &self.target {
            Target::Nowhere => true,
            Target::Node(node, _) => node.node.is_whole,
            Target::Argument(arg, _) => arg.is_variable(),
        }
    }
}
