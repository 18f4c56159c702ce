//! How a pass goes through the nodes: each receives the sum of what its consumers sent, and sends on.

use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::gradient::Gradient;
use super::maps::ById;
use super::node::{Edge, LEAF, Node, Saved, Target};
use super::operator::{Arrivals, Arrive, Backward};
use super::pass::{self, Pass, PendingNode};
use super::profile::Timer;
use super::version::{self, Dependency};
use super::{frozen, second_order};
use crate::autocast;
use crate::error::GraphError;
use crate::kernels::accumulator;
use crate::kernels::choice::algorithm;

impl Node {
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
        let read = || saved.dependencies.iter().filter(|one| one.in_backward);
        let written = version::written_since(self.number, read().map(|source| source.read));
        if let Some(Dependency { input, shape, .. }) = written.and_then(|at| read().nth(at)) {
            let (op, input) = (self.name, *input);
            let shape = shape.clone().or_else(|| Some(saved.edges.get(input)?.shape.clone()));
            let shape = shape.unwrap_or_else(|| ().into());
            return Err(GraphError::Modified { op, input, shape }.into());
        }
        let timer = if self.name == LEAF { None } else { Timer::start()? };
        autocast::clear_cast_cache();
        let wants: Vec<_> = saved.edges.iter().map(|edge| edge.wants(pass)).collect();
        let wanted = timer.is_some().then(|| wants.iter().map(Option::is_some).collect());
        let dtype = gradient.tensor().dtype();
        let gradient = gradient.into_dtype(dtype)?;
        if dtype == DType::F16 {
            pass.note_f16();
        }
        let arrivals = (&saved.edges[..], RefCell::new(&mut *pass));
        let arrivals = Arrivals(&arrivals);
        if timer.is_some() {
            algorithm::take();
        }
        let gradients = {
            let _alone = saved.grad_fn.is_user().then(pass::alone);
            let ctx = Backward {
                saved: &(),
                output: None,
                gradient: gradient.tensor(),
                owns_gradient: gradient.is_owned(),
                last,
                wants: &wants,
                arrivals,
            };
            saved.grad_fn.call(&gradient, ctx)?
        };
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
            let gradient = match &edge.target {
                // First, as it may lie in memory as the view does: then nothing is copied.
                Target::Node(_, Some(view)) => view.gradient(gradient)?,
                _ => gradient,
            };
            let gradient = gradient.into_dtype(want)?;
            match (&edge.target, &mut pass.leaves) {
                (Target::Nowhere, _) => {}
                (Target::Node(node, _), _) => pass.send(node, Some(gradient))?,
                (Target::Argument(input, _), Some(leaves)) if input.is_variable() => {
                    leaves.add(input, gradient)?
                }
                (Target::Argument(_, i), _) => arguments.push((*i, gradient.into_tensor())),
            }
        }
        if let Some(timer) = timer {
            let shapes = saved.edges.iter().map(|edge| edge.shape.clone()).collect();
            timer.stop(self.name, gradient.tensor(), shapes, wanted, algorithm::take())?;
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
        let Some(PendingNode { node, gradient }) = pending else {
            return Err(GraphError::Nested { op: self.name }.into());
        };
        let (saved, last) = self.begin(pass.graph, node)?;
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
            let node = pending.node.node.clone();
            if !node.is_whole {
                return Err(GraphError::TooDeep { op: node.name }.into());
            }
            let (saved, last) = node.begin(pass.graph, pending.node)?;
            node.run_or_skip(pass, pending.gradient, &saved, last)?;
            pass.has_run(&saved.edges)?;
        }
        Ok(())
    }

    /// How often this node and those below use each variable. Every one of these uses runs backward or is skipped,
    /// once, in a pass from here.
    pub(super) fn uses(self: &Arc<Self>) -> ById<usize> {
        let (mut uses, mut seen) = (ById::default(), HashSet::from([self.number]));
        let mut rest = vec![self.clone()];
        while let Some(node) = rest.pop() {
            let Some(saved) = node.saved() else { continue };
            for edge in &saved.edges {
                match &edge.target {
                    Target::Nowhere => {}
                    Target::Node(node, _) => {
                        if seen.insert(node.number()) {
                            rest.push(node.node.clone());
                        }
                    }
                    Target::Argument(input, _) => *uses.entry(input.id()).or_default() += 1,
                }
            }
        }
        uses
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
}

impl Edge {
    /// The dtype that the input's gradient is wanted in.
    fn wants(&self, pass: &Pass) -> Option<DType> {
        let leaf = match &self.target {
            Target::Nowhere => return None,
            Target::Node(node, _) => node.node.is_leaf,
            Target::Argument(arg, _) if frozen::is_frozen(arg) => return None,
            Target::Argument(arg, _) => arg.is_variable(),
        };
        Some(if leaf && pass.leaves.is_some() { accumulator(self.dtype) } else { self.dtype })
    }

    /// What other consumers have sent so far where this edge goes, in the dtype and the shape of the input.
    fn take_pending(&self, pass: &mut Pass) -> Result<Option<Gradient>> {
        let Target::Node(node, view) = &self.target else { return Ok(None) };
        if node.node.is_leaf || view.as_ref().is_some_and(|view| !view.is_in_order()) {
            return Ok(None);
        }
        let Some(gradient) = pass.take_so_far(node.number()) else { return Ok(None) };
        gradient.into_dtype(self.dtype)?.reshape(&self.shape).map(Some)
    }
}

impl Arrive for (&[Edge], RefCell<&mut Pass>) {
    fn take_pending(&self, input: usize) -> Result<Option<Gradient>> {
        let (edges, pass) = self;
        edges.get(input).map_or(Ok(None), |edge| edge.take_pending(&mut pass.borrow_mut()))
    }

    fn note_f16(&self) {
        self.1.borrow_mut().note_f16();
    }
}
