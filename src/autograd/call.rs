//! One application of an operator, and the gradients that wait for it.

use std::cell::Cell as StdCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use candle_core::{DType, Result, Shape, Tensor};

use super::storage::lock;
use super::{Gradient, Waiting, f16_gradients, second_order, sink, stepped};
use crate::autocast;
use crate::error::GraphError;

/// One application of an operator.
pub(super) struct Call {
    pub(super) name: &'static str,
    /// Those of its inputs are smaller.
    number: u64,
    /// Whether its inputs go back to variables by operators of this crate alone.
    pub(super) whole: bool,
    /// Whether it hands its gradient to a variable as it is: in `F32`, where that is collected.
    leaf: bool,
    /// `None` once a pass has freed it.
    way: Mutex<Option<Arc<Way>>>,
    /// Cloned for every consumer that is yet to go back.
    consumed: Arc<()>,
    pub(super) cell: Cell,
}

/// How a call goes back, and all that is kept for that.
struct Way {
    /// One for each input.
    edges: Vec<Edge>,
    /// Calls the operator's backward with the gradient of the output.
    run: Box<Run>,
}

/// The name of a node that hands a gradient to an input as it is.
pub(super) const LEAF: &str = "leaf";

pub(super) type Run = dyn Fn(Asked<'_>) -> Result<Vec<Option<Gradient>>> + Send + Sync;

/// What an operator's backward is asked for, once.
pub(super) struct Asked<'a> {
    pub(super) gradient: &'a Gradient,
    pub(super) wants: &'a [Option<DType>],
    pub(super) last: bool,
    pub(super) waiting: Waiting<'a>,
}

/// Where the gradient of an input goes.
pub(super) struct Edge {
    pub(super) dtype: DType,
    /// Of the input, and so of its gradient.
    pub(super) shape: Shape,
    /// Where the input lives, if backward may read it there and no operator of the crate has made it.
    pub(super) read: Option<usize>,
    pub(super) target: Target,
}

pub(super) enum Target {
    /// Nowhere: the input is not tracked.
    Nowhere,
    /// Into the cell of the operator that made the input, in the shape that its output has, where the input is
    /// a view of that.
    Cell(Consumed, Option<Shape>),
    /// To the sink, for a variable; or to candle, as the gradient of the argument of that number.
    Argument(Tensor, usize),
}

/// A call, as one of its consumers has it.
pub(super) struct Consumed {
    call: Arc<Call>,
    _alive: Arc<()>,
}

/// Gradients waiting for an operator, one a backward pass.
#[derive(Default)]
pub(super) struct Cell(Mutex<Vec<(Pass, Gradient)>>);

impl Cell {
    fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }

    fn take(&self) -> Option<Gradient> {
        self.take_of(Pass::current())
    }

    fn take_of(&self, pass: Pass) -> Option<Gradient> {
        let mut waiting = lock(&self.0);
        let at = waiting.iter().position(|(other, _)| *other == pass)?;
        Some(waiting.swap_remove(at).1)
    }

    pub(super) fn add(&self, gradient: Gradient) -> Result<()> {
        let sum = match self.take() {
            None => gradient,
            Some(before) => before.add(gradient)?,
        };
        lock(&self.0).push((Pass::current(), sum));
        Ok(())
    }
}

/// Tells apart the gradients of passes that share a graph: on several threads at once, or one
/// after another where the first failed half way.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Pass(u64);

impl Pass {
    fn current() -> Self {
        CURRENT.get()
    }

    fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::Relaxed))
    }

    /// Runs a `part` of this thread's pass. Should it fail or panic, whatever the pass left waiting is left behind.
    pub(super) fn attempt<T>(part: impl FnOnce() -> Result<T>) -> Result<T> {
        struct Failed;
        impl Drop for Failed {
            fn drop(&mut self) {
                CURRENT.set(Pass::next());
            }
        }
        let failed = Failed;
        let result = part()?;
        std::mem::forget(failed);
        Ok(result)
    }

    /// Begins a pass inside of this thread's, which goes on once the guard is dropped.
    pub(super) fn inner() -> Inner {
        Inner(CURRENT.replace(Self::next()))
    }
}

/// Goes back to the outer pass, on error and panic too.
pub(super) struct Inner(Pass);

impl Drop for Inner {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

thread_local! {
    static CURRENT: StdCell<Pass> = StdCell::new(Pass::next());
}

/// What a pass leaves of the graph it goes through.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Graph {
    /// All of it, as candle does.
    Kept,
    /// Older calls than that of this number. Of the others, what has gone back and no other call needs is
    /// freed on the way.
    FreedFrom(u64),
}

impl Graph {
    pub(crate) const FREED: Self = Self::FreedFrom(0);

    /// What exists by now is kept.
    pub(crate) fn freed_from_here() -> Self {
        Self::FreedFrom(stepped::calls())
    }

    fn frees(self, number: u64) -> bool {
        matches!(self, Self::FreedFrom(first) if number >= first)
    }
}

impl Call {
    pub(super) fn new(name: &'static str, run: Box<Run>, edges: Vec<Edge>) -> Arc<Self> {
        let number = stepped::next_call();
        let whole = edges.iter().all(Edge::is_whole);
        let leaf = name == LEAF && edges.iter().any(Edge::is_variable);
        let way = Mutex::new(Some(Arc::new(Way { edges, run })));
        Arc::new(Self {
            name,
            number,
            whole,
            leaf,
            way,
            consumed: Arc::new(()),
            cell: Cell::default(),
        })
    }

    pub(super) fn consume(self: &Arc<Self>) -> Consumed {
        Consumed { call: self.clone(), _alive: self.consumed.clone() }
    }

    /// Sends on `gradient`, of the output, and then all that comes of it: into the sink, where the call is
    /// [`whole`](Self::whole).
    pub(super) fn send_all(self: &Arc<Self>, gradient: Gradient) -> Result<()> {
        self.cell.add(gradient)?;
        let mut due = BTreeMap::from([(self.number, self.clone())]);
        // Every consumer of an output has a larger number than what made it.
        while let Some((_, call)) = due.pop_last() {
            let (gradient, way, last) = call.begin()?;
            if let Some(gradient) = gradient {
                call.send_on(gradient, &way, last)?;
            }
            for edge in &way.edges {
                if let Target::Cell(Consumed { call, .. }, _) = &edge.target {
                    due.entry(call.number).or_insert_with(|| call.clone());
                }
            }
        }
        Ok(())
    }

    /// The gradient that waits for this pass, and the way on: taken where the graph is freed, and no
    /// consumer is left nor another pass waiting. Also whether nobody else has that way, now or later.
    fn begin(&self) -> Result<(Option<Gradient>, Arc<Way>, bool)> {
        let mut way = lock(&self.way);
        let gradient = self.cell.take();
        let unused = Arc::strong_count(&self.consumed) == 1 && self.cell.is_empty();
        let freed = unused && sink::graph().frees(self.number);
        let taken = if freed { way.take() } else { way.clone() };
        let way = taken.ok_or(GraphError::Freed { op: self.name })?;
        let last = Arc::strong_count(&way) == 1;
        Ok((gradient, way, last))
    }

    /// Computes the gradients of the inputs from that of the output, and sends them on. Returns
    /// those for candle, with the numbers of its arguments.
    fn send_on(&self, gradient: Gradient, way: &Way, last: bool) -> Result<Vec<(usize, Tensor)>> {
        if second_order::is_wanted() && !sink::is_open() {
            return Err(GraphError::SecondOrder { op: self.name }.into());
        }
        if let Some(input) = stepped::since(self.number, way.edges.iter().map(|edge| edge.read)) {
            let shape = way.edges[input].shape.clone();
            return Err(GraphError::Modified { op: self.name, input, shape }.into());
        }
        autocast::clear_cast_cache();
        let wants: Vec<_> = way.edges.iter().map(Edge::wants).collect();
        let dtype = gradient.tensor().dtype();
        let gradient = gradient.into_dtype(dtype)?;
        if dtype == DType::F16 {
            f16_gradients::f16_gradient(sink::is_open());
        }
        // A user's operator runs in a pass of its own.
        let pass = Pass::current();
        let waiting = |i| way.edges.get(i).map_or(Ok(None), |edge: &Edge| edge.take_waiting(pass));
        let waiting = Waiting(&waiting);
        let gradients = (way.run)(Asked { gradient: &gradient, wants: &wants, last, waiting })?;
        if gradients.len() != wants.len() {
            let (got, expected) = (gradients.len(), wants.len());
            return Err(GraphError::GradientCount { op: self.name, got, expected }.into());
        }
        let mut arguments = Vec::new();
        let sends = way.edges.iter().zip(wants).zip(gradients);
        for (input, ((edge, want), gradient)) in sends.enumerate() {
            let (Some(want), Some(gradient)) = (want, gradient) else { continue };
            if gradient.tensor().shape() != &edge.shape {
                let (got, expected) = (gradient.tensor().shape().clone(), edge.shape.clone());
                return Err(
                    GraphError::GradientShape { op: self.name, input, got, expected }.into()
                );
            }
            let gradient = gradient.into_dtype(want)?;
            match &edge.target {
                Target::Nowhere => {}
                Target::Cell(Consumed { call, .. }, None) => call.cell.add(gradient)?,
                Target::Cell(Consumed { call, .. }, Some(output)) => {
                    call.cell.add(gradient.reshape(output)?)?
                }
                Target::Argument(variable, _) if edge.sinks() => sink::add(variable, gradient)?,
                Target::Argument(_, i) => arguments.push((*i, gradient.into_tensor())),
            }
        }
        Ok(arguments)
    }

    /// What candle is told of the gradients of the custom op's arguments.
    pub(super) fn backward(&self, args: &[&Tensor]) -> Result<Vec<Option<Tensor>>> {
        let mut out = vec![None; args.len()];
        let (gradient, way, last) = self.begin()?;
        if let Some(gradient) = gradient {
            for (i, gradient) in self.send_on(gradient, &way, last)? {
                out[i] = Some(gradient);
            }
        }
        // candle panics where a tracked argument that is no variable gets no gradient.
        for edge in &way.edges {
            if let Target::Argument(arg, i) = &edge.target
                && out[*i].is_none()
                && !arg.is_variable()
            {
                out[*i] = Some(arg.zeros_like()?);
            }
        }
        for (gradient, arg) in out.iter_mut().zip(args) {
            if gradient.is_none() && !arg.is_variable() {
                *gradient = Some(arg.detach()); // of a token, which nobody reads
            }
        }
        Ok(out)
    }
}

impl Edge {
    fn is_variable(&self) -> bool {
        matches!(&self.target, Target::Argument(arg, _) if arg.is_variable())
    }

    fn sinks(&self) -> bool {
        self.is_variable() && sink::is_open()
    }

    /// Whether it goes to a variable by way of a leaf.
    fn is_to_leaf(&self) -> bool {
        matches!(&self.target, Target::Cell(Consumed { call, .. }, _) if call.leaf)
    }

    fn wants(&self) -> Option<DType> {
        match self.target {
            Target::Nowhere => None,
            _ if self.sinks() || self.is_to_leaf() && sink::is_open() => {
                Some(sink::dtype(self.dtype))
            }
            _ => Some(self.dtype),
        }
    }

    /// What other consumers have sent where this edge goes, in the dtype and the shape of the input.
    fn take_waiting(&self, pass: Pass) -> Result<Option<Gradient>> {
        let Target::Cell(Consumed { call, .. }, _) = &self.target else { return Ok(None) };
        if call.leaf {
            return Ok(None);
        }
        let Some(gradient) = call.cell.take_of(pass) else { return Ok(None) };
        gradient.into_dtype(self.dtype)?.reshape(&self.shape).map(Some)
    }

    fn is_whole(&self) -> bool {
        match &self.target {
            Target::Nowhere => true,
            Target::Cell(Consumed { call, .. }, _) => call.whole,
            Target::Argument(arg, _) => arg.is_variable(),
        }
    }
}
